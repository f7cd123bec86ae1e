"""The orders of samplers with a state of their own."""

import collections
import itertools
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, WeightedRandomSampler

from lightning_sm.data.host.sampler import SamplerPass, UserSampler
from lightning_sm.data.ipc.processes import in_fork
from lightning_sm.data.plan.seeds import SampleSeeds
from lightning_sm.errors import DataSettingsError

LENGTH = 40


class Own(Sampler):
    """Draws from a generator that it keeps."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(LENGTH, generator=self.rng).tolist())
        order = list(range(LENGTH))
        self.rng.shuffle(order)
        return iter(order)


class Lazy(Own):
    """Makes its generator in the first pass."""

    def __init__(self):
        super().__init__(None)

    def __iter__(self):
        self.rng = self.rng or random.Random(0)
        return super().__iter__()


class Counting(Sampler):
    """Draws an order for each pass."""

    def __init__(self):
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        return iter(random.Random(self.num_passes).sample(range(LENGTH), LENGTH))


class Taking(Sampler):
    """Takes the next ten of all samples, from a place that only it knows.

    Args:
        place: An iterator, a queue, or another container of the next samples.
        take: Takes one of them.
    """

    def __init__(self, place, take):
        self.place, self.take = place, take

    def __iter__(self):
        return iter([self.take(self.place) for _ in range(10)])


class Place:
    """The attribute of an object."""

    index = 0


def _advance(place):
    place.index += 1
    return place.index - 1


def _rotate(queue):
    queue.rotate(-1)
    return queue[-1]


def _add(tensor):
    tensor += 1
    return int(tensor) - 1


def _increment(numbers):
    numbers[0] += 1
    return numbers[0] - 1


STATES = {
    "a deque": lambda: Taking(collections.deque(range(LENGTH)), _rotate),
    "an iterator": lambda: Taking(itertools.cycle(range(LENGTH)), next),
    "a generator": lambda: Taking((index for index in range(10 * LENGTH)), next),
    "a tensor": lambda: Taking(torch.zeros((), dtype=torch.long), _add),
    "an array": lambda: Taking(np.zeros((), dtype=np.int64), _add),
    "an object": lambda: Taking(Place(), _advance),
    "a list": lambda: Taking([0], _increment),
}


class Growing(Counting):
    """Yields more samples in each pass, until all."""

    def __iter__(self):
        self.num_passes = min(self.num_passes + 1, 3)
        return iter(range(self.num_passes))


class Rotating(Sampler):
    """Changes a list in place."""

    def __init__(self):
        self.order = list(range(LENGTH))
        self.num_calls = [0]

    def __iter__(self):
        self.num_calls[0] += 1
        random.shuffle(self.order)
        return iter(self.order)


class Mixed(Sampler):
    """Takes from samplers in turn."""

    def __init__(self, samplers):
        self.samplers = samplers

    def __iter__(self):
        for samples in zip(*self.samplers, strict=True):
            yield from samples


class WithoutBase:
    """A sampler that is not a Sampler."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(LENGTH).tolist())

    def __len__(self):
        return LENGTH


SAMPLERS = {
    "torch.Generator": lambda: Own(torch.Generator().manual_seed(0)),
    "NumPy's Generator": lambda: Own(np.random.default_rng(0)),
    "RandomState": lambda: Own(np.random.RandomState(0)),
    "random.Random": lambda: Own(random.Random(0)),
    "a generator of the first pass": Lazy,
    "a counter": Counting,
    "in a batch sampler": lambda: BatchSampler(Own(np.random.default_rng(0)), 8, drop_last=False),
    "a counter in a batch sampler": lambda: BatchSampler(Counting(), 8, drop_last=False),
    "in a list": lambda: Mixed([Own(random.Random(0)), Own(random.Random(0))]),
    "in a dictionary": lambda: Own({"train": random.Random(0)}["train"]),
    "another class in a batch sampler": lambda: BatchSampler(WithoutBase(), 8, drop_last=False),
    "a list in place": Rotating,
    "torch's own": lambda: WeightedRandomSampler([1.0] * LENGTH, LENGTH),
}


def pass_of(epoch, pass_index=0, seed=0):
    """Describe a pass."""
    return SamplerPass(epoch, SampleSeeds(seed, "train", 0, epoch, pass_index))


def order(sampler, epoch, pass_index=0, seed=0):
    """Return an order as a data host computes it."""
    earlier = [pass_of(past, seed=seed) for past in range(epoch)]
    return in_fork(lambda: UserSampler(sampler).order(pass_of(epoch, pass_index, seed), earlier))


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_each_epoch_has_another_order(make):
    """As with a local loader, whose samplers go on where they stopped; the same on each host, whatever came before."""
    asked_in_order, asked_backwards = make(), make()
    orders = [order(asked_in_order, epoch) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [order(asked_backwards, epoch) for epoch in (2, 1, 0)] == orders[::-1]


@pytest.mark.parametrize("name", ["torch.Generator", "NumPy's Generator", "RandomState", "random.Random", "in a list"])
def test_the_seed_of_the_run_and_the_pass_decide(name):
    """Runs with other seeds, and passes within an epoch, have other orders."""
    sampler = SAMPLERS[name]()
    assert len({str(order(sampler, 0, *which)) for which in ((0, 0), (1, 0), (0, 1))}) == 3


def test_two_generators_draw_different_numbers():
    """Each generator of a sampler has a seed of its own."""
    both = order(SAMPLERS["in a list"](), 0)
    assert both[::2] != both[1::2]


@pytest.mark.parametrize("make", [Counting, Growing])
def test_a_counter_goes_on_as_in_a_local_loader(make):
    """The order of an epoch is that of a sampler that has run in all epochs before."""
    local = make()
    assert [list(local) for _ in range(5)] == [order(make(), epoch) for epoch in range(5)]


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_a_state_of_any_kind_goes_on_as_in_a_local_loader(make):
    """Wherever the sampler keeps it."""
    local = make()
    assert [list(local) for _ in range(4)] == [order(make(), epoch) for epoch in range(4)]


def test_an_endless_sampler_goes_on_where_it_was_cut():
    """Earlier passes end at the limit of the Trainer, and so does this one."""
    sampler = UserSampler(itertools.cycle(range(LENGTH)))
    sampler.advance([pass_of(0), pass_of(1)], stop=7)
    cut = sampler.arrays(pass_of(2), 7, in_batches=False, has_keys=True)
    assert (cut.keys.tolist(), cut.offsets, cut.is_cut) == (list(range(14, 21)), None, True)


def test_batches_are_cut_as_a_whole():
    """The limit of a batch sampler counts batches, and one that ends there is not cut."""
    sampler = UserSampler([[0, 1], [2], [3, 4]])
    for stop, keys, is_cut in ((2, [0, 1, 2], True), (3, [0, 1, 2, 3, 4], False), (0, [0, 1, 2, 3, 4], False)):
        made = sampler.arrays(pass_of(0), stop, in_batches=True, has_keys=True)
        assert (made.keys.tolist(), made.is_cut) == (keys, is_cut)
        assert made.offsets.tolist() == [0, 2, 3, 5][: len(made.offsets)]


@pytest.mark.parametrize(("items", "in_batches"), [(None, False), (lambda: [range(50)] * 50, True)])
def test_a_sampler_without_end_or_limit_is_an_error(items, in_batches):
    """Not a process that takes all memory: it says which limit to set."""
    for stop in (0, 10**9):
        endless = itertools.cycle(items()) if in_batches else itertools.count()
        with pytest.raises(DataSettingsError, match=r"sampler of train has yielded .* set limit_train_batches"):
            UserSampler(endless, "train", most=1000).arrays(pass_of(0), stop, in_batches=in_batches, has_keys=True)
    with pytest.raises(DataSettingsError, match="set limit_train_batches"):
        UserSampler(itertools.count(), "train", most=1000).advance([pass_of(0)])


def test_a_counter_starts_with_the_loader():
    """Where loaders are reloaded, the passes before the sampler was made do not count."""
    assert UserSampler(Counting()).order(pass_of(7), [pass_of(6)]) == order(Counting(), 1)


class Restless(Sampler):
    """Keeps no state, and notes its passes where nobody looks for one.

    Args:
        handle: Something in its attributes.
    """

    passes: ClassVar[list[int]] = []

    def __init__(self, handle=None):
        self.handle = handle
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        self.passes.append(1)
        return iter(self.rng.permutation(LENGTH).tolist())


@pytest.mark.parametrize(
    ("make", "num_passes"),
    [(Restless, 2), (lambda: Restless(iter([])), 2), (lambda: Restless(x for x in ()), 10)],
    ids=["no state", "an iterator", "what cannot be pickled"],
)
def test_earlier_passes_end_with_the_first_that_changes_nothing(monkeypatch, make, num_passes):
    """After a restart in epoch 9, a sampler without state runs one of them; one whose state is unknown, all."""
    monkeypatch.setattr(Restless, "passes", [])
    UserSampler(make()).order(pass_of(9), [pass_of(epoch) for epoch in range(9)])
    assert len(Restless.passes) == num_passes


def test_samplers_of_torch_run_once(monkeypatch):
    """They keep no state but a generator, so the earlier epochs do not matter."""
    runs = []
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: runs.append(self) or iter(range(4)))
    sampler = BatchSampler(RandomSampler(range(4)), 2, drop_last=False)
    UserSampler(sampler).order(pass_of(5), [pass_of(epoch) for epoch in range(5)])
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("samples", "in_batches", "expected"),
    [
        ([3, 4], False, True),
        ([np.int32(3)], False, True),
        ([torch.tensor(3)], False, True),
        (["a"], False, False),
        ([(1, 2)], False, False),
        ([], False, True),
        ([[3, 4]], True, True),
        (torch.arange(6).split(2), True, True),
        ([["a"]], True, False),
        ([[], [3]], True, True),
        ([], True, True),
    ],
)
def test_keys_that_are_no_integers_are_recognised(samples, in_batches, expected):
    """By the first sample, if there is one."""
    assert UserSampler(samples).yields_indices(in_batches=in_batches) is expected


def test_looking_at_the_first_sample_changes_nothing():
    """The first pass of the training is the sampler's first."""
    sampler = Counting()
    assert UserSampler(sampler).yields_indices(in_batches=False)
    assert sampler.num_passes == 0


def test_a_sampler_that_fails_does_so_when_it_is_iterated():
    """As with a local loader, which may never be iterated."""
    assert UserSampler(WeightedRandomSampler([], 4)).yields_indices(in_batches=False)
