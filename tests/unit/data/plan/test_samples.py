"""The order of an epoch: every sample once, in the same batches, whatever the number of ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.samples import BatchPlan, SamplePlan, digest, epoch_order, num_steps
from lightning_sm.data.plan.shards import ShardPlan
from lightning_sm.errors import DataSettingsError

WORLD_SIZES = st.integers(1, 9)


def sample_batches(order, batch_size, world_size, *, drop_last=False):
    """The batches of all ranks, ``[step][rank]``, and the plan of rank 0."""
    plans = [SamplePlan(order, batch_size, drop_last, rank, world_size) for rank in range(world_size)]
    return table(plans), plans[0]


def batch_batches(batches, world_size):
    """The batches of all ranks, ``[step][rank]``, and the plan of rank 0."""
    flat = np.array([index for batch in batches for index in batch], dtype=np.int64)
    offsets = np.cumsum([0, *map(len, batches)])
    plans = [BatchPlan(flat, offsets, rank, world_size) for rank in range(world_size)]
    return table(plans), plans[0]


def table(plans):
    """What each rank trains on, ``[step][rank]``; all ranks must have as many steps."""
    assert len({plan.num_steps for plan in plans}) == 1
    return [[plan.batch(step).tolist() for plan in plans] for step in range(plans[0].num_steps)]


def joined(nested):
    """All samples of ``[step][rank]`` batches, step by step and rank by rank."""
    return [index for step in nested for batch in step for index in batch]


def ordinary_batches(order, batch_size, *, drop_last):
    """What torch's BatchSampler yields."""
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


@given(st.integers(0, 300), st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 3), st.text(max_size=5))
def test_order_is_a_permutation(length, seed, epoch, pass_index, salt):
    """Every index comes exactly once, as int64, for every seed, epoch, pass and salt."""
    order = epoch_order(length, seed=seed, epoch=epoch, pass_index=pass_index, salt=salt)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(length))


def test_order_is_pinned():
    """The order of an epoch never changes between releases, else a resumed run would repeat and lose samples."""
    assert epoch_order(10, seed=42, epoch=0).tolist() == [9, 5, 0, 4, 7, 8, 1, 6, 2, 3]
    order = epoch_order(10, seed=42, epoch=3, pass_index=1, salt="val")
    assert order.tolist() == [3, 1, 5, 7, 0, 4, 6, 8, 2, 9]


def test_order_depends_on_everything_that_names_a_pass():
    """Another seed, epoch, pass or salt gives another order; the same ones give the same order."""
    base = {"seed": 1, "epoch": 1, "pass_index": 1, "salt": "a"}
    changes = [{}, {"seed": 2}, {"epoch": 2}, {"pass_index": 2}, {"salt": "b"}, {"seed": 11, "epoch": 0}]
    orders = {tuple(epoch_order(100, **(base | change)).tolist()) for change in changes}
    assert len(orders) == len(changes)
    assert epoch_order(100, **base).tolist() == epoch_order(100, **base).tolist()


def test_order_takes_numpy_numbers():
    """A seed that NumPy made shuffles like the same seed of Python."""
    order = epoch_order(50, seed=np.int64(3), epoch=np.int32(2))
    assert order.tolist() == epoch_order(50, seed=3, epoch=2).tolist()


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES)
def test_exact_tail_drops_and_pads_nothing(size, batch_size, world_size):
    """Step by step and rank by rank, the batches are the order itself; only fewer samples than ranks repeat."""
    order = epoch_order(size, seed=0, epoch=0)
    batches, _ = sample_batches(order, batch_size, world_size)
    assert joined(batches)[:size] == order.tolist()
    assert len(joined(batches)) == (max(size, world_size) if size else 0)
    assert all(batch for step in batches for batch in step)


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES)
def test_exact_tail_keeps_batches_even(size, batch_size, world_size):
    """All batches but those of the last step are full, and sizes within the last step differ by at most one."""
    batches, _ = sample_batches(np.arange(size), batch_size, world_size)
    assert all(len(batch) == batch_size for step in batches[:-1] for batch in step)
    last = [len(batch) for batch in batches[-1]] if batches else [0]
    assert max(last) - min(last) <= 1
    assert max(last) <= batch_size + 1


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES)
def test_drop_last_leaves_full_batches_only(size, batch_size, world_size):
    """With drop_last every batch is full, and less than one global batch at the end of the order is left out."""
    batches, _ = sample_batches(np.arange(size), batch_size, world_size, drop_last=True)
    assert all(len(batch) == batch_size for step in batches for batch in step)
    if len(joined(batches)) > size:  # the only step: it lacked fewer samples than there are ranks
        assert len(joined(batches)) == batch_size * world_size < size + world_size
        assert joined(batches) == [index % size for index in range(batch_size * world_size)]
        return
    assert joined(batches) == list(range(size))[: len(joined(batches))]
    assert 0 <= size - len(joined(batches)) < batch_size * world_size


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES, st.booleans())
def test_steps_are_counted_without_a_plan(size, batch_size, world_size, drop_last):
    """The length that a loader reports is the number of steps of its plan."""
    plan = SamplePlan(np.arange(size), batch_size, drop_last, 0, world_size)
    assert plan.num_steps == num_steps(size, batch_size, drop_last=drop_last, world_size=world_size)


@given(st.integers(0, 200), st.integers(1, 12), st.booleans())
def test_one_rank_gets_ordinary_batches(size, batch_size, drop_last):
    """A single process trains on the batches of torch's own BatchSampler."""
    order = epoch_order(size, seed=5, epoch=0).tolist()
    batches, _ = sample_batches(np.array(order), batch_size, 1, drop_last=drop_last)
    assert [step[0] for step in batches] == ordinary_batches(order, batch_size, drop_last=drop_last)


@given(st.integers(0, 300), st.integers(1, 3), st.booleans())
def test_global_batches_do_not_depend_on_the_number_of_ranks(size, factor, drop_last):
    """With a constant global batch, 1, 2, 3, 4, 6 or 12 ranks train on the same samples in every full step."""
    order = epoch_order(size, seed=9, epoch=1)
    global_batch = 12 * factor
    seen = []
    for world_size in (1, 2, 3, 4, 6, 12):
        batches, _ = sample_batches(order, global_batch // world_size, world_size, drop_last=drop_last)
        steps = [joined([step]) for step in batches]
        seen.append(steps[: size // global_batch] if drop_last else steps[: max(0, size // global_batch - 1)])
    assert all(steps == seen[0] for steps in seen)


@pytest.mark.parametrize(
    ("size", "batch_size", "world_size", "drop_last", "expected"),
    [
        pytest.param(0, 2, 3, False, [], id="no samples"),
        pytest.param(0, 2, 3, True, [], id="no samples, drop_last"),
        pytest.param(2, 4, 3, False, [[[0], [1], [0]]], id="fewer samples than ranks"),
        pytest.param(2, 4, 5, False, [[[0], [1], [0], [1], [0]]], id="far fewer samples than ranks"),
        pytest.param(2, 1, 3, True, [[[0], [1], [0]]], id="fewer samples than ranks, drop_last"),
        pytest.param(3, 2, 2, True, [[[0, 1], [2, 0]]], id="one sample less than a global batch, drop_last"),
        pytest.param(2, 2, 2, True, [], id="two samples less than a global batch, drop_last"),
        pytest.param(3, 4, 3, False, [[[0], [1], [2]]], id="as many samples as ranks"),
        pytest.param(4, 4, 3, False, [[[0, 1], [2], [3]]], id="less than one global batch"),
        pytest.param(4, 2, 2, False, [[[0, 1], [2, 3]]], id="exactly one global batch"),
        pytest.param(5, 2, 2, False, [[[0, 1, 2], [3, 4]]], id="tail joins the last full step"),
        pytest.param(6, 2, 2, False, [[[0, 1], [2, 3]], [[4], [5]]], id="tail of one sample per rank"),
        pytest.param(7, 2, 2, False, [[[0, 1], [2, 3]], [[4, 5], [6]]], id="odd tail"),
        pytest.param(7, 2, 2, True, [[[0, 1], [2, 3]]], id="odd tail dropped"),
        pytest.param(3, 1, 2, False, [[[0, 1], [2]]], id="batches of one sample"),
    ],
)
def test_batches_by_example(size, batch_size, world_size, drop_last, expected):
    """Odd sizes end as the rules say: an even extra step, a slightly larger last step, or repeated samples."""
    batches, _ = sample_batches(np.arange(size), batch_size, world_size, drop_last=drop_last)
    assert batches == expected


def test_plans_take_plain_lists():
    """A list of indices is as good as an array, an empty one included."""
    assert SamplePlan([3, 1, 2], 2, False, 0, 1).batch(1).tolist() == [2]
    assert SamplePlan([], 2, False, 0, 1).num_steps == 0


@pytest.mark.parametrize("step", [-1, 2])
def test_a_step_outside_the_pass_is_an_error(step):
    """A cursor outside the pass is refused, never served with other samples."""
    with pytest.raises(IndexError, match=rf"Step {step} does not exist \(number of steps in the pass: 2\)"):
        SamplePlan(np.arange(8), 2, False, 0, 2).batch(step)
    with pytest.raises(IndexError, match=rf"Step {step} does not exist \(number of steps in the pass: 2\)"):
        BatchPlan(np.arange(8), np.array([0, 2, 4, 6, 8]), 0, 2).batch(step)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_an_error(rank, world_size):
    """Every plan names a rank that does not exist."""
    plans = [
        lambda: SamplePlan(np.arange(8), 2, False, rank, world_size),
        lambda: BatchPlan(np.arange(8), np.array([0, 8]), rank, world_size),
        lambda: ShardPlan(16, rank, world_size),
    ]
    for plan in plans:
        with pytest.raises(ValueError, match=f"rank={rank} does not exist in world_size={world_size}"):
            plan()


def test_an_order_must_be_a_list_of_integers():
    """Floats would be cut off silently, and a table has no order."""
    for order in (np.array([0.5]), np.zeros((2, 2), dtype=np.int64), np.array([True])):
        with pytest.raises(ValueError, match="Expected a list of integers"):
            SamplePlan(order, 2, False, 0, 1)
    with pytest.raises(ValueError, match="batch_size=0"):
        SamplePlan(np.arange(8), 0, False, 0, 1)


def cut(sizes):
    """Batches of the given sizes over 0, 1, 2, ..."""
    bounds = np.cumsum([0, *sizes]).tolist()
    return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]


@given(st.lists(st.integers(1, 6), max_size=30), WORLD_SIZES)
def test_custom_batches_stay_whole_and_come_once(sizes, world_size):
    """Batches of a sampler are dealt out as they are, each once; only ranks without one repeat one of the last step."""
    custom = cut(sizes)
    batches, _ = batch_batches(custom, world_size)
    assert [len(step) for step in batches] == [world_size] * -(-len(custom) // world_size)
    dealt = [batch for step in batches for batch in step]
    assert dealt[: len(custom)] == custom
    assert all(batch in custom[len(custom) // world_size * world_size :] for batch in dealt[len(custom) :])


@given(st.integers(0, 60), WORLD_SIZES)
def test_samples_that_are_batches_stay_apart(size, world_size):
    """Without automatic batching (batch_size=None) each step has exactly one sample for a rank, and all come."""
    order = epoch_order(size, seed=3, epoch=0)
    plans = [BatchPlan(order, None, rank, world_size) for rank in range(world_size)]
    steps = [[plan.batch(step).tolist() for plan in plans] for step in range(plans[0].num_steps)]
    assert len(steps) == num_steps(size, None, drop_last=False, world_size=world_size)
    assert all(len(batch) == 1 for step in steps for batch in step)
    assert joined(steps)[:size] == order.tolist()


@given(st.lists(st.integers(1, 6), max_size=30))
def test_one_rank_gets_the_custom_batches(sizes):
    """A single process trains on exactly what the batch sampler returned."""
    batches, _ = batch_batches(cut(sizes), 1)
    assert [step[0] for step in batches] == cut(sizes)


@pytest.mark.parametrize(
    ("custom", "world_size", "expected"),
    [
        pytest.param([], 2, [], id="no batches"),
        pytest.param([[5]], 3, [[[5], [5], [5]]], id="one sample for three ranks"),
        pytest.param([[5, 6, 7]], 2, [[[5, 6, 7], [5, 6, 7]]], id="one batch for two ranks"),
        pytest.param([[1], [2, 3], [4, 5, 6]], 2, [[[1], [2, 3]], [[4, 5, 6], [4, 5, 6]]], id="one left of two"),
        pytest.param([[1], [2], [3], [4], [5]], 3, [[[1], [2], [3]], [[4], [5], [4]]], id="two left of three"),
        pytest.param([[9], [9]], 2, [[[9], [9]]], id="a sampler that repeats by itself"),
    ],
)
def test_custom_batches_by_example(custom, world_size, expected):
    """The ranks that would have no batch in the last step repeat one of its batches."""
    batches, _ = batch_batches(custom, world_size)
    assert batches == expected


def test_an_empty_custom_batch_is_named():
    """A batch without samples is the user's mistake, and the message says which one it is."""
    with pytest.raises(DataSettingsError, match="Batch 1 of the batch sampler is empty"):
        BatchPlan(np.arange(4), np.array([0, 2, 2, 4]), 0, 1)


@pytest.mark.parametrize("offsets", [[], [0], [1, 4], [0, 3], [0, 3, 2, 4], [0, 5]])
def test_offsets_must_cut_the_samples(offsets):
    """Offsets that lose, invent or reorder samples are refused."""
    with pytest.raises(ValueError, match=f"The {len(offsets)} offsets do not cut 4 samples"):
        BatchPlan(np.arange(4), np.array(offsets, dtype=np.int64), 0, 1)


@given(st.lists(st.integers(0, 100), max_size=20))
def test_digest_compares_values_only(values):
    """Integer type, byte order and memory layout do not matter, values and their order do."""
    array = np.array(values, dtype=np.int64)
    assert digest(array) == digest(array.astype(np.uint8)) == digest(array.astype(">i4")) == digest(values)
    assert digest(np.repeat(array, 2)[::2]) == digest(array)
    assert digest(np.append(array, 0)) != digest(array)
    assert values == values[::-1] or digest(array[::-1]) != digest(array)


def test_digest_is_pinned():
    """Hosts compare digests of different installations, so that they stay the same."""
    assert (digest(np.arange(5)), digest([])) == ("5ba0aa5444ab2827", "e4a6a0577479b2b4")
