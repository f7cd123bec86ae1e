"""The order of an epoch: every sample once, in the same batches, whatever the number of ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_sm.data.plan.order import SequentialOrder, ShuffledOrder
from lightning_sm.data.plan.samples import BatchPlan, ReceivedPlan, SamplePlan, Tail, digest, num_steps
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.errors import DataSettingsError

WORLD_SIZES = st.integers(1, 9)


def sample_batches(order, batch_size, world_size, *, drop_last=False, pads=False):
    """The batches of all ranks, ``[step][rank]``, and the plan of rank 0."""
    plans = [SamplePlan(order, batch_size, drop_last, rank, world_size, pads=pads) for rank in range(world_size)]
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


def shuffled(size, epoch=0):
    """A shuffled order, as a list."""
    return ShuffledOrder(size, seed=0, epoch=epoch)[np.arange(size)].tolist()


def assert_positions(plans, order):
    """Every sample of every batch is the one at its position in the order, and all steps are told alike."""
    for plan in plans:
        assert plan.order_length == len(order)
        for step in range(plan.num_steps):
            batch = plan.batch(step).tolist()
            places = [(plan.position(step) + place) % len(order) for place in range(len(batch))]
            assert batch == [order[place] for place in places]
        assert plan.positions().tolist() == [plan.position(step) for step in range(plan.num_steps)]


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES, st.booleans())
def test_samples_have_positions(size, batch_size, world_size, drop_last):
    """Also one that a rank repeats has its own position, and none else."""
    order = ShuffledOrder(size, seed=0, epoch=0)
    plans = [SamplePlan(order, batch_size, drop_last, rank, world_size) for rank in range(world_size)]
    assert_positions(plans, shuffled(size))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), WORLD_SIZES)
def test_samples_of_the_users_batches_have_positions(sizes, world_size):
    """They are counted through all batches, whichever rank gets them."""
    offsets = np.cumsum([0, *sizes])
    order = np.arange(offsets[-1])[::-1]
    plans = [BatchPlan(order, offsets, rank, world_size) for rank in range(world_size)]
    assert_positions(plans, order.tolist())
    received = [ReceivedPlan(*plan.batches(), plan.positions(), len(order)) for plan in plans]
    assert_positions(received, order.tolist())


def test_a_received_plan_needs_all_positions():
    """A data host that sends too few is not believed."""
    with pytest.raises(ValueError, match="1 positions for 2 batches"):
        ReceivedPlan(np.arange(4), np.array([0, 2, 4]), np.array([0]), 4)


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES)
def test_exact_tail_drops_and_pads_nothing(size, batch_size, world_size):
    """Step by step and rank by rank, the batches are the order itself; only ranks without a sample repeat one."""
    batches, _ = sample_batches(ShuffledOrder(size, seed=0, epoch=0), batch_size, world_size)
    assert joined(batches)[:size] == shuffled(size)
    repeated = joined(batches)[size:]
    assert len(repeated) == max(0, world_size - size % (batch_size * world_size)) * (
        size % (batch_size * world_size) > 0
    )
    assert set(repeated) <= set(joined(batches[-1:])[: world_size - len(repeated)])
    assert all(batch for step in batches for batch in step)


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES)
def test_exact_tail_keeps_batches_even(size, batch_size, world_size):
    """No batch exceeds the batch size; all but those of the last step have it, and these differ by at most one."""
    batches, _ = sample_batches(np.arange(size), batch_size, world_size)
    assert all(len(batch) == batch_size for step in batches[:-1] for batch in step)
    last = [len(batch) for batch in batches[-1]] if batches else [0]
    assert max(last) - min(last) <= 1
    assert max(last) <= batch_size


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES, st.booleans())
def test_a_padded_tail_repeats_as_many_samples_as_a_distributed_sampler(size, batch_size, world_size, drop_last):
    """In each step all ranks have as many samples, the order is complete, and its first samples fill the last step."""
    batches, _ = sample_batches(shuffled(size), batch_size, world_size, drop_last=drop_last, pads=True)
    exact, _ = sample_batches(shuffled(size), batch_size, world_size, drop_last=drop_last)
    assert len(batches) == len(exact)
    assert all(len({len(batch) for batch in step}) == 1 for step in batches)
    if drop_last:
        assert batches == exact
        return
    sampler = DistributedSampler(range(size), world_size, 0, shuffle=False)
    assert len(joined(batches)) == sampler.total_size
    assert joined(batches) == [shuffled(size)[place % size] for place in range(sampler.total_size)]


@given(st.integers(0, 200), st.integers(1, 12), WORLD_SIZES, st.booleans())
def test_the_weights_of_the_last_step_are_the_shares_of_the_ranks(size, batch_size, world_size, drop_last):
    """A rank weighs as much as it has samples of its own; where all have as many, or drop_last, all weigh 1."""
    batches, _ = sample_batches(np.arange(size), batch_size, world_size, drop_last=drop_last)
    tails = [
        Tail.of(size, batch_size, drop_last=drop_last, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    last = batches[-1] if batches else [[0]] * world_size
    assert {tail.is_uneven for tail in tails} == {len({len(batch) for batch in last}) > 1}
    own = [len(set(batch) - {index for other in last[:rank] for index in other}) for rank, batch in enumerate(last)]
    if drop_last or not batches:
        own = [1] * world_size
    assert [tail.weight for tail in tails] == [one * world_size / sum(own) for one in own]
    assert len({tail.weight == 1 for tail in tails}) == 1


@given(st.integers(0, 60), WORLD_SIZES, st.booleans())
def test_a_rank_that_repeats_a_whole_batch_weighs_nothing(size, world_size, drop_last):
    """Of batches that the user's code has made, a rank has one of its own in the last step, or weighs 0."""
    tails = [Tail.of(size, None, drop_last=drop_last, rank=rank, world_size=world_size) for rank in range(world_size)]
    num_last = size % world_size or world_size
    assert [tail.weight for tail in tails] == [world_size / num_last * (rank < num_last) for rank in range(world_size)]
    assert not any(tail.is_uneven for tail in tails)


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
    order = shuffled(size)
    batches, _ = sample_batches(order, batch_size, 1, drop_last=drop_last)
    assert [step[0] for step in batches] == ordinary_batches(order, batch_size, drop_last=drop_last)


@given(st.integers(0, 300), st.integers(1, 3), st.booleans())
def test_global_batches_do_not_depend_on_the_number_of_ranks(size, factor, drop_last):
    """With a constant global batch, 1, 2, 3, 4, 6 or 12 ranks train on the same samples in every full step."""
    order = shuffled(size, epoch=1)
    global_batch = 12 * factor
    seen = []
    for world_size in (1, 2, 3, 4, 6, 12):
        batches, _ = sample_batches(order, global_batch // world_size, world_size, drop_last=drop_last)
        steps = [joined([step]) for step in batches]
        seen.append(steps[: size // global_batch])
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
        pytest.param(5, 2, 2, False, [[[0, 1], [2, 3]], [[4], [4]]], id="fewer samples left than ranks"),
        pytest.param(6, 2, 2, False, [[[0, 1], [2, 3]], [[4], [5]]], id="tail of one sample per rank"),
        pytest.param(7, 2, 2, False, [[[0, 1], [2, 3]], [[4, 5], [6]]], id="odd tail"),
        pytest.param(7, 2, 2, True, [[[0, 1], [2, 3]]], id="odd tail dropped"),
        pytest.param(3, 1, 2, False, [[[0], [1]], [[2], [2]]], id="batches of one sample"),
    ],
)
def test_batches_by_example(size, batch_size, world_size, drop_last, expected):
    """Odd sizes end as the rules say: with one more step, as even as it can be, or with repeated samples."""
    batches, _ = sample_batches(np.arange(size), batch_size, world_size, drop_last=drop_last)
    assert batches == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_plan_reads_only_what_a_step_needs(drop_last):
    """Of a billion samples, steps anywhere are evaluated without the ones before, twice with the same result."""
    order = CountedOrder(10**9)
    plan = SamplePlan(order, 64, drop_last, 5, 256)
    steps = [0, plan.num_steps - 1, 30_000, 0, 1, 30_001]
    first, last, middle, again, second, after = [plan.batch(step).tolist() for step in steps]
    assert first == again == list(range(5 * 64, 6 * 64))
    assert second[0] - first[0] == after[0] - middle[0] == 64 * 256
    assert 10**9 - 64 * 256 * (1 + drop_last) <= last[0] < last[-1] < 10**9
    assert order.num_read <= 3 * 4096


class CountedOrder(SequentialOrder):
    """Counts what is read of it."""

    num_read = 0

    def __getitem__(self, positions, /):
        self.num_read += len(positions)
        return super().__getitem__(positions)


def test_the_steps_of_a_wide_window_are_evaluated_once():
    """Steps that are asked again within a window of 256, by a hedge or for their indices, cost nothing."""
    order = CountedOrder(10**6)
    plan = SamplePlan(order, 64, False, 0, 1)
    for step in range(1000):
        for asked in (step, max(0, step - 100)):
            assert plan.batch(asked)[0] == 64 * asked
    assert order.num_read < 1.1 * 64 * 1000


def test_plans_take_plain_lists():
    """A list of indices is as good as an array, an empty one included."""
    assert SamplePlan([3, 1, 2], 2, False, 0, 1).batch(1).tolist() == [2]
    assert SamplePlan([], 2, False, 0, 1).num_steps == 0
    assert BatchPlan([3, 1, 2], None, 0, 1).batch(1).tolist() == [1]


def test_a_batch_may_be_larger_than_a_block():
    """The order is evaluated in blocks of about 4,096 samples, but a step at least."""
    plan = SamplePlan(SequentialOrder(30_000), 10_000, False, 0, 1)
    assert [plan.batch(step)[[0, -1]].tolist() for step in range(3)] == [
        [0, 9_999],
        [10_000, 19_999],
        [20_000, 29_999],
    ]


def test_a_plan_pads_only_when_it_is_told_to():
    """The last step of three samples on two ranks."""
    assert [SamplePlan(range(3), 2, False, rank, 2).batch(0).tolist() for rank in range(2)] == [[0, 1], [2]]


@pytest.mark.parametrize("step", [-1, 2, 3])
def test_a_step_outside_the_pass_is_an_error(step):
    """A cursor outside the pass is refused, never served with other samples."""
    with pytest.raises(IndexError, match=rf"Step {step} does not exist \(number of steps in the pass: 2\)"):
        SamplePlan(np.arange(8), 2, False, 0, 2).batch(step)
    with pytest.raises(IndexError, match=rf"Step {step} does not exist \(number of steps in the pass: 2\)"):
        BatchPlan(np.arange(8), np.array([0, 2, 4, 6, 8]), 0, 2).batch(step)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (3, 2), (0, 0)])
def test_a_rank_outside_the_world_is_an_error(rank, world_size):
    """Every plan names a rank that does not exist."""
    plans = [
        lambda: SamplePlan(np.arange(8), 2, False, rank, world_size),
        lambda: BatchPlan(np.arange(8), np.array([0, 8]), rank, world_size),
        lambda: ShardSteps(16, rank, world_size),
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
    order = ShuffledOrder(size, seed=0, epoch=3)
    plans = [BatchPlan(order, None, rank, world_size) for rank in range(world_size)]
    steps = [[plan.batch(step).tolist() for plan in plans] for step in range(plans[0].num_steps)]
    assert len(steps) == num_steps(size, None, drop_last=False, world_size=world_size)
    assert all(len(batch) == 1 for step in steps for batch in step)
    assert joined(steps)[:size] == shuffled(size, epoch=3)


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
        BatchPlan(np.arange(4), np.array([0, 2, 2, 4, 4]), 0, 1)


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
