"""The feeder's scheduler: late requests are sent a second time, to the right host and not too often."""

from __future__ import annotations

import pytest

from lightning_sm.data.feeder import scheduler as scheduler_module
from lightning_sm.data.feeder.scheduler import Retry
from tests.fakes.schedulers import asked, host_status, make, warm


def hedged():
    """Return a scheduler that has just hedged step 0, asked of host a at time 0, on host b; and the hedge."""
    scheduler, now = warm({"a": 1.0, "b": 1.0})
    scheduler.open_pass(2, 0, 100, 2)
    first, second = scheduler.next_requests(now)
    scheduler.completed(second.request_id, now + 1.0)
    assert scheduler.next_requests(now + 1.0) == []
    wakeup = scheduler.next_wakeup(now + 1.0)
    assert wakeup == now + 3.0
    assert scheduler.next_requests(wakeup - 0.01) == []
    (hedge,) = scheduler.next_requests(wakeup)
    return scheduler, wakeup, first, hedge


def test_late_request_is_sent_to_another_host():
    """After three times the median latency an idle host gets a duplicate, one at a time."""
    scheduler, now, first, hedge = hedged()
    assert (hedge.host, hedge.step, hedge.is_hedge) == ("b", first.step, True)
    assert host_status(scheduler, "b").num_hedges == 1
    assert scheduler.passes()[0].requests == (first, hedge)
    assert scheduler.next_requests(now + 100.0) == []
    assert scheduler.next_wakeup(now + 100.0) is None


@pytest.mark.parametrize("winner", [0, 1])
def test_first_answer_wins(winner):
    """The loser of a hedge is returned to be cancelled, frees its credit at once, and is refused when it comes late."""
    scheduler, now, *pair = hedged()
    completion = scheduler.completed(pair[winner].request_id, now + 1.0)
    assert completion.is_accepted
    assert completion.cancel == (pair[1 - winner],)
    assert host_status(scheduler, pair[1 - winner].host).num_in_flight == 0
    assert not scheduler.completed(pair[1 - winner].request_id, now + 1.0).is_accepted


@pytest.mark.parametrize("loser", [0, 1])
def test_failure_of_one_of_two_leaves_the_other(loser):
    """While the duplicate of a failed request is in flight its step is not asked again."""
    scheduler, now, *pair = hedged()
    assert not scheduler.failed(pair[loser].request_id, now, retry=Retry.ELSEWHERE).is_fatal
    assert scheduler.passes()[0].requests == (pair[1 - loser],)
    assert scheduler.passes()[0].num_todo == 0
    decision = scheduler.failed(pair[1 - loser].request_id, now, retry=Retry.NEVER)
    assert (decision.is_fatal, decision.cancel) == (True, ())


def test_fatal_failure_cancels_the_duplicate():
    """When one of two requests of a step fails for good, the other is returned to be cancelled."""
    scheduler, now, first, hedge = hedged()
    decision = scheduler.failed(first.request_id, now, retry=Retry.NEVER)
    assert decision.cancel == (hedge,)
    assert not scheduler.completed(hedge.request_id, now).is_accepted
    assert host_status(scheduler, "b").num_in_flight == 0


def test_hedge_of_a_lost_host_is_not_sent_twice():
    """When one of two hosts with the same step is lost, the other's request continues."""
    scheduler, now, _, hedge = hedged()
    scheduler.host_lost("a", is_silent=False)
    assert scheduler.next_requests(now) == []
    assert scheduler.completed(hedge.request_id, now).cancel == ()


def test_nothing_is_late_without_samples():
    """Before three answers there is no median, and no hedge however long a request takes."""
    scheduler = make("a", "b", window=2)
    scheduler.next_requests(0.0)
    scheduler.completed(1, 0.1)
    assert scheduler.next_requests(1000.0) == []
    assert scheduler.next_wakeup(1000.0) is None


def test_nothing_is_late_before_the_minimum():
    """However quick the answers are, no request is hedged within 50 ms."""
    scheduler, now = warm({"a": 0.001, "b": 0.001})
    scheduler.open_pass(2, 0, 100, 1)
    scheduler.next_requests(now)
    assert scheduler.next_wakeup(now) == now + 0.05


def test_next_step_is_hedged_before_anything_else_is_sent():
    """A credit that becomes free goes to the late step that the consumer needs, not to a TODO step; others wait."""
    scheduler, now = warm({"a": 1.0, "b": 1.0}, num_credits=2)
    scheduler.open_pass(2, 0, 100, 50)
    assert asked(scheduler.next_requests(now)) == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    scheduler.completed(13, now + 3.0)
    (hedge,) = scheduler.next_requests(now + 3.0)
    assert (hedge.host, hedge.step, hedge.is_hedge) == ("b", 0, True)
    scheduler.completed(11, now + 3.0)
    assert [(r.step, r.is_hedge) for r in scheduler.next_requests(now + 3.0)] == [(4, False)]


def test_hedge_goes_to_the_quickest_host():
    """Of several idle hosts the one with the best latency gets the duplicate, one where the step failed last."""
    scheduler, now = warm({"a": 1.0, "b": 1.2, "c": 1.1})
    scheduler.open_pass(2, 0, 1, 1)
    assert asked(scheduler.next_requests(now)) == [("a", 0)]
    assert asked(scheduler.next_requests(now + 9.0)) == [("c", 0)]
    scheduler.failed(16, now + 9.0, retry=Retry.ONCE)
    assert asked(scheduler.next_requests(now + 9.0)) == [("b", 0)]


def test_frozen_worker_of_the_only_host_is_hedged_on_it():
    """With one host up a duplicate goes to the same host, after ten times the median and at least 2 s."""
    for latency_s, after_s in ((1.0, 10.0), (0.01, 2.0)):
        scheduler, now = warm({"a": latency_s}, num_credits=2)
        scheduler.open_pass(2, 0, 1, 1)
        scheduler.next_requests(now)
        assert scheduler.next_wakeup(now) == now + after_s
        assert asked(scheduler.next_requests(now + after_s)) == [("a", 0)]


def test_hedges_are_bounded():
    """Hedges beyond the burst (4 and the credits of a host) come only with answers, at the rate of the budget."""
    scheduler, now = warm({"a": 1.0, "b": 1.0, "c": 1.0}, num_credits=12, hedge_factor=1.0)
    scheduler.open_pass(2, 0, 36, 36)
    requests, num_hedges = scheduler.next_requests(now), 0
    answers = [request for request in requests if request.host == "c"]
    while answers:
        for request in answers:
            scheduler.completed(request.request_id, now + 1.0)
        answers = scheduler.next_requests(now + 1.0)
        num_hedges += len(answers)
    assert num_hedges == 4 + 12 + int(0.05 * (15 + 12 + 18)) == 18


def test_small_budget_stops_hedges(monkeypatch):
    """A burst that is used up stops hedges until more answers have come, but for the awaited step, much later."""
    monkeypatch.setattr(scheduler_module, "HEDGE_BURST", -1)
    monkeypatch.setattr(scheduler_module, "HEDGE_BUDGET", 0.0625)
    scheduler, now = warm({"a": 1.0, "b": 1.0, "c": 1.0})
    scheduler.open_pass(2, 0, 3, 3)
    _, second, third = scheduler.next_requests(now)
    assert scheduler.next_wakeup(now) == now + 30.0
    scheduler.completed(second.request_id, now + 3.0)
    assert [r.is_hedge for r in scheduler.next_requests(now + 3.0)] == [True]
    scheduler.completed(third.request_id, now + 3.0)
    assert scheduler.next_requests(now + 3.0) == []


def test_the_awaited_step_is_hedged_beyond_the_budget(monkeypatch):
    """A frozen worker does not hold the step for which a consumer waits, however many hedges there were."""
    monkeypatch.setattr(scheduler_module, "HEDGE_BURST", -4)
    scheduler, now = warm({"a": 1.0, "b": 1.0})
    scheduler.open_pass(2, 0, 2, 2)
    first, second = scheduler.next_requests(now)
    scheduler.completed(second.request_id, now + 1.0)
    assert scheduler.next_requests(now + 29.0) == []
    (hedge,) = scheduler.next_requests(now + 30.0)
    assert (hedge.step, hedge.is_hedge, hedge.host) == (0, True, second.host)
    assert scheduler.completed(hedge.request_id, now + 31.0).cancel == (first,)


def test_late_step_waits_for_a_quick_host():
    """A slow idle host does not get the duplicate while a quick one is up, even if that is busy."""
    scheduler, now = warm({"a": 1.0, "b": 1.0, "c": 9.0})
    scheduler.open_pass(2, 0, 100, 3)
    assert asked(scheduler.next_requests(now)) == [("a", 0), ("b", 1)]
    assert scheduler.next_requests(now + 5.0) == []
    scheduler.host_lost("b", is_silent=True)
    assert asked(scheduler.next_requests(now + 5.0)) == [("c", 0)]


def test_only_the_next_step_is_hedged_on_a_slow_host():
    """Where only a slow host could take duplicates, it does so for the step that the consumer needs, not for others."""
    scheduler, now = warm({"a": 1.0, "c": 9.0}, num_credits=2)
    scheduler.open_pass(2, 0, 2, 2)
    assert asked(scheduler.next_requests(now)) == [("a", 0), ("a", 1)]
    assert asked(scheduler.next_requests(now + 5.0)) == [("c", 0)]
