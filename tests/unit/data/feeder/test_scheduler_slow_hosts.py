"""The feeder's scheduler: slow and silent hosts get what they can finish in time, and canaries."""

from __future__ import annotations

from tests.fakes.schedulers import asked, host_status, warm


def test_slow_host_takes_steps_that_it_can_finish_in_time():
    """A host three times slower than the fastest skips the steps that are needed before it can answer."""
    scheduler, now = warm({"a": 1.0, "b": 3.0})
    scheduler.open_pass(2, 0, 100, 20)
    (first, second) = scheduler.next_requests(now)
    assert asked([first]) == [("a", 0)]
    assert second.host == "b"
    # Fifteen seconds at most for the samples so far: b's 3 s are a few of the intervals between answers.
    assert 2 <= second.step <= 5


def test_slow_host_gets_a_canary_only_where_it_cannot_help():
    """With nothing in the window that it can finish in time a slow host gets the last step, once in ten latencies."""
    scheduler, now = warm({"a": 1.0, "b": 9.0})
    scheduler.open_pass(2, 0, 100, 4)
    now += 0.5
    due = 0.0 + 10 * 9.0
    assert asked(scheduler.next_requests(now)) == [("a", 0)]
    assert host_status(scheduler, "b").is_lagging
    scheduler.completed(scheduler.passes()[0].requests[0].request_id, now + 1.0)
    scheduler.advance(2, 1)
    (request,) = scheduler.next_requests(due - 0.5)
    assert scheduler.next_wakeup(due - 0.5) == due
    assert (request.host, request.step) == ("a", 1)
    assert asked(scheduler.next_requests(due)) == [("b", 4)]


def test_a_host_that_was_slow_once_is_probed_beside_hosts_with_credits_to_spare():
    """A cold cache at the start must not keep a host idle for the rest of the run, because others take all steps."""
    scheduler, now = warm({"a": 1.0, "b": 9.0}, num_credits=8)
    scheduler.open_pass(2, 0, 100, 4)
    requests = scheduler.next_requests(now + 90.0)
    assert asked(requests) == [("b", 3), ("a", 0), ("a", 1), ("a", 2)]
    scheduler.completed(requests[0].request_id, now + 91.0)
    assert not host_status(scheduler, "b").is_lagging


def test_recovered_host_is_believed_at_once():
    """One quick answer of a slow host ends its slowness, as canaries are rare."""
    scheduler, now = warm({"a": 1.0, "b": 9.0})
    scheduler.open_pass(2, 0, 100, 4)
    requests = scheduler.next_requests(now + 90.0)
    assert asked(requests) == [("b", 3), ("a", 0)]
    scheduler.completed(requests[0].request_id, now + 91.0)
    assert not host_status(scheduler, "b").is_lagging
    assert asked(scheduler.next_requests(now + 91.0)) == [("b", 1)]


def test_slow_host_alone_does_everything():
    """A slow host is not slow when no other host is up."""
    scheduler, now = warm({"a": 1.0, "b": 9.0}, num_credits=2)
    scheduler.host_lost("a", is_silent=False)
    scheduler.open_pass(2, 0, 100, 4)
    assert asked(scheduler.next_requests(now)) == [("b", 0), ("b", 1)]


def silenced():
    """Return a scheduler whose host b has steps 1 and 3 of pass 2, both hedged on host a, and the time."""
    scheduler, now = warm({"a": 1.0, "b": 1.0}, num_credits=2)
    scheduler.open_pass(2, 0, 100, 4)
    assert asked(scheduler.next_requests(now)) == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    for request_id in (10, 12):
        scheduler.completed(request_id, now + 1.0)
    scheduler.advance(2, 1)
    assert asked(scheduler.next_requests(now + 1.0)) == [("a", 4)]
    assert asked(scheduler.next_requests(now + 3.0)) == [("a", 1)]
    scheduler.completed(14, now + 3.0)
    assert asked(scheduler.next_requests(now + 3.0)) == [("a", 3)]
    status = host_status(scheduler, "b")
    assert (status.is_lagging, status.num_in_flight) == (True, 2)
    return scheduler, now + 3.0


def test_silent_host_gets_canaries_only():
    """After two late requests without an answer in between a host gets nothing but canaries, until it answers."""
    scheduler, now = silenced()
    scheduler.completed(15, now + 1.0), scheduler.completed(16, now + 1.0)
    scheduler.advance(2, 5)
    assert asked(scheduler.next_requests(now + 1.0)) == [("a", 5), ("a", 6)]
    status = host_status(scheduler, "b")
    assert status.num_in_flight == 0
    canary_at = now - 3.0 + 10 * status.latency_s
    scheduler.completed(17, now + 2.0), scheduler.completed(18, now + 2.0)
    scheduler.advance(2, 7)
    assert asked(scheduler.next_requests(canary_at - 1.0)) == [("a", 7), ("a", 8)]
    assert scheduler.next_wakeup(canary_at - 1.0) == canary_at
    (canary,) = scheduler.next_requests(canary_at)
    assert (canary.host, canary.step) == ("b", 10)
    scheduler.completed(canary.request_id, canary_at + 1.0)
    assert not host_status(scheduler, "b").is_lagging


def test_silent_host_gets_no_step_however_far_ahead():
    """A long window does not matter: nobody knows when a silent host will answer."""
    scheduler, now = silenced()
    scheduler.host_up("b", 4)
    scheduler.set_window(2, 60)
    assert scheduler.next_requests(now) == []


def test_silent_hosts_are_asked_when_no_other_is_left():
    """When only silent hosts are up they get requests, whatever they did."""
    scheduler, now = silenced()
    scheduler.host_lost("a", is_silent=False)
    scheduler.close_pass(2)
    scheduler.open_pass(3, 0, 100, 4)
    assert asked(scheduler.next_requests(now)) == [("b", 0), ("b", 1)]


def test_silent_host_that_is_declared_up_starts_afresh():
    """When a silent host gives a sign of life, it gets requests as before."""
    scheduler, _ = silenced()
    scheduler.host_lost("b", is_silent=True)
    scheduler.host_up("b", 2)
    assert not host_status(scheduler, "b").is_lagging


def test_slow_host_that_is_declared_up_gets_a_canary_at_once():
    """A slow host that was suspected may have recovered: it is tried when it is up again."""
    scheduler, now = warm({"a": 1.0, "b": 9.0})
    scheduler.host_lost("b", is_silent=True)
    scheduler.host_up("b", 1)
    scheduler.open_pass(2, 0, 100, 4)
    assert asked(scheduler.next_requests(now)) == [("b", 3), ("a", 0)]


def test_slow_host_has_one_canary_at_a_time():
    """While its canary is in flight a slow host gets no other, however long that takes."""
    scheduler, now = warm({"a": 1.0, "b": 9.0}, num_credits=2)
    scheduler.open_pass(2, 0, 100, 6)
    now += 100.0
    canary, first, second = scheduler.next_requests(now)
    assert (canary.host, canary.step) == ("b", 5)
    scheduler.completed(first.request_id, now + 1.0), scheduler.completed(second.request_id, now + 1.0)
    scheduler.advance(2, 2)
    assert asked(scheduler.next_requests(now + 100.0)) == [("a", 2), ("a", 3)]


def test_slow_host_chooses_last():
    """The only TODO step goes to a quick host with a free credit, though a slow one has nothing to do."""
    scheduler, now = warm({"a": 1.0, "b": 9.0}, num_credits=2)
    scheduler.open_pass(2, 0, 100, 1)
    assert asked(scheduler.next_requests(now + 100.0)) == [("a", 0)]
    scheduler.set_window(2, 2)
    assert asked(scheduler.next_requests(now + 100.0)) == [("a", 1)]


def test_pause_of_the_consumer_does_not_count_as_pace():
    """A long validation or checkpoint between two answers does not make a slow host look quick enough."""
    scheduler, now = warm({"a": 1.0, "b": 9.0})
    scheduler.open_pass(2, 0, 100, 4)
    now += 1000.0
    scheduler.host_lost("b", is_silent=False)
    scheduler.host_up("b", 1)
    requests = scheduler.next_requests(now)
    assert asked(requests) == [("a", 0), ("b", 1)] or asked(requests) == [("b", 0), ("a", 1)]
    for request in sorted(requests, key=lambda request: request.host):
        scheduler.completed(request.request_id, now + {"a": 1.0, "b": 9.0}[request.host])
    assert asked(scheduler.next_requests(now + 9.0)) == [("a", 2)]


def test_silent_host_keeps_its_pace_and_a_restarted_one_does_not():
    """A suspect that is up again is as slow as it was; a host that was down may be another process."""
    for is_silent, is_lagging in ((True, True), (False, False)):
        scheduler, _ = warm({"a": 1.0, "b": 9.0})
        scheduler.host_lost("b", is_silent=is_silent)
        scheduler.host_up("b", 1)
        assert host_status(scheduler, "b").is_lagging is is_lagging
