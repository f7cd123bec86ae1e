"""The shards of an iterable dataset: every batch once, whatever the number of ranks and the order of answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.shards import ShardPlan, default_num_shards, shard_steps
from lightning_sm.errors import DataSettingsError


def walk(plan, lengths, first=0, *, order=None):
    """Ask for every ticket as a trainer rank does: what came, and the tickets that were asked for.

    With ``order``, up to four requests are in flight, and their answers come in any order.
    """
    came, asked, number, window = [], [], first, []
    while window or plan.next_ticket(number) is not None:
        while len(window) < (4 if order else 1) and plan.next_ticket(number) is not None:
            if not plan.is_empty(number):
                asked.append(number)
                window.append(number)
            number += 1
        if not window:
            break
        answer = window.pop(order.randrange(len(window)) if order else 0)
        shard, offset = plan.ticket(answer)
        if offset >= lengths[shard]:
            plan.ended(shard, offset)
        else:
            came.append((answer, shard, offset))
    return came, asked


@st.composite
def shards(draw):
    """A number of ranks and the lengths of a fitting number of shards."""
    world_size = draw(st.integers(1, 5))
    num_shards = world_size * draw(st.integers(1, 4))
    return world_size, draw(st.lists(st.integers(0, 6), min_size=num_shards, max_size=num_shards))


@given(shards())
def test_shards_come_exactly_once(case):
    """Over all ranks every batch of every shard comes once, and a rank asks each shard once for its end."""
    world_size, lengths = case
    came = []
    for rank in range(world_size):
        plan = ShardPlan(len(lengths), rank, world_size)
        own, asked = walk(plan, lengths)
        assert len(asked) == len(own) + len(lengths) // world_size
        assert plan.last_ticket() == max((ticket for ticket, _, _ in own), default=-1)
        came += [(shard, offset) for _, shard, offset in own]
    expected = [(shard, offset) for shard, length in enumerate(lengths) for offset in range(length)]
    assert sorted(came) == expected


@given(shards(), st.randoms(use_true_random=False))
def test_answers_out_of_order_lose_nothing(case, order):
    """With several requests in flight, an early answer about a late offset hides no batch."""
    world_size, lengths = case
    for rank in range(world_size):
        came, _ = walk(ShardPlan(len(lengths), rank, world_size), lengths, order=order)
        assert sorted(came) == walk(ShardPlan(len(lengths), rank, world_size), lengths)[0]


@given(shards(), st.data())
def test_shards_resume_where_they_were(case, data):
    """A plan that knows the ends before a ticket continues from there with the same requests and the same batches."""
    world_size, lengths = case
    rank = data.draw(st.integers(0, world_size - 1))
    whole, asked = walk(ShardPlan(len(lengths), rank, world_size), lengths)
    start = data.draw(st.integers(0, max(asked) + 1))
    stopped = ShardPlan(len(lengths), rank, world_size)
    for number in (number for number in asked if number < start):
        shard, offset = stopped.ticket(number)
        if offset >= lengths[shard]:
            stopped.ended(shard, offset)
    came, asked_again = walk(stopped, lengths, first=start)
    assert came == [batch for batch in whole if batch[0] >= start]
    assert asked_again == [number for number in asked if number >= start]


def test_tickets_by_example():
    """A rank takes one batch of each of its shards in turn."""
    plan = ShardPlan(6, 1, 2)
    assert [plan.ticket(number) for number in range(5)] == [(1, 0), (3, 0), (5, 0), (1, 1), (3, 1)]


def test_the_smallest_end_wins():
    """An end that is reported late for a smaller offset counts, one for a larger offset does not."""
    plan = ShardPlan(1, 0, 1)
    assert (plan.num_batches, plan.last_ticket()) == (None, None)
    plan.ended(0, 5)
    assert (plan.num_batches, plan.last_ticket()) == (5, 4)
    plan.ended(0, 3)
    plan.ended(0, 4)
    assert [plan.is_empty(number) for number in (2, 3, 4)] == [False, True, True]
    assert plan.last_ticket() == 2


@pytest.mark.parametrize(("num_shards", "world_size", "nearest"), [(16, 3, 18), (0, 4, 4), (-2, 2, 2), (1, 2, 2)])
def test_uneven_shards_are_refused_with_advice(num_shards, world_size, nearest):
    """The message has both numbers and one that works."""
    with pytest.raises(
        DataSettingsError, match=f"num_shards={num_shards} .* world_size={world_size} .* such as {nearest}"
    ):
        ShardPlan(num_shards, 0, world_size)


def test_default_shards_fit_every_world():
    """The default divides evenly, small clusters of usual shapes share it, and each rank has several shards."""
    numbers = [default_num_shards(world_size) for world_size in (1, 2, 3, 8, 12, 16, 64, 256)]
    assert numbers == [128, 128, 384, 128, 384, 128, 512, 2048]


@given(shards())
def test_steps_over_shards_are_those_of_the_shortest_rank(case):
    """All ranks stop together, and the count of what is left out adds up."""
    world_size, lengths = case
    per_rank = [len(walk(ShardPlan(len(lengths), rank, world_size), lengths)[0]) for rank in range(world_size)]
    steps, num_dropped = shard_steps(lengths, world_size)
    assert steps == min(per_rank)
    assert num_dropped == sum(per_rank) - steps * world_size


def test_steps_over_uneven_shards_are_refused():
    """Counts of shards that do not divide evenly over the ranks are an error."""
    with pytest.raises(DataSettingsError, match=r"num_shards=3 .* does not divide evenly over world_size=2"):
        shard_steps([1, 2, 3], 2)
