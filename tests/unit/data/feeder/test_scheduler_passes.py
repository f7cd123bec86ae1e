"""Tests of the feeder's scheduler: which steps of a pass it requests from which host, and its status."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from lightning_sm.data.feeder.scheduler import Liveness, Retry, StepRange
from lightning_sm.data.ipc.feeder_messages import PassSnapshot
from tests.fakes.schedulers import NO_END, asked, host_status, limits, make, set_stop, set_window, step_counts, warm


def test_free_credits_take_the_oldest_steps_in_turn():
    """Each host gets as many requests as it has credits, the least loaded first, oldest steps first."""
    scheduler = make("a", "b", num_credits=2, window=10)
    requests = scheduler.next_requests(0.0)
    assert asked(requests) == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    assert [(r.request_id, r.pass_id, r.is_hedge) for r in requests] == [(i, 1, False) for i in range(4)]
    assert scheduler.next_requests(0.0) == []
    scheduler.completed(1, 1.0)
    assert asked(scheduler.next_requests(1.0)) == [("b", 4)]


def test_window_counts_from_the_oldest_step_not_taken():
    """The window moves when the consumer takes a step, not when an answer arrives, and ends at the last step."""
    scheduler = make("a", num_credits=8, window=3, stop=5)
    requests = scheduler.next_requests(0.0)
    assert asked(requests) == [("a", 0), ("a", 1), ("a", 2)]
    for request in requests:
        scheduler.completed(request.request_id, 1.0)
    assert scheduler.next_requests(1.0) == []
    scheduler.advance(1, 1)
    assert asked(scheduler.next_requests(1.0)) == [("a", 3)]
    scheduler.advance(1, 3)
    assert asked(scheduler.next_requests(1.0)) == [("a", 4)]
    scheduler.completed(4, 2.0), scheduler.completed(3, 2.0)
    scheduler.advance(1, 5)
    assert scheduler.next_requests(2.0) == []
    assert scheduler.next_wakeup(2.0) is None


def test_position_cannot_pass_a_step_that_is_not_ready():
    """Advancing past a step that is not ready is an error; advancing to the current step, or back, does nothing."""
    scheduler = make("a", num_credits=4)
    scheduler.next_requests(0.0)
    scheduler.completed(0, 1.0), scheduler.completed(2, 1.0)
    with pytest.raises(ValueError, match=r"Pass 1 cannot advance to step 3: step 1 is not ready\."):
        scheduler.advance(1, 3)
    scheduler.advance(1, 1)
    scheduler.advance(1, 0)
    assert scheduler.passes(1.0)[0].waiting_for == 1


def test_hungriest_pass_is_served_first():
    """A new pass gets the free credits until its window is as full as the windows of the others."""
    scheduler = make("a", num_credits=6, window=8)
    assert len(scheduler.next_requests(0.0)) == 6
    scheduler.open_pass(2, limits(100, 4))
    scheduler.host_up("a", 9)
    assert [(r.pass_id, r.first_step) for r in scheduler.next_requests(0.0)] == [(2, 0), (2, 1), (2, 2)]
    scheduler.host_up("a", 12)
    assert [(r.pass_id, r.first_step) for r in scheduler.next_requests(0.0)] == [(1, 6), (2, 3), (1, 7)]


def test_late_unknown_and_closed_answers_are_refused():
    """Only the first answer to a step of an open pass is accepted; others are refused without an error."""
    scheduler = make("a", num_credits=2)
    scheduler.next_requests(0.0)
    assert scheduler.request(0, "a").request_id == 0
    assert scheduler.completed(0, 1.0) is not None
    assert scheduler.request(0, "a") is None
    assert scheduler.completed(0, 1.0) is None
    assert scheduler.completed(99, 1.0) is None
    assert asked(scheduler.close_pass(1)) == [("a", 1)]
    assert scheduler.completed(1, 2.0) is None
    assert scheduler.passes(2.0) == []
    assert host_status(scheduler, "a").num_in_flight == 0


def test_stop_found_later_cancels_what_is_beyond():
    """When the end of a pass becomes known, requests beyond it are returned for cancelling, and not sent again."""
    scheduler = make("a", num_credits=3, window=6, stop=NO_END)
    scheduler.next_requests(0.0)
    scheduler.completed(2, 1.0)
    assert asked(set_stop(scheduler, 1, 1)) == [("a", 1)]
    assert step_counts(scheduler) == (0, 1, 0)
    assert scheduler.next_requests(1.0) == []
    assert scheduler.completed(0, 2.0) is not None


def test_window_can_grow_and_shrink():
    """A larger window applies at once; requests beyond a smaller one may finish, but are not repeated if they fail."""
    scheduler = make("a", "b", num_credits=4, window=6)
    set_window(scheduler, 1, 2)
    assert [r.first_step for r in scheduler.next_requests(0.0)] == [0, 1]
    set_window(scheduler, 1, 6)
    assert [r.first_step for r in scheduler.next_requests(0.0)] == [2, 3, 4, 5]
    set_window(scheduler, 1, 3)
    scheduler.failed(5, 1.0, retry=Retry.ELSEWHERE)
    scheduler.completed(4, 1.0)
    assert scheduler.next_requests(5.0) == []
    set_window(scheduler, 1, 6)
    assert [r.first_step for r in scheduler.next_requests(5.0)] == [5]


def test_a_request_is_for_consecutive_steps():
    """Small batches are requested in ranges, which move the window as a whole; the last one ends with the pass."""
    scheduler = make("a", num_credits=9, window=4, stop=11)
    scheduler.next_requests(0.0)
    set_window(scheduler, 1, 12, range_length=4)
    assert [r.step_range for r in scheduler.next_requests(0.0)] == []
    scheduler.completed(0, 1.0), scheduler.completed(1, 1.0)
    scheduler.advance(1, 2)
    assert [r.step_range for r in scheduler.next_requests(1.0)] == [StepRange(4, 4), StepRange(8, 3)]
    scheduler.completed(2, 1.0), scheduler.completed(3, 1.0), scheduler.completed(4, 1.0)
    assert (scheduler.passes(1.0)[0].waiting_for, step_counts(scheduler)) == (8, (0, 3, 6))
    scheduler.advance(1, 8)
    scheduler.completed(5, 2.0)
    scheduler.advance(1, 11)
    assert scheduler.next_requests(2.0) == []


def test_no_more_runs_than_slots_are_requested():
    """However many steps the window has, each range in flight or ready needs one of the slots."""
    scheduler = make("a", num_credits=9, window=3)
    set_window(scheduler, 1, 100, range_length=2)
    requests = scheduler.next_requests(0.0)
    assert [r.step_range for r in requests] == [StepRange(0, 2), StepRange(2, 2), StepRange(4, 2)]
    scheduler.completed(0, 1.0)
    assert scheduler.next_requests(1.0) == []
    scheduler.advance(1, 2)
    assert [r.step_range for r in scheduler.next_requests(1.0)] == [StepRange(6, 2)]


def test_what_is_left_of_the_window_is_no_range():
    """No range is requested until the window has room for all of it."""
    scheduler = make("a", num_credits=9, window=4)
    scheduler.next_requests(0.0)
    scheduler.completed(0, 1.0)
    set_window(scheduler, 1, 4, range_length=2)
    scheduler.advance(1, 1)
    assert scheduler.next_requests(1.0) == []
    scheduler.completed(1, 1.0)
    scheduler.advance(1, 2)
    assert [r.step_range for r in scheduler.next_requests(1.0)] == [StepRange(4, 2)]


def test_the_status_names_the_requests_for_the_step_that_the_consumer_waits_for():
    """The status has the step that the consumer waits for, and its requests with their hosts and ages."""
    scheduler = make("a", "b", num_credits=2, window=6)
    scheduler.next_requests(1.0)
    scheduler.completed(0, 2.5)
    scheduler.host_lost("b", is_silent=True)
    assert scheduler.passes(2.5) == [PassSnapshot(waiting_for=1, requested=[], ready=1)]
    assert step_counts(scheduler) == (4, 1, 1)
    first, second = scheduler.hosts()
    assert (first.host, first.state, first.slowness, first.num_completed) == ("a", Liveness.UP, 1.0, 1)
    assert (second.host, second.state) == ("b", Liveness.SUSPECT)
    (request,) = scheduler.next_requests(3.0)
    assert (request.host, request.first_step, request.sent_at) == ("a", 1, 3.0)
    assert scheduler.passes(3.5)[0].requested == [("a", 0.5)]
    assert first.num_in_flight == 1, "a status is a copy"


def test_ranks_spread_over_hosts_that_differ_a_little():
    """Ranks spread over similar hosts: if all preferred the quickest, the others would be idle."""
    latencies_s = {"a": 1.0, "b": 1.01, "c": 1.02, "d": 1.03}
    first = Counter()
    for rank in range(200):
        scheduler, now = warm(latencies_s, tie_break=random.Random(rank).random)
        scheduler.open_pass(2, limits(100, 1))
        first.update(request.host for request in scheduler.next_requests(now))
    assert set(first) == set(latencies_s)
    assert min(first.values()) >= 25


def test_request_ids_start_again_after_32_bits():
    """Request ids wrap around after 32 bits, because frames have no room for more."""
    scheduler = make("a", num_credits=2)
    scheduler._request_ids = itertools.count(2**32 - 1)
    assert [request.request_id for request in scheduler.next_requests(0.0)] == [2**32 - 1, 0]


def test_a_step_at_the_end_of_a_pass_is_beyond_it():
    """A step at the end of a pass is beyond it, whether it is ready or in flight when the end becomes known."""
    scheduler = make("a", num_credits=3, window=6, stop=NO_END)
    scheduler.next_requests(0.0)
    scheduler.completed(1, 1.0)
    assert asked(set_stop(scheduler, 1, 1)) == [("a", 2)]
    assert scheduler.passes(1.0)[0].ready == 0


def test_only_hosts_that_have_the_source_are_asked():
    """Only hosts that have the source get requests, even for a step that has failed on the only such host."""
    scheduler, having = make("a", "b", num_credits=3), {"b"}
    scheduler.close_pass(1)
    scheduler.open_pass(1, limits(3, 4), can_take=having.__contains__)
    requests = scheduler.next_requests(0.0)
    assert asked(requests) == [("b", 0), ("b", 1), ("b", 2)]
    scheduler.failed(requests[0].request_id, 0.0, retry=Retry.LIMITED)
    assert asked(scheduler.next_requests(9.0)) == [("b", 0)]
    scheduler.failed(requests[1].request_id, 9.0, retry=Retry.LIMITED)
    having.add("a")
    assert asked(scheduler.next_requests(9.0)) == [("a", 1)]


def test_steps_that_are_not_known_yet_wait():
    """Steps whose indices are not known are not requested."""
    scheduler = make("a", num_credits=9)
    scheduler.close_pass(1)
    scheduler.open_pass(1, limits(NO_END, 4, known=1))
    assert asked(scheduler.next_requests(0.0)) == [("a", 0)]
    scheduler._passes[1].limits.known = 3
    assert asked(scheduler.next_requests(0.0)) == [("a", 1), ("a", 2)]
    assert scheduler.next_wakeup(0.0) is None
