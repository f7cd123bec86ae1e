"""Tests of what data hosts compare about their datasets."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, SubsetRandomSampler

from lightning_sm.data.host.identity import compared_fields, datasets_in, describe_data


class Numbers(Dataset):
    """A number for each index."""

    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length


class Transformed(Dataset):
    """A wrapper such as users write to give the parts of a split different transforms."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)


class Downloaded(Numbers):
    """A dataset with its version as its fingerprint."""

    def __init__(self, version):
        super().__init__()
        self.version = version

    def fingerprint(self):
        return self.version


def texts(dataset):
    """Return what is compared of a dataset and of the datasets within it."""
    return [describe_data(one) for one in datasets_in(dataset)]


def half(indices):
    """Select some numbers."""
    return Subset(Numbers(), indices)


WRAPPERS = {
    "itself": lambda part: part,
    "in a subset": lambda part: Subset(part, [1, 0]),
    "in a concatenation": lambda part: ConcatDataset([Numbers(), part]),
    "in a dataset of the user's": Transformed,
    "in a list": lambda part: Transformed([part]),
    "in a dictionary": lambda part: Transformed({"a": part}),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_what_a_subset_selects_counts(wrap):
    """Different splits of a dataset differ, wherever the subset is; equal splits do not."""
    assert texts(wrap(half([1, 2, 3]))) == texts(wrap(half([1, 2, 3])))
    assert texts(wrap(half([1, 2, 3]))) != texts(wrap(half([1, 2, 4])))
    assert texts(wrap(half([1, 2, 3]))) != texts(wrap(half([1, 3, 2])))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_fingerprints_of_all_datasets_count(wrap):
    """A user's fingerprint is found even in a dataset within another."""
    assert texts(wrap(Downloaded("1"))) != texts(wrap(Downloaded("2")))


def test_indices_are_compared_by_value():
    """A list, a range, a tensor and a list of tensors with the same indices compare equal."""
    kinds = [[2, 3, 4], range(2, 5), torch.tensor([2, 3, 4]), [torch.tensor(number) for number in (2, 3, 4)]]
    assert all(texts(half(indices)) == texts(half(kinds[0])) for indices in kinds)


def test_keys_that_are_no_numbers_are_compared_if_they_can_be():
    """Strings are compared; of other objects, whose texts contain addresses, only the number is."""
    assert texts(half(["a", "b"])) != texts(half(["a", "c"]))
    assert texts(half([object(), object()])) == texts(half([object(), object()]))


def test_what_a_sampler_of_a_subset_selects_counts():
    """A split made by SubsetRandomSampler is compared like one made by Subset."""
    loaders = [DataLoader(Numbers(), sampler=SubsetRandomSampler([1, 2, last])) for last in (3, 4)]
    first, other = (compared_fields("train_dataloader()", [loader], []) for loader in loaders)
    assert first != other


def test_datasets_may_refer_to_each_other():
    """The search for datasets ends even if they refer to each other."""
    one = Transformed(None)
    one.dataset = Transformed(one)
    assert len(datasets_in(one)) == 2
