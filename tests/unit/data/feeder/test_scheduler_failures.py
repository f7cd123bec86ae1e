"""The feeder's scheduler requests the steps of lost hosts and of failed requests again."""

from __future__ import annotations

import pytest

from lightning_sm.data.feeder.scheduler import Liveness, Retry, StepRange
from tests.fakes.schedulers import asked, host_status, limits, make, make_with_ranges, set_window, warm


@pytest.mark.parametrize("is_silent", [True, False])
def test_requests_of_a_lost_host_go_elsewhere_at_once(is_silent):
    """A host that is silent or unreachable loses its requests and gets none until it is up again."""
    scheduler = make("a", "b", num_credits=2, window=8)
    scheduler.next_requests(0.0)
    assert asked(scheduler.host_lost("a", is_silent=is_silent)) == [("a", 0), ("a", 2)]
    assert scheduler.next_requests(1.0) == []
    scheduler.completed(1, 2.0)
    again = scheduler.next_requests(2.0)
    assert asked(again) == [("b", 0)]
    assert scheduler.completed(0, 2.0) is None
    status = host_status(scheduler, "a")
    assert status.state is (Liveness.SUSPECT if is_silent else Liveness.DOWN)
    assert (status.num_retries, status.num_in_flight) == (2, 0)
    scheduler.host_up("a", 2)
    assert asked(scheduler.next_requests(3.0)) == [("a", 2), ("a", 4)]


def test_host_may_be_down_before_it_was_ever_up():
    """A host that was never reached has a status, for messages, but gets no requests."""
    scheduler = make()
    scheduler.host_lost("c", is_silent=False)
    assert scheduler.next_requests(1.0) == []
    assert scheduler.next_wakeup(1.0) is None
    assert host_status(scheduler, "c").state is Liveness.DOWN


def test_failed_request_is_asked_of_another_host():
    """A step that failed on one host goes to another, even if it has to wait for that host."""
    scheduler = make("a", "b", window=4)
    scheduler.next_requests(0.0)
    assert not scheduler.failed(0, 1.0, retry=Retry.ELSEWHERE).is_fatal
    assert asked(scheduler.next_requests(1.05)) == [("a", 2)]
    scheduler.completed(1, 2.0)
    assert asked(scheduler.next_requests(2.0)) == [("b", 0)]
    scheduler.failed(3, 3.0, retry=Retry.ELSEWHERE)
    scheduler.completed(2, 3.0)
    assert asked(scheduler.next_requests(3.0)) == [("a", 0)]


def test_host_that_refuses_is_left_alone_for_a_while():
    """Consecutive refusals double the host's pause, up to 2 s; an answer resets it."""
    scheduler, now, pauses = make("a", window=1), 0.0, []
    for _ in range(8):
        (request,) = scheduler.next_requests(now)
        assert not scheduler.failed(request.request_id, now, retry=Retry.ELSEWHERE).is_fatal
        assert scheduler.next_requests(now) == []
        wakeup = scheduler.next_wakeup(now)
        pauses.append(round(wakeup - now, 6))
        now = wakeup
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    scheduler.completed(scheduler.next_requests(now)[0].request_id, now)
    scheduler.advance(1, 1)
    scheduler.failed(scheduler.next_requests(now)[0].request_id, now, retry=Retry.ELSEWHERE)
    assert scheduler.next_wakeup(now) == pytest.approx(now + 0.05)


def test_batch_that_kills_workers_is_fatal():
    """A step that kills workers is given up after four requests over all hosts; lost connections do not count."""
    scheduler = make("a", "b", window=1)
    for now, host in ((1.0, "a"), (10.0, "b"), (20.0, "a")):
        (request,) = scheduler.next_requests(now)
        assert request.host == host
        assert not scheduler.failed(request.request_id, now, retry=Retry.LIMITED, reason=f"on {host}").is_fatal
    (request,) = scheduler.next_requests(30.0)
    scheduler.failed(request.request_id, 30.0, retry=Retry.ELSEWHERE, reason="lost")
    (request,) = scheduler.next_requests(40.0)
    scheduler.host_lost(request.host, is_silent=False)
    (request,) = scheduler.next_requests(50.0)
    decision = scheduler.failed(request.request_id, 50.0, retry=Retry.LIMITED, reason=f"on {request.host}")
    assert decision.is_fatal
    assert decision.failures == ("on a", "on b", "on a", "on b")
    assert scheduler.next_requests(60.0) == []
    set_window(scheduler, 1, 2)
    assert [r.first_step for r in scheduler.next_requests(60.0)] == [1]


@pytest.mark.parametrize(("hosts", "second"), [(("a", "b"), "b"), (("a",), "a")])
def test_user_code_is_tried_once_more(hosts, second):
    """An exception in user code is retried once, on another host if one is up; then it is fatal, with both texts."""
    scheduler = make(*hosts, window=1)
    (request,) = scheduler.next_requests(0.0)
    assert not scheduler.failed(request.request_id, 1.0, retry=Retry.ONCE, reason="KeyError: 3").is_fatal
    (request,) = scheduler.next_requests(1.0)
    decision = scheduler.failed(request.request_id, 2.0, retry=Retry.ONCE, reason="KeyError: 4")
    assert (request.host, decision.is_fatal) == (second, True)
    assert decision.failures == ("KeyError: 3", "KeyError: 4")
    assert scheduler.next_requests(2.0) == []


def test_user_code_waits_for_the_other_host():
    """The retry after an exception in user code waits for a free credit of another host that is up."""
    scheduler = make("a", "b", window=3)
    scheduler.next_requests(0.0)
    scheduler.failed(0, 1.0, retry=Retry.ONCE)
    assert asked(scheduler.next_requests(1.0)) == [("a", 2)]
    scheduler.completed(2, 2.0)
    assert scheduler.next_requests(2.0) == []
    scheduler.host_lost("b", is_silent=True)
    assert asked(scheduler.next_requests(3.0)) == [("a", 0)]


def test_hopeless_failure_is_fatal_at_once():
    """A hopeless failure is not retried, and does not stop other steps."""
    scheduler = make("a", "b", window=3)
    scheduler.next_requests(0.0)
    assert scheduler.failed(0, 1.0, retry=Retry.NEVER, reason="not authorised").failures == ("not authorised",)
    assert asked(scheduler.next_requests(1.0)) == [("a", 2)]
    assert scheduler.passes(1.0)[0].waiting_for == 0


def test_failure_of_a_request_no_longer_needed_is_ignored():
    """A failure after the answer, or of an unknown request, changes nothing."""
    scheduler = make("a")
    scheduler.next_requests(0.0)
    scheduler.completed(0, 1.0)
    for request_id in (0, 99):
        assert not scheduler.failed(request_id, 1.0, retry=Retry.NEVER).is_fatal
    assert host_status(scheduler, "a").num_retries == 0


def test_fatal_step_is_not_asked_again_when_the_window_changes():
    """A step that was given up is not requested again when the window shrinks and grows over it."""
    scheduler = make("a", num_credits=4, window=4)
    scheduler.next_requests(0.0)
    assert scheduler.failed(3, 0.0, retry=Retry.NEVER).is_fatal
    set_window(scheduler, 1, 2)
    set_window(scheduler, 1, 5)
    assert asked(scheduler.next_requests(0.0)) == [("a", 4)]


def test_step_that_failed_on_all_quick_hosts_goes_to_the_slow_one():
    """A slow host gets a step at once if no other host can retry it."""
    scheduler, now = warm({"a": 1.0, "b": 1.0, "c": 9.0})
    scheduler.host_lost("b", is_silent=False)
    scheduler.open_pass(2, limits(100, 4))
    (request,) = scheduler.next_requests(now)
    scheduler.failed(request.request_id, now, retry=Retry.ONCE)
    assert asked(scheduler.next_requests(now)) == [("a", 1), ("c", 0)]


@pytest.mark.parametrize("retry", [Retry.ONCE, Retry.LIMITED, Retry.NEVER])
def test_a_failed_range_is_requested_again_step_by_step(retry):
    """After a range fails, its steps are requested one by one, and only a step that fails again counts as failed."""
    scheduler, (first, second) = make_with_ranges("a")
    assert (first.step_range, second.step_range) == (StepRange(4, 4), StepRange(8, 4))
    assert not scheduler.failed(first.request_id, 2.0, retry=retry, reason="one of four").is_fatal
    requests = scheduler.next_requests(10.0)
    assert [request.step_range for request in requests] == [StepRange(4, 1), StepRange(5, 1), StepRange(6, 1)], (
        "as many as there are slots"
    )
    assert scheduler.failed(requests[1].request_id, 11.0, retry=Retry.NEVER, reason="step 5").failures == ("step 5",)
    assert scheduler.completed(requests[0].request_id, 11.0) is not None
    scheduler.advance(1, 5)
    assert scheduler.passes(11.0)[0].waiting_for == 5


def test_a_range_whose_host_was_lost_is_requested_as_a_whole():
    """A lost host's range is requested as a whole, because a lost connection is not the fault of the batches."""
    scheduler, (first, second) = make_with_ranges("a", "b")
    assert (first.host, second.host) == ("a", "b")
    scheduler.host_lost("a", is_silent=False)
    assert [(request.host, request.step_range) for request in scheduler.next_requests(2.0)] == [("b", StepRange(4, 4))]


def test_the_duplicate_of_a_failed_range_may_still_answer():
    """While the duplicate of a failed range is in flight, its steps are not requested one by one."""
    scheduler, (first, _) = make_with_ranges("a", "b")
    (hedge,) = (request for request in scheduler.next_requests(50.0) if request.step_range == first.step_range)
    assert hedge.is_hedge
    assert not scheduler.failed(first.request_id, 51.0, retry=Retry.ONCE).is_fatal
    assert scheduler.next_requests(51.0) == []
    assert scheduler.completed(hedge.request_id, 52.0) is not None
