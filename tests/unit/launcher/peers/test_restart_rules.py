"""The rules for restarting all trainer hosts, with simulated times."""

from __future__ import annotations

import pytest

from lightning_sm.job.outcomes import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher.peers.outcome import JobOutcomeTracker, Restart, Timings, pause_s

BROKEN = Outcome.of_exit_code(1, "ValueError: broken\non trainer host b (exit code 1)", may_restart=True)
ENDED = Outcome.of_exit_code(143, "killed by SIGTERM", may_restart=True)
CAUSE = "ValueError: broken on trainer host b (exit code 1)"


def _tracker(trainers="ab", data_hosts="d", max_restarts=2, joined="abd", lost_s=10_000):
    timings = Timings(lost_s=lost_s, peers_timeout_s=10, after_failure_s=100)
    tracker = JobOutcomeTracker([*trainers], [*data_hosts], timings, max_restarts)
    for host in joined:
        tracker.heard(host, 0)
    return tracker


def _restarted(tracker, now):
    """Let both trainer hosts fail, b first, and restart; return the time of the restart."""
    attempt = tracker.restart.number if tracker.restart else 0
    tracker.reported("b", BROKEN, now, attempt)
    tracker.reported("a", ENDED, now, attempt)
    now += pause_s(attempt + 1)
    tracker.update(now)
    assert tracker.restart.may_start
    return now


def test_all_start_together_when_all_have_ended():
    """A failure orders a restart and gives its cause; hosts start together once all scripts have exited."""
    tracker = _tracker()
    tracker.reported("b", BROKEN, 10)
    assert tracker.restart == Restart(1, 2, OutcomeKind.FAILURE, CAUSE)
    tracker.update(60)
    assert not tracker.restart.may_start
    assert tracker.awaited == ["a"]
    tracker.reported("a", ENDED, 70)
    tracker.update(70)
    assert tracker.restart == Restart(1, 2, OutcomeKind.FAILURE, CAUSE, may_start=True)
    assert (tracker.job_outcome, tracker.is_over, tracker.awaited) == (None, False, ["a", "b"])


def test_a_pause_comes_before_the_second_restart():
    """Hosts pause before the second restart: the first one did not remove the cause."""
    tracker = _tracker()
    _restarted(tracker, 10)
    for host, outcome in (("b", BROKEN), ("a", ENDED)):
        tracker.reported(host, outcome, 20, attempt=1)
    tracker.update(20.9)
    assert not tracker.restart.may_start
    tracker.update(21)
    assert tracker.restart == Restart(2, 2, OutcomeKind.FAILURE, CAUSE, may_start=True)


def test_a_report_that_comes_twice_does_not_prolong_the_pause():
    """A host repeats its report with each request, which does not prolong the pause."""
    tracker = _tracker()
    _restarted(tracker, 10)
    for host, outcome in (("b", BROKEN), ("a", ENDED)):
        tracker.reported(host, outcome, 20, attempt=1)
    tracker.reported("a", ENDED, 20.5, attempt=1)
    tracker.update(21)
    assert tracker.restart.may_start


def test_a_restart_whose_scripts_have_all_exited_is_not_abandoned():
    """The time limit applies to the scripts' exits, not to the pause that follows them."""
    tracker = _tracker()
    _restarted(tracker, 10)
    tracker.reported("b", BROKEN, 20, attempt=1)
    tracker.reported("a", ENDED, 119.5, attempt=1)
    tracker.update(120)
    assert (tracker.job_outcome, tracker.restart.may_start) == (None, False)
    tracker.update(120.5)
    assert tracker.restart.may_start


def test_a_job_that_is_restarted_may_succeed():
    """After a restart, reports of the new attempt count, and the job can succeed as usual."""
    tracker = _tracker()
    now = _restarted(tracker, 10)
    tracker.reported("a", BROKEN, now, attempt=0)  # a repeated report of the first attempt
    for host in "ab":
        tracker.reported(host, Outcome.of_exit_code(0), now, attempt=1)
    tracker.update(now)
    assert (tracker.job_outcome, tracker.is_over) == (JobOutcome(OutcomeKind.SUCCESS), True)


def test_pauses_grow():
    """Pauses are 0, 1, 2, 4, ... s and at most 30 s, for any number of restarts."""
    assert [pause_s(number) for number in (1, 2, 3, 4, 6, 7, 8, 1000)] == [0, 1, 2, 4, 16, 30, 30, 30]


def test_the_last_failure_ends_the_job_and_names_the_restarts():
    """The final reason combines the last failure, the number of restarts and the first cause in 1024 characters."""
    tracker = _tracker()
    now = _restarted(tracker, _restarted(tracker, 10))
    tracker.reported(
        "a", Outcome.of_exit_code(137, "killed by SIGKILL\n" + 2000 * "x", may_restart=True), now, attempt=2
    )
    outcome = tracker.job_outcome
    assert (outcome.kind, outcome.host, outcome.exit_code) == (OutcomeKind.FAILURE, "a", 137)
    assert outcome.reason.text.startswith("killed by SIGKILL\nxxx")
    assert outcome.reason.text.endswith(f"xxx\nThe job was restarted 2 times before. First cause: {CAUSE}")
    assert len(outcome.reason.text) == 1024
    tracker.reported("b", ENDED, now, attempt=2)
    tracker.update(now)
    assert tracker.is_over


def test_a_long_cause_is_shortened():
    """A restart's cause is shortened, to leave room for the reason of the last failure."""
    tracker = _tracker(max_restarts=1)
    tracker.reported("b", Outcome.of_exit_code(1, 1024 * "x", may_restart=True), 10)
    assert tracker.restart.cause == 297 * "x" + "..."


@pytest.mark.parametrize("max_restarts", [0, 2])
@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.of_exit_code(2, "error: unrecognized arguments"),
        Outcome.of_exit_code(143, "The job was stopped or interrupted"),
    ],
)
def test_what_would_come_again_and_a_stop_are_no_reason_to_restart(max_restarts, outcome):
    """Permanent errors and stops fail the job without a restart."""
    tracker = _tracker(max_restarts=max_restarts)
    tracker.reported("a", outcome, 10)
    assert tracker.restart is None
    assert tracker.job_outcome == JobOutcome(outcome.kind, "a", outcome.exit_code, outcome.reason)


def test_a_stop_ends_a_restart_that_is_in_progress():
    """A stop on any host cancels a restart, even if the host's script has exited and only waits to start again."""
    for host, has_ended in (("a", False), ("b", True), ("a", True)):
        tracker = _tracker()
        tracker.reported("b", BROKEN, 10)
        if has_ended:
            tracker.reported("a", ENDED, 10.5)
        tracker.reported(host, Outcome.of_exit_code(143, "stopped"), 10.6)
        reason = f"stopped\nRestart 1 of 2 was in progress. Its cause: {CAUSE}"
        assert tracker.job_outcome == JobOutcome(OutcomeKind.INTERRUPTION, host, 143, Reason(reason, "stopped"))
        tracker.update(30)
        assert not tracker.restart.may_start


def test_a_failure_of_two_hosts_is_one_restart():
    """Two hosts that fail at the same time cause one restart."""
    tracker = _tracker(max_restarts=1)
    tracker.reported("b", BROKEN, 10)
    tracker.reported("a", Outcome.of_exit_code(1, "RuntimeError: closed by peer", may_restart=True), 10)
    tracker.update(11)
    assert tracker.restart == Restart(1, 1, OutcomeKind.FAILURE, CAUSE, may_start=True)


def test_a_host_that_had_finished_starts_again():
    """A host that had finished also restarts, because its ranks belong to the same process group."""
    tracker = _tracker()
    tracker.reported("a", Outcome.of_exit_code(0), 5)
    tracker.reported("b", BROKEN, 10)
    tracker.update(11)
    assert tracker.restart.may_start
    assert tracker.awaited == ["a", "b"]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_host_that_is_lost_during_a_restart_ends_the_job(has_ended):
    """Losing a host during a restart ends the job, even if its script has exited: only the service replaces hosts."""
    tracker = _tracker("abc", "", joined="abc", lost_s=15)
    for host in "abc":
        tracker.heard(host, 10)
    tracker.reported("b", BROKEN, 10)
    if has_ended:
        tracker.reported("a", ENDED, 10)
    for now in range(11, 25):
        for host in "bc":  # the script on c does not exit
            tracker.heard(host, now)
        tracker.update(now)
    assert tracker.job_outcome is None
    tracker.update(25)
    lost = "Lost host a: its launcher has sent nothing for 15 s"
    reason = f"{lost}\nRestart 1 of 2 was in progress. Its cause: {CAUSE}"
    assert tracker.job_outcome == JobOutcome(OutcomeKind.LOST, "a", 1, Reason(reason, lost))


@pytest.mark.parametrize("now", [110, 5000])
def test_a_host_that_does_not_end_its_script_ends_the_job(now):
    """If a script does not exit, the job fails with the restart's cause and names the host that held it up."""
    tracker = _tracker()
    tracker.reported("b", BROKEN, 10)
    tracker.update(109)
    assert tracker.job_outcome is None
    tracker.update(now)
    outcome = tracker.job_outcome
    assert (outcome.host, outcome.exit_code) == ("b", 1)
    assert (
        outcome.reason.text
        == f"{BROKEN.reason.text}\nRestart 1 of 2 was abandoned: after 100 s, it was still waiting for a."
    )


def test_a_host_that_never_came_is_waited_for_a_short_time():
    """A restart waits briefly for absent hosts: a late host can join, one without this launcher cannot."""
    tracker = _tracker(joined="bd")
    tracker.reported("b", BROKEN, 10)
    tracker.update(20)
    assert tracker.job_outcome.host == "b"
    late = _tracker(joined="bd")
    late.reported("b", BROKEN, 10)
    late.heard("a", 15)
    late.update(60)
    late.reported("a", ENDED, 61)
    late.update(62)
    assert late.restart.may_start


def test_data_hosts_go_on():
    """A restart does not wait for data hosts, and their failures do not cause one."""
    tracker = _tracker(data_hosts="de", joined="abde")
    now = _restarted(tracker, 10)
    tracker.reported("d", Outcome.of_exit_code(9, "out of memory"), now)
    assert tracker.job_outcome is None
    tracker.reported("e", Outcome.of_exit_code(9, "out of memory"), now)
    assert (tracker.job_outcome.host, tracker.job_outcome.exit_code) == ("e", 9)
    assert tracker.restart.number == 1


def test_the_only_host_restarts_by_the_same_rules():
    """The only host of a job restarts by the same rules, without waiting for others."""
    tracker = _tracker(trainers="b", data_hosts="", joined="b", max_restarts=1)
    tracker.reported("b", BROKEN, 10)
    tracker.update(10)
    assert tracker.restart.may_start
    tracker.reported("b", BROKEN, 20, attempt=1)
    assert (
        tracker.job_outcome.reason.text
        == f"{BROKEN.reason.text}\nThe job was restarted once before. First cause: {CAUSE}"
    )


def test_a_connection_that_is_made_again_within_seconds_loses_nobody():
    """A host that reconnects within seconds is not lost: a reset must not end a job of 64 hosts."""
    hosts = [f"algo-{number}" for number in range(1, 65)]
    tracker, away = JobOutcomeTracker(hosts, [], Timings(), max_restarts=0), "algo-7"

    def stay_away(began, ended):
        tracker.heard(away, began)
        for now in range(began, ended + 1):
            for host in set(hosts) - {away}:
                tracker.heard(host, now)
            tracker.update(now)

    stay_away(0, 14)
    stay_away(15, 29)
    assert tracker.job_outcome is None
    stay_away(30, 45)
    assert tracker.job_outcome.kind is OutcomeKind.LOST
