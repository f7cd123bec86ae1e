"""The feeder's scheduler sends duplicates of late requests to the right host, and not too often."""

from __future__ import annotations

import pytest

from lightning_sm.data.feeder import scheduler as scheduler_module
from lightning_sm.data.feeder.scheduler import Retry
from tests.fakes.schedulers import NO_END, asked, host_status, limits, make, set_window, step_counts, warm


def hedged():
    """Return a scheduler that has just hedged host a's request for step 0 on host b, the time, and both requests."""
    scheduler, now = warm({"a": 1.0, "b": 1.0})
    scheduler.open_pass(2, limits(100, 2))
    first, second = scheduler.next_requests(now)
    scheduler.completed(second.request_id, now + 1.0)
    assert scheduler.next_requests(now + 1.0) == []
    wakeup = scheduler.next_wakeup(now + 1.0)
    assert wakeup == now + 3.0
    assert scheduler.next_requests(wakeup - 0.01) == []
    (hedge,) = scheduler.next_requests(wakeup)
    return scheduler, wakeup, first, hedge


def test_late_request_is_sent_to_another_host():
    """After three times the median latency, an idle host gets one duplicate of a late request."""
    scheduler, now, first, hedge = hedged()
    assert (hedge.host, hedge.first_step, hedge.is_hedge) == ("b", first.first_step, True)
    assert host_status(scheduler, "a").num_hedges == 1
    assert scheduler.passes(now)[0].requested == [(first.host, 3.0), (hedge.host, 0.0)]
    assert scheduler.next_requests(now + 100.0) == []
    assert scheduler.next_wakeup(now + 100.0) is None


@pytest.mark.parametrize("winner", [0, 1])
def test_first_answer_wins(winner):
    """The request that loses is returned for cancelling, frees its credit at once, and its late answer is refused."""
    scheduler, now, *pair = hedged()
    assert scheduler.completed(pair[winner].request_id, now + 1.0) == (pair[1 - winner],)
    assert host_status(scheduler, pair[1 - winner].host).num_in_flight == 0
    assert scheduler.completed(pair[1 - winner].request_id, now + 1.0) is None


@pytest.mark.parametrize("loser", [0, 1])
def test_failure_of_one_of_two_leaves_the_other(loser):
    """While the duplicate of a failed request is in flight, the step is not requested again."""
    scheduler, now, *pair = hedged()
    assert not scheduler.failed(pair[loser].request_id, now, retry=Retry.ELSEWHERE).is_fatal
    assert [host for host, _ in scheduler.passes(now)[0].requested] == [pair[1 - loser].host]
    assert step_counts(scheduler, 2)[0] == 0
    decision = scheduler.failed(pair[1 - loser].request_id, now, retry=Retry.NEVER)
    assert (decision.is_fatal, decision.cancel) == (True, ())


def test_fatal_failure_cancels_the_duplicate():
    """If one of two requests for a step fails for good, the other is returned for cancelling."""
    scheduler, now, first, hedge = hedged()
    decision = scheduler.failed(first.request_id, now, retry=Retry.NEVER)
    assert decision.cancel == (hedge,)
    assert scheduler.completed(hedge.request_id, now) is None
    assert host_status(scheduler, "b").num_in_flight == 0


def test_hedge_of_a_lost_host_is_not_sent_twice():
    """If one of two hosts with the same step is lost, the other's request continues."""
    scheduler, now, _, hedge = hedged()
    scheduler.host_lost("a", is_silent=False)
    assert scheduler.next_requests(now) == []
    assert scheduler.completed(hedge.request_id, now) == ()


def test_nothing_is_late_without_samples():
    """Before three answers there is no median, so no request is hedged, however long it takes."""
    scheduler = make("a", "b", window=2)
    scheduler.next_requests(0.0)
    scheduler.completed(1, 0.1)
    assert scheduler.next_requests(1000.0) == []
    assert scheduler.next_wakeup(1000.0) is None


def test_nothing_is_late_before_the_minimum():
    """However quick the answers are, no request is hedged within 50 ms."""
    scheduler, now = warm({"a": 0.001, "b": 0.001})
    scheduler.open_pass(2, limits(100, 1))
    scheduler.next_requests(now)
    assert scheduler.next_wakeup(now) == now + 0.05


def test_next_step_is_hedged_before_anything_else_is_sent():
    """A free credit goes to the late step that the consumer needs, not to a TODO step; other late steps wait."""
    scheduler, now = warm({"a": 1.0, "b": 1.0}, num_credits=2)
    scheduler.open_pass(2, limits(100, 50))
    assert asked(scheduler.next_requests(now)) == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    scheduler.completed(13, now + 3.0)
    (hedge,) = scheduler.next_requests(now + 3.0)
    assert (hedge.host, hedge.first_step, hedge.is_hedge) == ("b", 0, True)
    scheduler.completed(11, now + 3.0)
    assert [(r.first_step, r.is_hedge) for r in scheduler.next_requests(now + 3.0)] == [(4, False)]


def test_hedge_goes_to_a_host_where_the_step_has_not_failed():
    """A slow host, or one where the step has failed, gets the duplicate only if no other host is idle."""
    scheduler, now = warm({"a": 1.0, "b": 9.0, "c": 1.1})
    scheduler.open_pass(2, limits(1, 1))
    (first,) = scheduler.next_requests(now)
    assert first.host == "a"
    (hedge,) = scheduler.next_requests(now + 9.0)
    assert (hedge.host, hedge.first_step) == ("c", 0)
    scheduler.failed(hedge.request_id, now + 9.0, retry=Retry.ONCE)
    assert asked(scheduler.next_requests(now + 9.0)) == [("b", 0)]


def test_no_duplicate_goes_where_the_user_code_has_raised():
    """A late second attempt is never duplicated on the host where user code raised: a second error ends the pass."""
    scheduler, now = warm({"a": 1.0, "b": 1.0})
    scheduler.open_pass(2, limits(1, 1))
    (first,) = scheduler.next_requests(now)
    scheduler.failed(first.request_id, now, retry=Retry.ONCE)
    (second,) = scheduler.next_requests(now)
    assert (first.host, second.host) == ("a", "b")
    assert scheduler.next_requests(now + 1000.0) == []
    scheduler.host_up("c", 1)
    (hedge,) = scheduler.next_requests(now + 1000.0)
    assert (hedge.host, hedge.is_hedge) == ("c", True)


def test_only_what_the_consumer_will_wait_for_is_hedged():
    """A late request is not hedged if its step is needed only after more answers, as it may still be in time."""
    scheduler, now = warm({"a": 1.0, "b": 1.0}, num_credits=2)
    scheduler.open_pass(2, limits(100, 8))
    requests = {request.first_step: request for request in scheduler.next_requests(now)}
    scheduler.completed(requests[3].request_id, now + 1.0)
    assert [r.first_step for r in scheduler.next_requests(now + 1.0)] == [4]
    scheduler.host_up("a", 4), scheduler.host_up("b", 4)
    hedges = [r.first_step for r in scheduler.next_requests(now + 4.0) if r.is_hedge]
    assert hedges[:1] == [0]
    assert 2 not in hedges, "two answers a second: step 2 is needed in one second at the earliest"


def test_frozen_worker_of_the_only_host_is_hedged_on_it():
    """With one host up, a duplicate goes to the same host after ten times the median, and at least 2 s."""
    for latency_s, after_s in ((1.0, 10.0), (0.01, 2.0)):
        scheduler, now = warm({"a": latency_s}, num_credits=2)
        scheduler.open_pass(2, limits(1, 1))
        scheduler.next_requests(now)
        assert scheduler.next_wakeup(now) == now + after_s
        assert asked(scheduler.next_requests(now + after_s)) == [("a", 0)]


def test_hedges_cost_a_part_of_the_work():
    """Beyond the burst, hedges cost at most a twentieth of the work, even if the hedged batches are heavy."""
    scheduler, now = warm({"a": 1.0, "b": 1.0, "c": 1.0}, num_credits=4)
    scheduler.open_pass(2, limits(NO_END, 64))
    work_s = hedged_s = 0.0
    slow = set()
    for _ in range(400):
        for request in scheduler.next_requests(now):
            if request.first_step % 8 == 0:  # heavy on every host
                slow.add(request.request_id)
        in_flight = {r.request_id: r for r in scheduler._requests.values()}
        now += 1.0
        for request in list(in_flight.values()):
            cost_s = 10.0 if request.request_id in slow else 1.0
            if now - request.sent_at >= cost_s:
                superfluous = scheduler.completed(request.request_id, now, cost_s)
                work_s += cost_s
                hedged_s += cost_s * len(superfluous)
        scheduler.advance(2, scheduler.passes(now)[0].waiting_for)
    assert hedged_s > 0
    assert hedged_s <= 0.05 * work_s + (4 + 4) * 10.0


def test_small_budget_stops_hedges(monkeypatch):
    """Once the burst is used up, hedges wait until more work is done, except, much later, for the awaited step."""
    monkeypatch.setattr(scheduler_module, "HEDGE_BURST", -1)
    monkeypatch.setattr(scheduler_module, "HEDGE_BUDGET", 0.0)
    scheduler, now = warm({"a": 1.0, "b": 1.0, "c": 1.0})
    scheduler.open_pass(2, limits(3, 3))
    first, second, _ = scheduler.next_requests(now)
    scheduler.completed(second.request_id, now + 1.0)
    assert scheduler.next_requests(now + 29.0) == []
    (hedge,) = scheduler.next_requests(now + 30.0)
    assert (hedge.first_step, hedge.is_hedge, hedge.host) == (0, True, second.host)
    assert scheduler.completed(hedge.request_id, now + 31.0) == (first,)


def test_without_a_free_slot_there_is_no_request():
    """Each request takes a slot, so there are as many requests, hedges included, as there are free slots."""
    scheduler, now = warm({"a": 1.0, "b": 1.0}, num_credits=3)
    free = [5, 4, 3]
    scheduler.open_pass(2, limits(100, 4, free=free))
    assert [request.slot for request in scheduler.next_requests(now)] == [3, 4, 5]
    assert scheduler.next_requests(now + 3.0) == []
    free.append(7)
    assert [(r.slot, r.first_step, r.is_hedge) for r in scheduler.next_requests(now + 3.0)] == [(7, 0, True)]


def answer_one_by_one(scheduler, now, latency_s, number):
    """Answer requests of pass 1 one at a time, and return the time."""
    for _ in range(number):
        (request,) = scheduler.next_requests(now)
        now += latency_s
        scheduler.completed(request.request_id, now)
        scheduler.advance(1, request.first_step + 1)
    return now


def test_three_answers_are_enough_to_know_what_is_late():
    """From the third answer on, there is a median, and a request can be late."""
    scheduler = make("a", "b", window=1)
    now = answer_one_by_one(scheduler, 0.0, 1.0, 2)
    scheduler.next_requests(now)
    assert scheduler.next_wakeup(now) is None
    scheduler = make("a", "b", window=1)
    now = answer_one_by_one(scheduler, 0.0, 1.0, 3)
    scheduler.next_requests(now)
    assert scheduler.next_wakeup(now) == now + 3.0


@pytest.mark.parametrize(
    ("latencies_s", "median_s"),
    [((1.0, 2.0, 32), 1.0), ((1.0, 2.0, 33), 2.0), ((2.0, 1.0, 31), 2.0), ((2.0, 1.0, 32), 1.0)],
)
def test_the_median_is_that_of_the_last_64_answers(latencies_s, median_s):
    """The median covers the last 64 answers; older ones are forgotten one by one."""
    before_s, after_s, number = latencies_s
    scheduler = make("a", "b", window=1, stop=NO_END)
    now = answer_one_by_one(scheduler, 0.0, before_s, 70)
    now = answer_one_by_one(scheduler, now, after_s, number)
    scheduler.next_requests(now)
    assert scheduler.next_wakeup(now) == pytest.approx(now + 3.0 * median_s)


def test_streams_are_never_hedged():
    """Streams are never hedged, because a second host would read the stream from its beginning."""
    scheduler = make("a", "b")
    scheduler.close_pass(1)
    scheduler.open_pass(1, limits(NO_END, 1), may_hedge=False)
    now = answer_one_by_one(scheduler, 0.0, 1.0, 5)
    scheduler.next_requests(now)
    assert scheduler.next_wakeup(now) is None
    assert scheduler.next_requests(now + 10_000.0) == []


@pytest.mark.parametrize("latency_s", [0.5, 4.0])
def test_as_many_hedges_as_the_burst_are_open_at_a_time(latency_s, monkeypatch):
    """Without a budget, only as many late batches are hedged at a time as the burst allows, however heavy they are."""
    monkeypatch.setattr(scheduler_module, "HEDGE_BUDGET", 0.0)
    monkeypatch.setattr(scheduler_module, "HEDGE_BURST", -1)
    scheduler, now = warm({"a": latency_s, "b": latency_s}, num_credits=3)
    scheduler.open_pass(2, limits(100, 3))
    set_window(scheduler, 2, 3)
    first = scheduler.next_requests(now)
    assert asked(first) == [("a", 0), ("b", 1), ("a", 2)]
    hedges = scheduler.next_requests(now + 3 * latency_s)
    assert len(hedges) == 2
