"""Steps over shards: every batch once and in order, whatever is known of the ends, and from wherever a pass begins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sm.data.feeder.scheduler import Liveness, Scheduler
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.errors import WireError
from tests.fakes.schedulers import NO_END


def batches(sizes, rank, world_size):
    """The shards of a rank in turn, as they should come."""
    own = range(rank, len(sizes), world_size)
    return [(shard, offset) for offset in range(max(sizes, default=0)) for shard in own if offset < sizes[shard]]


def walk(steps, sizes, window, rng):
    """Ask for a window of steps, and answer it in any order; what is trained on."""
    came, answered, position, num_probes = {}, set(), 0, 0
    trained, rows = [], {}
    while position < steps.stop_step:
        asked = [s for s in range(position, min(position + window, steps.stop_step)) if s not in answered]
        step = rng.choice(asked)
        num_shards, shard, offset, is_wanted = steps.batch(step).tolist()
        assert num_shards == len(sizes)
        assert steps.shard(step) == shard
        answered.add(step)
        if is_wanted and offset < sizes[shard]:
            came[step] = shard, offset
        else:
            num_probes += not is_wanted
            steps.skip(step, None if offset < sizes[shard] else sizes[shard])
        steps.range_length = rng.choice([1, steps.range_length, 2 * steps.range_length])
        while position in answered:
            if position in came:
                row = steps.row(position)
                (trained if row is None else rows.setdefault(row, [])).append(came[position])
            position += 1
            if steps.ends_block(position):
                trained += [batch for row in sorted(rows) for batch in rows.pop(row)]
        steps.forget(position)
    return trained + [batch for row in sorted(rows) for batch in rows[row]], num_probes


@settings(max_examples=500)
@given(
    own=st.integers(1, 5),
    world_size=st.integers(1, 3),
    first=st.integers(0, 40),
    stop=st.none() | st.integers(0, 40),
    window=st.integers(1, 20),
    data=st.data(),
    rng=st.randoms(use_true_random=False),
)
def test_the_rest_comes_once_and_in_order(own, world_size, first, stop, window, data, rng):
    """From the first batch to the last, for shards of any sizes, blocks of any length, and answers in any order."""
    count = own * world_size
    sizes = data.draw(st.lists(st.integers(0, 15), min_size=count, max_size=count))
    rank = data.draw(st.integers(0, world_size - 1))
    steps = ShardSteps(count, rank, world_size, first, stop)
    came, _ = walk(steps, sizes, window, rng)
    assert came == batches(sizes, rank, world_size)[first:stop]
    assert steps.num_batches in (None, len(batches(sizes, rank, world_size)))


def test_small_batches_are_requested_in_blocks():
    """Several of a shard, then as many of the next; where they would go beyond the end of the pass, one by one."""
    steps = ShardSteps(3, 0, 1, stop=14)
    steps.range_length = 2
    shards = [steps.shard(step) for step in range(14)]
    assert shards == [0, 0, 1, 1, 2, 2] * 2 + [0, 1]
    assert [steps.row(step) for step in range(14)] == [0, 1] * 6 + [None, None]
    assert [step for step in range(15) if steps.ends_block(step)] == [6, 12]


def test_a_pass_from_the_beginning_asks_no_shard_how_far_it_goes():
    """Nor does a shard that ended make others be asked."""
    steps = ShardSteps(3, 0, 1)
    assert [steps.batch(step).tolist() for step in range(4)] == [[3, 0, 0, 1], [3, 1, 0, 1], [3, 2, 0, 1], [3, 0, 1, 1]]
    steps.skip(1, 0)
    assert [steps.batch(step).tolist() for step in (4, 5)] == [[3, 2, 1, 1], [3, 0, 2, 1]]


@pytest.mark.parametrize("end", [None, 1, -1])
def test_impossible_ends_are_refused(end):
    """A batch that is wanted is there or not, and its shard ends no later."""
    with pytest.raises(WireError, match="shard 0 reports"):
        ShardSteps(3, 0, 1).skip(0, end)


def hosts_of(scheduler, num_steps, now):
    """Which host is asked for each shard, when every request is answered at once."""
    homes = {}
    for _ in range(num_steps):
        for request in scheduler.next_requests(now):
            homes.setdefault(request.first_step % 4, []).append(request.host)
            scheduler.completed(request.request_id, now)
        position = next(status.waiting_for for status in scheduler.passes())
        scheduler.advance(1, position)
    return homes


def test_a_shard_stays_with_its_host_until_that_is_gone():
    """Shards are spread over the hosts; those of a lost host move; a host that comes back gets its part."""
    scheduler = Scheduler()
    for host in "ab":
        scheduler.host_up(host, 2)
    scheduler.open_pass(1, 0, NO_END, 4, shard_of=lambda step: step % 4)
    before = {shard: set(hosts) for shard, hosts in hosts_of(scheduler, 20, 0.0).items()}
    assert sorted(map(sorted, before.values())) == [["a"], ["a"], ["b"], ["b"]]
    scheduler.host_lost("a", is_silent=False)
    alone = hosts_of(scheduler, 20, 1.0)
    assert {host for hosts in alone.values() for host in hosts} == {"b"}
    scheduler.host_up("a", 2)
    after = {shard: set(hosts) for shard, hosts in hosts_of(scheduler, 20, 2.0).items()}
    assert sorted(map(sorted, after.values())) == [["a"], ["a"], ["b"], ["b"]]
    assert all(host.state is Liveness.UP for host in scheduler.hosts())


def test_a_late_shard_is_left_where_it_is():
    """Elsewhere it would be read from its beginning; only after very long another host is asked, too."""
    scheduler = Scheduler()
    for host in "ab":
        scheduler.host_up(host, 4)
    scheduler.open_pass(1, 0, NO_END, 4, shard_of=lambda step: step % 4)
    requests = scheduler.next_requests(0.0)
    for request in requests[1:]:
        scheduler.completed(request.request_id, 1.0)
    assert scheduler.next_requests(19.0) == []
    assert [hedge.first_step for hedge in scheduler.next_requests(31.0) if hedge.is_hedge] == [requests[0].first_step]
