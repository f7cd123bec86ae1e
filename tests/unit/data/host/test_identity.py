"""What data hosts compare of their datasets."""

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, SubsetRandomSampler

from lightning_sm.data.host.identity import describe_data


class Numbers(Dataset):
    """A number for each index."""

    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length


class Transformed(Dataset):
    """A wrapper, as users write them to give the parts of a split transforms of their own."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)


class Downloaded(Numbers):
    """A dataset that tells its version."""

    def __init__(self, version):
        super().__init__()
        self.version = version

    def fingerprint(self):
        return self.version


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
    """Two splits of one dataset differ, wherever the subset is; the same split is equal."""
    assert describe_data(wrap(half([1, 2, 3]))) == describe_data(wrap(half([1, 2, 3])))
    assert describe_data(wrap(half([1, 2, 3]))) != describe_data(wrap(half([1, 2, 4])))
    assert describe_data(wrap(half([1, 2, 3]))) != describe_data(wrap(half([1, 3, 2])))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_fingerprints_of_all_datasets_count(wrap):
    """The user's own fingerprint is found in a dataset within another."""
    assert describe_data(wrap(Downloaded("1"))) != describe_data(wrap(Downloaded("2")))


def test_indices_are_compared_by_value():
    """A list, a range, a tensor and a list of tensors of the same indices are the same."""
    kinds = [[2, 3, 4], range(2, 5), torch.tensor([2, 3, 4]), [torch.tensor(number) for number in (2, 3, 4)]]
    assert len({tuple(describe_data(half(indices))) for indices in kinds}) == 1


def test_keys_that_are_no_numbers_are_compared_if_they_can_be():
    """Strings count; of objects, whose texts hold addresses, only the number does."""
    assert describe_data(half(["a", "b"])) != describe_data(half(["a", "c"]))
    assert describe_data(half([object(), object()])) == describe_data(half([object(), object()]))


def test_what_a_sampler_of_a_subset_selects_counts():
    """Splitting by SubsetRandomSampler is splitting, too."""
    first, other = SubsetRandomSampler([1, 2, 3]), SubsetRandomSampler([1, 2, 4])
    assert describe_data(Numbers(), first) != describe_data(Numbers(), other)


def test_datasets_may_refer_to_each_other():
    """A circle of datasets ends."""
    one = Transformed(None)
    one.dataset = Transformed(one)
    assert len(describe_data(one)) == 4
