"""Tests of the feeder's scheduler in a simulated cluster, with all its rules together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sm.data.feeder.scheduler import Retry
from tests.fakes.schedulers import host_status
from tests.fakes.simulated_cluster import Cluster, Machine


def total_over_ideal(machines, num_steps=400, *, window=None, seed=0):
    """Return how much longer a pass takes than the sum of the hosts' rates would allow, and the cluster."""
    cluster = Cluster(machines, seed)
    consumer = cluster.open(1, num_steps, window or max(32, 2 * sum(machine.num_workers for machine in machines)))
    total = cluster.run()
    assert consumer.taken == list(range(num_steps))
    return total / (num_steps / sum(machine.num_workers * machine.rate for machine in machines)), cluster


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
@pytest.mark.parametrize("extra_credits", [0, 2])
@pytest.mark.parametrize("ratio", [2, 8, 64])
def test_slow_host_does_not_hold_up_the_others(num_workers, extra_credits, ratio):
    """With one of two hosts many times slower, a pass takes at most 1.3 times as long as their rates allow."""
    rates = {"a": 1.0, "b": 1 / ratio}
    machines = [Machine(name, num_workers, num_workers + extra_credits, rate=rate) for name, rate in rates.items()]
    assert total_over_ideal(machines)[0] <= 1.3


@pytest.mark.parametrize("ratio", [3, 4])
def test_moderately_slow_host_costs_at_most_its_share(ratio):
    """A host too slow for the window costs little more than if it were absent."""
    machines = [Machine("a"), Machine("b", rate=1 / ratio)]
    assert total_over_ideal(machines)[0] <= 1.03 * (1 + 1 / ratio)


def test_slow_host_helps_where_the_window_is_long_enough():
    """A slow host does its share if the window covers twice its latency."""
    total, cluster = total_over_ideal([Machine("a"), Machine("b", rate=1 / 8)], window=128)
    assert total <= 1.1
    assert host_status(cluster.scheduler, "b").num_completed >= 0.5 * 400 / 9


@pytest.mark.parametrize("num_hosts", [1, 2, 8])
@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_equal_hosts_are_used_in_full(num_hosts, delay_s):
    """Any number of equal hosts deliver at least 0.97 of their rates if credits cover the network's delay."""
    credits_each = 4 if delay_s == 0.0 else 6
    machines = [Machine(f"h{i}", 4, credits_each, delay_s=delay_s) for i in range(num_hosts)]
    window = 2 * credits_each * num_hosts
    cluster = Cluster(machines)
    consumer = cluster.open(1, 200 + 10 * window, window)
    cluster.run()
    times = consumer.taken_at[window:-window]
    assert (len(times) - 1) / (times[-1] - times[0]) >= 0.97 * 4 * num_hosts
    assert sum(host.num_hedges for host in cluster.scheduler.hosts()) == 0


def test_many_hosts_with_a_long_window():
    """A hundred hosts and a window of 500 steps work as two hosts do."""
    cluster = Cluster([Machine(f"h{i}", 2, 2) for i in range(100)])
    consumer = cluster.open(1, 800, 500)
    assert cluster.run() <= 800 / 200 + 2 * 1.2
    assert consumer.taken == list(range(800))


def gaps(times):
    """Return the waits between deliveries."""
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("num_workers", [1, 4, 8])
@pytest.mark.parametrize("detected_after_s", [1.0, 10.0])
def test_frozen_host_is_hardly_noticed(num_workers, detected_after_s):
    """If a host with 50 ms batches freezes, no delivery takes 0.35 s, long before the host is suspected."""
    for seed in range(4):
        machines = [Machine(name, num_workers, num_workers, lambda rng: rng.uniform(0.04, 0.06)) for name in "ab"]
        cluster = Cluster(machines, seed)
        consumer = cluster.open(1, 30 * num_workers, 4 * num_workers)
        cluster.at(cluster.rng.uniform(0.06, 0.5), cluster.freeze, "b", detected_after_s)
        cluster.run()
        assert consumer.taken == list(range(30 * num_workers))
        assert max(gaps(consumer.taken_at)) < 0.35


def test_host_frozen_from_the_start_is_hardly_noticed():
    """A host that never answers delays its first steps only until they are hedged."""
    machines = [Machine(name, service_s=lambda rng: rng.uniform(0.04, 0.06)) for name in "ab"]
    machines[1].is_frozen = True
    cluster = Cluster(machines)
    consumer = cluster.open(1, 200, 16)
    cluster.run()
    assert max(gaps(consumer.taken_at)) < 0.35


def test_frozen_worker_of_a_single_host_is_survived():
    """With one host, a worker that never answers costs seconds, not the pass."""
    stuck = iter([1e6])
    cluster = Cluster([Machine("a", 4, 4, lambda rng: next(stuck, 0.05))])
    consumer = cluster.open(1, 200, 8)
    cluster.run()
    assert consumer.taken == list(range(200))
    assert max(gaps(consumer.taken_at), default=0.0) <= 2.2
    assert consumer.taken_at[-1] <= 2.2 + 200 * 0.05 / 3


def test_recovered_host_is_used_again():
    """A host that was slow for a while does its share again soon after it recovers."""
    cluster = Cluster([Machine("a"), Machine("b", rate=1 / 8)])
    cluster.open(1, 800, 16)
    cluster.at(20.0, cluster.set_rate, "b", 1.0)
    # The rate is 4 until the recovery and the next probe (ten latencies of 8 s), then 8.
    assert cluster.run() <= 20.0 + 80.0 + (800 - 4 * 100) / 8 * 1.1


def test_host_that_turns_slow_is_noticed():
    """A host that becomes 8 times slower in the middle of a pass costs its share and one round of late answers."""
    cluster = Cluster([Machine("a"), Machine("b")])
    cluster.open(1, 600, 16)
    cluster.at(20.0, cluster.set_rate, "b", 1 / 8)
    assert cluster.run() <= 20.0 + (600 - 8 * 20) / 4.5 * 1.3


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 8])
@pytest.mark.parametrize("factor", [10, 300])
def test_hosts_that_all_turn_slow_are_not_slow_hosts(num_hosts, factor):
    """Batches that become heavier for all hosts, as in another epoch, are still built at the hosts' full rate."""
    cluster = Cluster([Machine(f"h{i}") for i in range(num_hosts)])
    consumer = cluster.open(1, 120 * num_hosts, 16 * num_hosts)
    for i in range(num_hosts):
        cluster.at(20.0, cluster.set_rate, f"h{i}", 1 / factor)
    cluster.run()
    ideal_s = 20.0 + (120 - 4 * 20) / 4 * factor
    assert consumer.taken_at[-1] <= 1.15 * ideal_s + 2 * factor


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_slow_consumer_bounds_the_work_ahead(num_hosts):
    """A consumer slower than the hosts never waits after the first step, and the window bounds what is ready."""
    cluster = Cluster([Machine(f"h{i}") for i in range(num_hosts)])
    consumer = cluster.open(1, 60, 8 * num_hosts, step_s=2.0)
    cluster.run()
    assert max(gaps(consumer.taken_at)) == pytest.approx(2.0)
    assert len(cluster.sent) <= 60 + 4


def test_validation_in_the_middle_is_served_at_once():
    """A pass opened while another fills the window gets its first batch after one latency."""
    cluster = Cluster([Machine("a"), Machine("b")])
    cluster.open(1, 400, 16)
    opened = []

    def open_validation():
        opened.append(cluster.open(2, 40, 8))

    cluster.at(10.0, open_validation)
    cluster.run()
    assert opened[0].taken_at[0] <= 10.0 + 1.2 + 1.2
    assert opened[0].taken == list(range(40))


FAULTS = st.lists(
    st.tuples(
        st.floats(0.1, 20.0),
        st.sampled_from(["freeze", "kill", "slow", "jam"]),
        st.integers(0, 3),
        st.floats(0.1, 10.0),
    ),
    max_size=8,
)


def inject(cluster, names, faults):
    """Schedule faults, each of which ends after a while."""
    for start, kind, which, duration in faults:
        name, end = names[which % len(names)], start + duration
        if kind == "freeze":
            cluster.at(start, cluster.freeze, name, 1.0)
            cluster.at(end, cluster.thaw, name)
        elif kind == "jam":  # a freeze that is not detected
            cluster.at(start, cluster.freeze, name)
            cluster.at(end, cluster.thaw, name)
        elif kind == "kill":
            cluster.at(start, cluster.kill, name)
            cluster.at(end, cluster.revive, name)
        else:
            cluster.at(start, cluster.set_rate, name, 0.1)
            cluster.at(end, cluster.set_rate, name, 1.0)


class Failures:
    """Random failures of requests, never so many for one step that they would be fatal."""

    def __init__(self, probability):
        self.probability, self.kinds = probability, {}

    def __call__(self, rng, request):
        """Return how a failed request may be retried, or None if it succeeds."""
        if rng.random() >= self.probability:
            return None
        kind = rng.choice([Retry.ELSEWHERE, Retry.LIMITED, Retry.ONCE])
        seen = self.kinds.setdefault((request.pass_id, request.first_step), [])
        if seen.count(kind) >= {Retry.ELSEWHERE: 9, Retry.LIMITED: 3, Retry.ONCE: 1}[kind]:
            return None
        seen.append(kind)
        return kind


@settings(max_examples=150, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    shape=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
    faults=FAULTS,
    chances=st.sampled_from([(0.0, 0.0), (0.02, 0.5), (0.3, 0.5)]),
    consumer=st.tuples(st.integers(1, 24), st.sampled_from([0.0, 0.2]), st.booleans()),
)
def test_every_step_is_delivered_once_and_in_order(seed, shape, faults, chances, consumer):
    """Whatever freezes, dies, slows down or fails: no step is lost or repeated, nothing deadlocks, all bounds hold."""
    names = [f"h{i}" for i in range(len(shape))]
    machines = [
        Machine(name, workers, workers + extra, lambda rng: rng.lognormvariate(-1.0, 0.5), delay_s=0.01)
        for name, (workers, extra) in zip(names, shape, strict=True)
    ]
    (failure, crossing), (window, step_s, knows_stop) = chances, consumer
    cluster = Cluster(machines, seed, crossing=crossing, failure=Failures(failure))
    train = cluster.open(1, 60, window, step_s=step_s, knows_stop=knows_stop)
    closed_early = cluster.open(2, 1000, 5, step_s=step_s)
    cluster.at(3.0, cluster.close, 2)
    cluster.at(2.5, lambda: cluster.open(3, 20, 4))
    if not knows_stop:
        cluster.at(4.0, cluster.tell_stop, 1)
    inject(cluster, names, faults)
    cluster.run(until=10_000.0)
    assert train.taken == list(range(60))
    assert cluster.consumers[3].taken == list(range(20))
    assert closed_early.taken == list(range(len(closed_early.taken)))


def test_same_events_lead_to_the_same_decisions():
    """The scheduler is deterministic except for ties: the same events lead to the same requests."""

    def history():
        machines = [Machine(name, 2, 3, lambda rng: rng.expovariate(1.0)) for name in "abc"]
        cluster = Cluster(machines, 3, crossing=0.5, failure=Failures(0.1))
        cluster.open(1, 100, 16)
        inject(cluster, list("abc"), [(3.0, "freeze", 1, 4.0), (5.0, "kill", 2, 6.0), (9.0, "slow", 0, 5.0)])
        cluster.run()
        return cluster.sent

    first = history()
    assert len(first) > 100
    assert history() == first
