"""The order of a shuffled epoch: every sample once, in no pattern, and the same for ever."""

import collections
import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.order import SequentialOrder, ShuffledOrder

SIZES = st.integers(0, 300) | st.sampled_from([2**power + near for power in range(1, 17) for near in (-1, 0, 1)])


def shuffled(length, seed=0, epoch=0, **names):
    """The whole order."""
    return ShuffledOrder(length, seed=seed, epoch=epoch, **names)[np.arange(length)]


def chi_square(counts):
    """How far counts are from being equal, in standard deviations of what chance would do."""
    counts = np.asarray(counts, np.float64).ravel()
    freedom = len(counts) - 1
    return (((counts - counts.mean()) ** 2 / counts.mean()).sum() - freedom) / math.sqrt(2 * freedom)


@given(SIZES, st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 3), st.text(max_size=5))
def test_every_index_comes_once(length, seed, epoch, pass_index, salt):
    """The order is a permutation, as int64, for every length, seed, epoch, pass and salt."""
    order = shuffled(length, seed=seed, epoch=epoch, pass_index=pass_index, salt=salt)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(length))


@given(SIZES)
def test_an_order_has_a_length(length):
    """As many positions as samples."""
    assert len(ShuffledOrder(length, seed=0, epoch=0)) == len(SequentialOrder(length)) == length


@given(st.integers(1, 2**62), st.lists(st.integers(0, 2**62), max_size=20), st.integers(0, 9))
def test_positions_are_independent(length, numbers, seed):
    """The index at a position is the same whatever else is asked; in a huge order, too, all are different and exist."""
    order = ShuffledOrder(length, seed=seed, epoch=0)
    positions = np.unique(np.array(numbers, np.int64) % length)
    indices = order[positions]
    assert indices.tolist() == [order[np.array([position])].item() for position in positions]
    assert len(np.unique(indices)) == len(positions)
    assert ((indices >= 0) & (indices < length)).all()


def test_the_order_never_changes():
    """A resumed run would repeat and lose samples if another release shuffled differently."""
    assert shuffled(10, seed=42).tolist() == [7, 2, 8, 6, 0, 5, 4, 9, 1, 3]
    assert shuffled(10, seed=42, epoch=3, pass_index=1, salt="val").tolist() == [4, 6, 5, 9, 1, 2, 7, 0, 8, 3]
    assert shuffled(7, seed=-(2**70), epoch=2**40, salt="\N{SNOWMAN}").tolist() == [5, 0, 2, 4, 1, 3, 6]
    million = ShuffledOrder(10**6, seed=1, epoch=2, salt="train 0")
    assert million[np.array([0, 1, 2, 499_999, 999_999])].tolist() == [825709, 312261, 94557, 23288, 530146]
    assert ShuffledOrder(2**62 + 1, seed=0, epoch=0)[np.array([0, 1, 2**62])].tolist() == [
        2496172039767508043,
        3614475373366944215,
        3267499517154578453,
    ]


def test_everything_that_names_a_pass_counts():
    """Another seed, epoch, pass or salt gives another order; numbers of NumPy the same as Python's."""
    base = {"seed": 1, "epoch": 1, "pass_index": 1, "salt": "a"}
    changes = [{}, {"seed": 2}, {"epoch": 2}, {"pass_index": 2}, {"salt": "b"}, {"seed": 11, "epoch": 0}]
    assert len({tuple(shuffled(100, **(base | change)).tolist()) for change in changes}) == len(changes)
    assert np.array_equal(shuffled(100, np.int64(3), np.int32(2)), shuffled(100, 3, 2))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_frequent(length):
    """Over seeds, every permutation comes as often as any other."""
    counts = collections.Counter(
        tuple(shuffled(length, seed=seed).tolist()) for seed in range(50 * math.factorial(length))
    )
    assert abs(chi_square([counts[order] for order in itertools.permutations(range(length))])) < 4.5


@pytest.mark.parametrize("length", [7, 10, 64, 1000, 4097, 2**17 + 3])
def test_there_is_no_pattern(length):
    """Over epochs, every sample comes everywhere, after any other, and stays in its place by chance only."""
    num_epochs = min(2000, max(10, 400_000 // length))
    orders = np.stack([shuffled(length, seed=5, epoch=epoch) for epoch in range(num_epochs)])
    size = min(length, 20)
    where = np.broadcast_to(np.arange(length) * size // length, orders.shape)
    what = orders * size // length
    # Each pair of a place and a sample; without replacement, there are (size - 1) ** 2 degrees of freedom, not all.
    counts = np.histogram2d(where.ravel(), what.ravel(), bins=size)[0]
    expected = (
        num_epochs * np.outer(np.bincount(where[0], minlength=size), np.bincount(where[0], minlength=size)) / length
    )
    freedom = (size - 1) ** 2
    spread = length / (length - 1)
    assert abs(((counts - expected) ** 2 / expected).sum() / spread - freedom) < 5 * math.sqrt(2 * freedom)
    steps = (orders[:, 1:] - orders[:, :-1]) % length
    steps = np.bincount((steps.ravel() - 1) * size // length, minlength=size)
    sizes = np.bincount(np.arange(length - 1) * size // length, minlength=size)
    assert abs(chi_square(steps[sizes > 0] / sizes[sizes > 0] * sizes.mean())) < 5
    # Neighbours are not alike: without replacement the correlation is -1 / (length - 1).
    correlation = np.corrcoef(orders[:, 1:].ravel(), orders[:, :-1].ravel())[0, 1] + 1 / (length - 1)
    assert abs(correlation) < 5 / math.sqrt(steps.sum())
    # The same place of two epochs is unrelated: one sample on average is where it was.
    same = (orders[1:] == orders[:-1]).sum(axis=1)
    assert abs(same.mean() - 1) < 5 / math.sqrt(len(same))


def test_a_hundred_million_samples_need_no_memory():
    """The first batch takes the memory of a batch, where a sort would need gigabytes."""
    tracemalloc.start()
    for order in (ShuffledOrder(100_000_000, seed=0, epoch=0), SequentialOrder(100_000_000)):
        assert len(order[np.arange(4096)]) == 4096
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
