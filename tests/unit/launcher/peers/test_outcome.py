"""The rules of how a job ends, with times of the test's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_sm.job.stopping import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher.peers.outcome import JobOutcomeTracker
from tests.unit.launcher.peers.launchers import BROKEN

_LIMITS = {"reconnect_s": 1, "absent_s": 10, "after_failure_s": 100, "max_restarts": 0}


def _tracker(**timings):
    return JobOutcomeTracker(["a", "b"], ["d"], **{**_LIMITS, **timings})


def test_hosts_that_do_not_end_are_waited_for_only_so_long():
    """After a failure, a script that does not end holds the others up for after_failure_s."""
    tracker = _tracker()
    for host in "abd":
        tracker.joined(host, 0)
    tracker.reported("a", BROKEN, 5)
    tracker.update(104)
    assert (tracker.is_over, tracker.awaited) == (False, ["b"])
    tracker.update(105)
    assert (tracker.is_over, tracker.job_outcome.host) == (True, "a")


def test_a_failure_names_the_hosts_whose_scripts_had_left_with_success():
    """A rank that leaves in the middle of a training makes others fail, with errors that do not name it."""
    tracker = _tracker()
    for host in "abd":
        tracker.joined(host, 0)
    tracker.reported("b", Outcome.of_exit_code(0), 4)
    tracker.reported("a", Outcome.of_exit_code(1, "RuntimeError: Connection closed by peer"), 5)
    expected = "RuntimeError: Connection closed by peer\nBefore, the script had exited with code 0 on: b."
    assert tracker.job_outcome.reason.text == expected


def test_of_a_restart_only_the_last_attempt_counts_for_that():
    """What had ended with success before the restart has run again since."""
    tracker = JobOutcomeTracker(["a", "b"], [], **{**_LIMITS, "max_restarts": 1})
    for host in "ab":
        tracker.joined(host, 0)
    tracker.reported("b", Outcome.of_exit_code(0), 4)
    tracker.reported("a", replace(BROKEN, may_restart=True), 5)
    tracker.update(6)
    tracker.reported("a", BROKEN, 7, attempt=1)
    assert "exited with code 0" not in tracker.job_outcome.reason.text


def test_absent_data_host_is_waited_for_after_a_failure_only():
    """A data host that is about to start must learn of a failure; after success nobody waits for it."""
    for code, is_over in ((0, True), (1, False)):
        tracker = _tracker()
        for host in "ab":
            tracker.joined(host, 0)
            tracker.reported(host, Outcome.of_exit_code(code), 1)
        tracker.update(2)
        assert tracker.is_over is is_over
        tracker.update(11)
        assert tracker.is_over


def test_training_continues_until_all_data_hosts_have_failed():
    """One of two data hosts that fails ends nothing; when the other one fails, too, nobody can succeed."""
    tracker = JobOutcomeTracker(["a"], ["d", "e"], **_LIMITS)
    for host in "ade":
        tracker.joined(host, 0)
    tracker.reported("d", BROKEN, 1)
    assert tracker.job_outcome is None
    tracker.reported("e", Outcome.of_exit_code(9, "out of memory"), 2)
    assert tracker.job_outcome == JobOutcome(OutcomeKind.FAILURE, "e", 9, Reason("out of memory"))


def test_data_hosts_that_succeed_are_no_failure():
    """A data host that has left without an error does not make the next one's failure that of the job."""
    tracker = JobOutcomeTracker(["a"], ["d", "e"], **_LIMITS)
    tracker.joined("a", 0)
    tracker.reported("d", Outcome.of_exit_code(0), 1)
    tracker.reported("e", BROKEN, 2)
    assert tracker.job_outcome is None


def test_lost_data_host_does_not_decide_the_outcome():
    """A data host that vanishes ends nothing; a trainer host that does, does."""
    tracker = _tracker()
    for host in "abd":
        tracker.joined(host, 0)
    tracker.left("d", 1, "it closed the connection")
    tracker.update(50)
    assert tracker.job_outcome is None
    tracker.left("b", 50, "it closed the connection")
    tracker.update(50.9)
    assert tracker.job_outcome is None
    tracker.update(51)
    assert tracker.job_outcome == JobOutcome(OutcomeKind.LOST, "b", 1, Reason("Lost host b: it closed the connection"))


def test_host_that_ended_is_not_awaited_again():
    """A launcher whose script has ended may come and go."""
    tracker = _tracker()
    tracker.joined("a", 0)
    tracker.joined("b", 0)
    tracker.reported("b", Outcome.of_exit_code(0), 1)
    tracker.left("b", 2, "it closed the connection")
    tracker.joined("b", 3)
    tracker.update(50)
    assert tracker.job_outcome is None
    assert tracker.awaited == ["a"]


def test_lost_host_that_returns_is_awaited_again():
    """A host that reconnects too late to change the outcome still gets its time to end."""
    tracker = _tracker()
    tracker.joined("a", 0)
    tracker.joined("b", 0)
    tracker.joined("d", 0)
    tracker.left("b", 1, "it closed the connection")
    tracker.update(2)
    tracker.reported("a", Outcome.of_exit_code(143), 3)
    tracker.joined("b", 4)
    tracker.update(5)
    assert tracker.awaited == ["b"]
    assert not tracker.is_over
    tracker.reported("b", Outcome.of_exit_code(0), 6)
    tracker.update(6)
    assert tracker.is_over
    assert (tracker.job_outcome.kind, tracker.job_outcome.host) == (OutcomeKind.LOST, "b")


def test_a_failure_names_the_hosts_that_never_came():
    """Only those that had time to, and that have not come since."""
    for late, note in (
        ("", "\nNo launcher has ever connected from: b, d."),
        ("b", "\nNo launcher has ever connected from: d."),
    ):
        tracker = _tracker()
        tracker.joined("a", 0)
        assert tracker.name_missing() == ["b", "d"]
        for host in late:
            tracker.joined(host, 100)
        tracker.reported("a", BROKEN, 1800)
        assert tracker.job_outcome.reason == Reason(BROKEN.reason.text + note, BROKEN.reason.headline)
    tracker = _tracker()
    tracker.joined("a", 0)
    tracker.reported("a", BROKEN, 1)
    assert tracker.job_outcome.reason == BROKEN.reason


def test_hosts_are_known_by_their_names():
    """Trainer hosts and data hosts; a stranger is none."""
    assert [_tracker().has(name) for name in "abdx"] == [True, True, True, False]


def test_nothing_is_decided_before_a_host_has_joined():
    """Where all are absent, none has had its time yet."""
    tracker = _tracker()
    tracker.update(1000)
    assert (tracker.is_over, tracker.job_outcome) == (False, None)


def test_a_lost_host_holds_nobody_up():
    """When the others have ended, the job is over at once; one that never came has its time after the last change."""
    of_all, of_one_absent = _tracker(), JobOutcomeTracker(["a", "b", "c"], [], **_LIMITS)
    for tracker, hosts in ((of_all, "abd"), (of_one_absent, "ab")):
        for host in hosts:
            tracker.joined(host, 1000)
        tracker.left("b", 1001, "it closed the connection")
        tracker.update(1002)
        tracker.reported("a", BROKEN, 1003)
    of_all.update(1003)
    assert of_all.is_over
    of_one_absent.update(1012.9)
    assert not of_one_absent.is_over
    of_one_absent.update(1013)
    assert of_one_absent.is_over


@pytest.mark.parametrize("case", ["reconnect_s", "absent_s", "after_failure_s"])
def test_a_limit_that_passed_long_ago_has_passed(case):
    """A main host that was suspended looks when it resumes, not to the second."""
    tracker = _tracker()
    for host in "a" if case == "absent_s" else "abd":
        tracker.joined(host, 0)
    if case == "reconnect_s":
        tracker.left("b", 0, "it closed the connection")
        tracker.update(5000)
        assert tracker.job_outcome.kind is OutcomeKind.LOST
    else:
        tracker.reported("a", BROKEN, 1)
        tracker.update(50 if case == "absent_s" else 5000)
        assert tracker.is_over


@pytest.mark.parametrize(("host", "first"), [("a", Outcome.of_exit_code(0)), ("d", Outcome.of_exit_code(0))])
def test_only_the_first_report_counts(host, first):
    """A host reports again on each new connection; what its script did after that is none of the job's."""
    tracker = _tracker()
    for name in "abd":
        tracker.joined(name, 0)
    tracker.reported(host, first, 1)
    tracker.reported(host, BROKEN, 2)
    assert tracker.job_outcome is None
