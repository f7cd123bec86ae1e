"""The feeder's scheduler gives slow and silent hosts what they can finish in time, and lets them recover."""

from __future__ import annotations

import math

import pytest

from tests.fakes.schedulers import asked, host_status, limits, set_window, warm


def slow_and_quick(**options):
    """Return a scheduler whose host b is nine times slower than host a, and the time."""
    return warm({"a": 1.0, "b": 9.0}, **options)


def test_slow_host_takes_steps_that_it_can_finish_in_time():
    """A slow host gets the first step that is not needed within twice its latency, at the pace of all hosts."""
    scheduler, now = slow_and_quick()
    assert host_status(scheduler, "b").slowness == pytest.approx(9.0, rel=0.2)
    scheduler.open_pass(2, limits(100, 50))
    first, second = scheduler.next_requests(now)
    assert asked([first]) == [("a", 0)]
    assert second.host == "b"
    # With one answer every 1 to 9 s, twice 9 s is 2 to 18 steps.
    assert 2 <= second.first_step <= 18


def test_slow_host_gets_nothing_where_it_cannot_help():
    """A slow host that can finish nothing in the window in time stays idle, and another host gets all steps."""
    scheduler, now = slow_and_quick(num_credits=2)
    scheduler.open_pass(2, limits(100, 3))
    assert asked(scheduler.next_requests(now)) == [("a", 0), ("a", 1)]
    assert scheduler.next_requests(now + 1.0) == []


def test_a_host_that_was_slow_once_comes_back():
    """After a while, a slow host gets one request as a probe, and a quick answer counts at once."""
    scheduler, now = slow_and_quick(num_credits=8)
    scheduler.open_pass(2, limits(100, 3))
    requests = scheduler.next_requests(now)
    assert {request.host for request in requests} == {"a"}
    scheduler.completed(requests[0].request_id, now + 1.0)
    scheduler.advance(2, 1)
    wakeup = scheduler.next_wakeup(now + 1.0)
    later = now + 10 * 9.0 * 2.5
    assert wakeup is not None
    (probe,) = (request for request in scheduler.next_requests(later) if request.host == "b")
    scheduler.completed(probe.request_id, later + 1.0)
    assert host_status(scheduler, "b").slowness == pytest.approx(1.0)


def test_what_is_forgotten_lets_a_slow_host_have_one_request():
    """While a slow host's probe is in flight, the host gets no other request."""
    scheduler, now = slow_and_quick(num_credits=4)
    scheduler.host_lost("a", is_silent=True)
    scheduler.host_up("a", 1)
    scheduler.open_pass(2, limits(100, 3))
    later = now + 1000.0
    assert sorted(asked(scheduler.next_requests(later))) == [("a", 0), ("b", 1)]


def test_slow_host_alone_does_everything():
    """A slow host gets all requests when no other host is up."""
    scheduler, now = slow_and_quick(num_credits=2)
    scheduler.host_lost("a", is_silent=False)
    scheduler.open_pass(2, limits(100, 4))
    assert asked(scheduler.next_requests(now)) == [("b", 0), ("b", 1)]


def test_slow_host_chooses_last():
    """The only TODO step goes to a quick host with a free credit, even if a slow host is idle."""
    scheduler, now = slow_and_quick(num_credits=2)
    scheduler.open_pass(2, limits(100, 2))
    set_window(scheduler, 2, 1)
    assert asked(scheduler.next_requests(now + 1.0)) == [("a", 0)]
    set_window(scheduler, 2, 2)
    assert asked(scheduler.next_requests(now + 1.0)) == [("a", 1)]


def test_a_host_whose_requests_are_overtaken_counts_as_slow():
    """A silent host has no latency, but counts as slow if other hosts answer its requests first."""
    scheduler, now = warm({"a": 1.0, "b": 1.0}, num_credits=2)
    scheduler.open_pass(2, limits(100, 32))
    requests = scheduler.next_requests(now)
    for request in requests:
        if request.host == "a":
            scheduler.completed(request.request_id, now + 1.0)
    hedges = [request for request in scheduler.next_requests(now + 20.0) if request.is_hedge]
    assert {hedge.host for hedge in hedges} == {"a"}
    for hedge in hedges:
        (overtaken,) = scheduler.completed(hedge.request_id, now + 21.0)
        assert overtaken.host == "b"
    assert host_status(scheduler, "b").slowness > 3.0


def test_pause_of_the_consumer_does_not_count_as_pace():
    """A long validation or checkpoint between two answers does not make a slow host look quick enough."""
    scheduler, now = slow_and_quick(num_credits=1)
    scheduler.open_pass(2, limits(100, 3))
    (request,) = scheduler.next_requests(now + 5.0)
    assert asked([request]) == [("a", 0)]
    scheduler.completed(request.request_id, now + 6.0)
    assert asked(scheduler.next_requests(now + 6.0)) == [("a", 1)]


def test_silent_host_keeps_its_pace_and_a_restarted_one_does_not():
    """A suspect host that is up again is as slow as before; a host that was down may be a new process."""
    for is_silent in (True, False):
        scheduler, _ = slow_and_quick()
        scheduler.host_lost("b", is_silent=is_silent)
        scheduler.host_up("b", 1)
        assert (host_status(scheduler, "b").slowness > 3.0) is is_silent


def test_cheap_batches_of_another_loader_say_nothing_about_a_host():
    """Lateness is measured against batches of the same loader: validation may be cheap, and training expensive."""
    scheduler, now = warm({"a": 0.01, "b": 0.01}, num_credits=2)
    scheduler.open_pass(2, limits(100, 8), loader="train")
    requests = scheduler.next_requests(now)
    assert scheduler.next_requests(now + 5.0) == []
    for request in requests:
        scheduler.completed(request.request_id, now + 10.0)
    assert max(host_status(scheduler, host).slowness for host in "ab") == pytest.approx(1.0)


def test_the_caller_wakes_when_a_slow_host_counts_as_quick_again():
    """A slow host's slowness beyond 1 halves every ten of its latencies: 9 becomes 3 after twenty."""
    scheduler, now = slow_and_quick(num_credits=8)
    scheduler.open_pass(2, limits(100, 30), may_hedge=False)
    set_window(scheduler, 2, 9)
    assert {host for host, _ in asked(scheduler.next_requests(now))} == {"a"}
    measured = scheduler._hosts["b"]
    wakeup = scheduler.next_wakeup(now)
    assert wakeup == pytest.approx(measured.measured_at + 10 * 9.0 * math.log2((measured.slowness - 1) / 2))
    assert measured.expected_slowness(measured.measured_at) == measured.slowness
    assert measured.expected_slowness(wakeup) == pytest.approx(3.0)
    assert asked(scheduler.next_requests(wakeup + 0.1)) == [("b", 8)]
    assert scheduler.next_wakeup(wakeup + 0.1) is None, "b is at work, which shows how quick it is"


def test_a_host_that_is_up_again_counts_as_quick():
    """A host that was down counts as quick when it is up again, because it may be a new process."""
    scheduler, _ = slow_and_quick()
    scheduler.host_lost("b", is_silent=False)
    scheduler.host_up("b", 1)
    assert host_status(scheduler, "b").slowness == 1.0


@pytest.mark.parametrize(("num_late", "slownesses"), [(1, (1.0, 1.0, 10.75)), (2, (1.0, 1.0, 1.0))])
def test_heavier_batches_make_no_host_slow(num_late, slownesses):
    """If half of the hosts seem slow, the batches have become heavier, and the measurements are discarded."""
    scheduler, now = warm({"a": 1.0, "b": 1.0, "c": 1.0})
    scheduler.open_pass(2, limits(100, 3))
    for request in scheduler.next_requests(now)[3 - num_late :]:
        scheduler.completed(request.request_id, now + 40.0)
    assert tuple(host_status(scheduler, host).slowness for host in "abc") == pytest.approx(slownesses)
