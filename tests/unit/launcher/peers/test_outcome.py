"""The rules for the outcome of a job, with simulated times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_sm.job.outcomes import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher.peers.outcome import JobOutcomeTracker, Timings
from tests.unit.launcher.peers.launchers import BROKEN


def _tracker(trainers="ab", data_hosts="d", max_restarts=0, lost_s=10_000):
    timings = Timings(lost_s=lost_s, peers_timeout_s=10, after_failure_s=100)
    return JobOutcomeTracker([*trainers], [*data_hosts], timings, max_restarts)


def _pass(tracker, began, ended, alive):
    """Let time pass while these hosts are heard from."""
    for now in range(began, ended + 1):
        for host in alive:
            tracker.heard(host, now)
        tracker.update(now)


def test_hosts_that_do_not_end_are_waited_for_only_so_long():
    """After a failure, a script that does not exit holds up the other hosts for at most after_failure_s."""
    tracker = _tracker()
    for host in "abd":
        tracker.heard(host, 0)
    tracker.reported("a", BROKEN, 5)
    tracker.update(104)
    assert (tracker.is_over, tracker.awaited) == (False, ["b"])
    tracker.update(105)
    assert (tracker.is_over, tracker.job_outcome.host) == (True, "a")


def test_a_failure_names_the_hosts_whose_scripts_had_left_with_success():
    """A failure names hosts that had exited with code 0: a rank that exits early makes others fail obscurely."""
    tracker = _tracker()
    for host in "abd":
        tracker.heard(host, 0)
    tracker.reported("b", Outcome.of_exit_code(0), 4)
    tracker.reported("a", Outcome.of_exit_code(1, "RuntimeError: Connection closed by peer"), 5)
    expected = "RuntimeError: Connection closed by peer\nThe script had already exited with code 0 on: b."
    assert tracker.job_outcome.reason.text == expected


def test_of_a_restart_only_the_last_attempt_counts_for_that():
    """A failure after a restart does not name hosts that succeeded in an earlier attempt."""
    tracker = _tracker("ab", "", max_restarts=1)
    for host in "ab":
        tracker.heard(host, 0)
    tracker.reported("b", Outcome.of_exit_code(0), 4)
    tracker.reported("a", replace(BROKEN, may_restart=True), 5)
    tracker.update(6)
    tracker.reported("a", BROKEN, 7, attempt=1)
    assert "exited with code 0" not in tracker.job_outcome.reason.text


def test_absent_data_host_is_waited_for_after_a_failure_only():
    """After a failure, hosts wait for an absent data host, which must learn of it when it starts; not after success."""
    for code, is_over in ((0, True), (1, False)):
        tracker = _tracker()
        for host in "ab":
            tracker.heard(host, 0)
            tracker.reported(host, Outcome.of_exit_code(code), 1)
        tracker.update(2)
        assert tracker.is_over is is_over
        tracker.update(11)
        assert tracker.is_over


def test_training_continues_until_all_data_hosts_have_failed():
    """Training continues while one of two data hosts works; the job fails when the second one fails."""
    tracker = _tracker("a", "de")
    for host in "ade":
        tracker.heard(host, 0)
    tracker.reported("d", BROKEN, 1)
    assert tracker.job_outcome is None
    tracker.reported("e", Outcome.of_exit_code(9, "out of memory"), 2)
    assert tracker.job_outcome == JobOutcome(OutcomeKind.FAILURE, "e", 9, Reason("out of memory"))


def test_data_hosts_that_succeed_are_no_failure():
    """A data host that exited with 0 does not turn another data host's failure into the job's."""
    tracker = _tracker("a", "de")
    tracker.heard("a", 0)
    tracker.reported("d", Outcome.of_exit_code(0), 1)
    tracker.reported("e", BROKEN, 2)
    assert tracker.job_outcome is None


def test_lost_data_host_does_not_decide_the_outcome():
    """Losing a data host does not end the job; losing a trainer host does."""
    tracker = _tracker(lost_s=15)
    _pass(tracker, 0, 50, "ab")
    tracker.heard("d", 50)
    _pass(tracker, 50, 100, "ab")
    assert tracker.job_outcome is None
    _pass(tracker, 101, 114, "a")
    assert tracker.job_outcome is None
    _pass(tracker, 115, 115, "a")
    reason = Reason("Lost host b: its launcher has sent nothing for 15 s")
    assert tracker.job_outcome == JobOutcome(OutcomeKind.LOST, "b", 1, reason)


def test_a_main_host_that_was_suspended_calls_nobody_lost():
    """A main host that resumes after a suspension restarts every host's timeout, as it could hear from none."""
    tracker = _tracker(lost_s=15)
    _pass(tracker, 0, 10, "abd")
    tracker.update(1000)
    _pass(tracker, 1001, 1014, "a")
    assert tracker.job_outcome is None
    _pass(tracker, 1015, 1015, "a")
    assert tracker.job_outcome.host == "b"


def test_host_that_ended_is_not_awaited_again():
    """A host whose script has exited can reconnect and disappear without effect."""
    tracker = _tracker(lost_s=15)
    _pass(tracker, 0, 1, "ab")
    tracker.reported("b", Outcome.of_exit_code(0), 1)
    _pass(tracker, 2, 50, "a")
    tracker.heard("b", 50)
    _pass(tracker, 51, 100, "a")
    assert tracker.job_outcome is None
    assert tracker.awaited == ["a"]


def test_lost_host_that_returns_is_awaited_again():
    """A host that returns too late to change the outcome still gets time to exit."""
    tracker = _tracker(lost_s=15)
    tracker.heard("b", 0)
    _pass(tracker, 0, 15, "ad")
    assert tracker.job_outcome.host == "b"
    tracker.reported("a", Outcome.of_exit_code(143), 16)
    tracker.heard("b", 17)
    tracker.update(17)
    assert tracker.awaited == ["b"]
    assert not tracker.is_over
    tracker.reported("b", Outcome.of_exit_code(0), 18)
    tracker.update(18)
    assert tracker.is_over
    assert (tracker.job_outcome.kind, tracker.job_outcome.host) == (OutcomeKind.LOST, "b")


def test_hosts_are_known_by_their_names():
    """A tracker has the job's trainer hosts and data hosts, and no others."""
    assert [_tracker().has(name) for name in "abdx"] == [True, True, True, False]


def test_nothing_is_decided_before_a_host_has_joined():
    """While all hosts are absent, no timeout has started."""
    tracker = _tracker()
    tracker.update(1000)
    assert (tracker.is_over, tracker.job_outcome) == (False, None)


def test_a_lost_host_holds_nobody_up():
    """A job does not wait for lost hosts; it waits peers_timeout_s for a host that never connected."""
    for data_hosts, over_at in (("", 16), ("d", 26)):
        tracker = _tracker("ab", data_hosts, lost_s=15)
        tracker.heard("b", 0)
        _pass(tracker, 0, 15, "a")
        tracker.reported("a", BROKEN, 16)
        if data_hosts:
            tracker.update(over_at - 0.1)
            assert not tracker.is_over
        tracker.update(over_at)
        assert tracker.is_over


@pytest.mark.parametrize("case", ["absent", "after a failure"])
def test_a_limit_that_passed_long_ago_has_passed(case):
    """A timeout applies even if the main host, after a suspension, checks it much later."""
    tracker = _tracker()
    for host in "a" if case == "absent" else "abd":
        tracker.heard(host, 0)
    tracker.reported("a", BROKEN, 1)
    tracker.update(50 if case == "absent" else 5000)
    assert tracker.is_over


@pytest.mark.parametrize(("host", "first"), [("a", Outcome.of_exit_code(0)), ("d", Outcome.of_exit_code(0))])
def test_only_the_first_report_counts(host, first):
    """A host repeats its report with each request, and only the first one counts."""
    tracker = _tracker()
    for name in "abd":
        tracker.heard(name, 0)
    tracker.reported(host, first, 1)
    tracker.reported(host, BROKEN, 2)
    assert tracker.job_outcome is None
