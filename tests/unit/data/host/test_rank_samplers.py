"""Samplers that split the data by rank yield all of it on a data host, or are refused."""

import math

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler

from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.protocol.calls import LoaderPass
from lightning_sm.errors import DataSettingsError

LENGTH = 20


class Named(DistributedSampler):
    """A subclass that changes nothing that decides the order."""


class Backwards(DistributedSampler):
    """A subclass with an order of its own, split as torch splits it."""

    def __iter__(self):
        order = list(range(len(self.dataset)))[::-1]
        return iter(order[self.rank : self.total_size : self.num_replicas])


class Precomputed(Backwards):
    """A subclass that knows its part from the beginning."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.part = list(super().__iter__())

    def __iter__(self):
        return iter(self.part)


class Repeating(DistributedSampler):
    """A subclass that computes the size of its part in a way of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_samples = math.ceil(3 * len(self.dataset) / self.num_replicas)


class Duck(Sampler):
    """A sampler that derives from nothing and splits by rank, as fastMRI's and torchvision's do."""

    def __init__(self, num_replicas=1, rank=0):
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self):
        return iter(range(self.rank, LENGTH, self.num_replicas))


def served(sampler, **options):
    """A loader as a data host serves it."""
    return ServedLoader(DataLoader(range(LENGTH), batch_size=4, sampler=sampler, **options), "train", "train", 0)


def order(loader):
    """All samples of the first pass."""
    return loader.sampler_order(LoaderPass("1/fit/train/0", 0, 0, 0, 0)).keys.tolist()


@pytest.mark.parametrize("places", [{"num_replicas": 1, "rank": 0}, {"num_replicas": 3, "rank": 0}])
def test_a_subclass_of_distributed_sampler_yields_all_of_the_data(places):
    """Also if it was made for the ranks of the trainers, of which a data host is none."""
    loader = served(Backwards(range(LENGTH), **places))
    assert loader.description.is_split
    assert loader.description.num_samples == LENGTH
    assert order(loader) == list(range(LENGTH))[::-1]


@pytest.mark.parametrize("cls", [DistributedSampler, Named])
def test_the_order_of_torchs_own_is_that_of_the_trainers(cls):
    """A subclass without an order of its own is the same."""
    description = served(cls(range(LENGTH), num_replicas=3, rank=0, shuffle=False)).description
    assert (description.order, description.num_samples, description.is_split) == ("sequential", LENGTH, True)


@pytest.mark.parametrize("cls", [DistributedSampler, Named, Backwards])
def test_drop_last_of_the_sampler_is_not_that_of_the_loader(cls):
    """Torch's drops fewer samples than there are replicas, and here is one; the loader keeps its incomplete batch."""
    loader = served(cls(range(LENGTH), num_replicas=3, rank=0, shuffle=False, drop_last=True))
    assert not loader.description.drop_last
    assert loader.description.num_samples == LENGTH


def test_the_samples_are_those_of_the_samplers_dataset():
    """It may be a part of the loader's."""
    assert served(DistributedSampler(range(7), num_replicas=1, rank=0)).description.num_samples == 7


def test_any_object_with_rank_and_number_of_replicas_counts_as_split():
    """Also within a batch sampler of the user's own class."""

    class Batches(BatchSampler):
        pass

    assert served(Duck()).description.is_split
    loader = DataLoader(range(LENGTH), batch_sampler=Batches(Duck(), 4, drop_last=False))
    assert ServedLoader(loader, "train", "train", 0).description.is_split
    assert not served(SequentialSampler(range(LENGTH))).description.is_split


@pytest.mark.parametrize("sampler", [Duck(2, 0), Repeating(range(LENGTH), num_replicas=2, rank=0)], ids=["duck", "own"])
def test_a_part_that_cannot_be_made_whole_is_refused(sampler):
    """The rest of the data would be lost: the error says to leave the numbers out."""
    with pytest.raises(DataSettingsError, match=r"rank 0 of 2, .* Leave num_replicas and rank out"):
        served(sampler)


def test_a_part_that_was_chosen_beforehand_is_refused_in_the_first_pass():
    """The sampler yields fewer samples than there are."""
    loader = served(Precomputed(range(LENGTH), num_replicas=2, rank=0))
    with pytest.raises(DataSettingsError, match=r"yields 10 of 20 samples.* Leave num_replicas and rank out"):
        order(loader)


def test_samplers_of_the_users_are_named():
    """Torch's own samplers do not split by rank."""
    assert served(Duck()).description.own_sampler == "Duck"
    assert served(SequentialSampler(range(LENGTH))).description.own_sampler == ""
    loader = DataLoader(range(LENGTH), batch_sampler=BatchSampler(Duck(), 4, drop_last=False))
    assert ServedLoader(loader, "train", "train", 0).description.own_sampler == "Duck"
