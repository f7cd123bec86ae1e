"""Counting the batches of shards on a data host; the test stands in for the workers."""

from types import SimpleNamespace

import pytest

from lightning_sm.data.protocol.calls import CountRequest, Problem, Running, ShardSizes
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.spec import ShardEnd, StepRangeSpec
from lightning_sm.data.server.shard_counts import ShardCounts
from tests.fakes.requests import count_request


@pytest.fixture
def pool():
    """What workers were asked, and what was cancelled."""
    asked, cancelled = [], []
    return SimpleNamespace(submit=asked.append, cancel=cancelled.append, asked=asked, cancelled=cancelled)


@pytest.fixture
def counts(pool):
    """Counts by these workers."""
    return ShardCounts(pool)


def shard_of(task):
    """The shard that a worker is to read to its end."""
    num_shards, shard, _, is_wanted = StepRangeSpec.decode(task.encoded_spec).batches[0].keys.tolist()
    assert (num_shards, is_wanted) == (8, 0)
    return shard


def ask(counts, is_wanted=True, **changed):
    """What is known now."""
    request = CountRequest(**count_request(num_shards=8, part=1, num_parts=3, **changed))
    return counts.answer(request, 0.0, lambda: is_wanted)


def test_a_part_and_the_first_shard_are_counted_once(counts, pool):
    """All ranks ask for the same; the workers read each shard once, in any order."""
    assert ask(counts) == ask(counts) == Running()
    assert sorted(map(shard_of, pool.asked)) == [0, 1, 4, 7]
    assert {task.affinity for task in pool.asked} == {None}  # any worker takes the next
    assert counts.num_running == 1
    for task in reversed(pool.asked):
        task.answer(ShardEnd(10 + shard_of(task)))
    assert ask(counts) == ShardSizes([11, 14, 17], first=10)
    assert (len(pool.asked), counts.num_running) == (4, 0)


def test_a_shard_of_a_dead_worker_is_read_again_a_few_times(counts, pool):
    """A dataset that kills its worker ends the count, with the shard; the others are not read any more."""
    ask(counts)
    for _ in range(4):
        pool.asked[-1].answer(Failure("WorkerLost", "was killed by SIGKILL", "worker 3"))
        assert ask(counts) == Running()
    assert [shard_of(task) for task in pool.asked[3:]] == [7] * 5
    pool.asked[-1].answer(Failure("WorkerLost", "was killed by SIGKILL", "worker 3"))
    where = "worker 3, while counting the batches of shard 7 of 8"
    assert ask(counts) == Problem("RemoteTransformError", "was killed by SIGKILL", where)
    assert sorted(map(shard_of, pool.cancelled)) == [0, 1, 4]
    pool.asked[0].answer(ShardEnd(5))  # it was late
    assert isinstance(ask(counts), Problem)


def test_an_exception_ends_the_count(counts, pool):
    """It comes as the user's code raised it."""
    ask(counts)
    pool.asked[2].answer(Failure("RemoteTransformError", "KeyError", "worker 0"))
    assert ask(counts).text == "KeyError"


def test_a_count_that_nobody_waits_for_is_given_up(counts, pool):
    """The dataset may have no end; who asks later begins anew."""
    ask(counts)
    ask(counts, is_wanted=False)
    assert len(pool.cancelled) == 4
    assert counts.num_running == 0
    assert ask(counts) == Running()
    assert len(pool.asked) == 8
