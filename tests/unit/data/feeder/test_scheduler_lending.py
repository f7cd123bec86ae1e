"""Credits for requests that are no step of a pass: they take what passes leave, and leave no other trace."""

from __future__ import annotations

from tests.fakes.schedulers import asked, host_status, make
from tests.fakes.simulated_cluster import Cluster, Machine


def test_a_busy_host_lends_no_credit():
    """While passes have work for all credits of a host, none is left after next_requests."""
    scheduler = make("a", "b", num_credits=2, window=4)
    scheduler.next_requests(0.0)
    assert scheduler.lend_credit("ab", 0.0) is None
    scheduler.host_up("b", 3)
    assert scheduler.lend_credit("a", 0.0) is None
    assert scheduler.lend_credit("ab", 0.0)[1] == "b"


def test_the_least_busy_host_lends():
    """Of several hosts with credits, the least busy one gets the request; only the named ones are asked."""
    scheduler = make("a", "b", num_credits=4, window=3)
    assert asked(scheduler.next_requests(0.0)) == [("a", 0), ("b", 1), ("a", 2)]
    assert scheduler.lend_credit("ab", 0.0)[1] == "b"
    assert scheduler.lend_credit("a", 0.0)[1] == "a"
    assert scheduler.lend_credit("cd", 0.0) is None


def test_a_lent_credit_is_missing_until_it_is_returned():
    """It counts as a request in flight of its host, and has an id of its own."""
    scheduler = make("a", num_credits=2, window=2)
    request_id, host = scheduler.lend_credit("a", 0.0)
    (request,) = scheduler.next_requests(0.0)
    assert request.request_id != request_id
    scheduler.return_credit(host)
    assert asked(scheduler.next_requests(0.0)) == [("a", 1)]


def test_a_lost_host_lends_nothing():
    """A credit can be returned after the host was lost; until then the host, up again, lacks it."""
    scheduler = make("a", num_credits=1, window=1, stop=0)
    _, host = scheduler.lend_credit("a", 0.0)
    scheduler.host_lost("a", is_silent=False)
    assert scheduler.lend_credit("a", 0.0) is None
    scheduler.host_up("a", 1)
    assert scheduler.lend_credit("a", 0.0) is None
    scheduler.return_credit(host)
    assert scheduler.lend_credit("a", 0.0) is not None


def test_lent_credits_leave_no_trace():
    """They count neither as completed steps, nor as latencies of their host, nor as hedges."""
    scheduler = make("a", "b", window=2)
    for request in scheduler.next_requests(0.0):
        scheduler.completed(request.request_id, 1.0)
    before = scheduler.hosts()
    _, host = scheduler.lend_credit("ab", 1.0)
    scheduler.return_credit(host)
    assert scheduler.hosts() == before


def test_checks_cost_a_busy_cluster_their_share():
    """Where hosts are never idle, a request in fifty in addition costs a pass two percent, and no hedges."""

    def run(every):
        cluster = Cluster([Machine(name) for name in "ab"])
        cluster.open(1, 2000, 16)
        lent = []
        next_requests = cluster.scheduler.next_requests

        def lend_first(now):
            if len(cluster.sent) // every > len(lent) and (credit := cluster.scheduler.lend_credit("ab", now)):
                lent.append(credit)
                machine = cluster.machines[credit[1]]
                machine.num_workers -= 1
                cluster.at(now + 1.0, give_back, machine)
            return next_requests(now)

        def give_back(machine):
            machine.num_workers += 1
            cluster.scheduler.return_credit(machine.name)
            cluster._start(machine)

        cluster.scheduler.next_requests = lend_first
        cluster._check = lambda wakeup: None  # it would miss the requests that are no steps
        took = cluster.run()
        return took, len(lent), sum(host_status(cluster.scheduler, name).num_hedges for name in "ab")

    plain, _, _ = run(10**9)
    checked, num_lent, num_hedges = run(50)
    assert (num_lent, num_hedges) == (40, 0)
    assert checked <= 1.04 * plain
