"""How the launchers of a job restart together: real sockets on 127.0.0.x."""

from __future__ import annotations

import time

import pytest

from lightning_sm.job.outcomes import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher.peers.outcome import Restart
from tests.unit.launcher.peers.launchers import DATA, MAIN, TIMEOUT_S, Job, connected, end_outcomes, outcome_of, until

BROKEN = Outcome.of_exit_code(1, "ValueError: broken", may_restart=True)
ENDED = Outcome.of_exit_code(143, "killed by SIGTERM", may_restart=True)


def _ordered(peers, number=1):
    """Wait until a host has the order for this restart, and return it."""
    until(lambda: peers.order is not None and peers.order.number == number)
    return peers.order


def _next_attempts(launchers, attempt=0):
    """The attempts that these hosts may start."""
    return {None if peers.order is None else peers.order.next_attempt(attempt) for peers in launchers}


def _start(*launchers, attempt=1):
    """Wait until all hosts may start this attempt."""
    until(lambda: _next_attempts(launchers, attempt - 1) == {attempt})


def _restart(launchers, failing):
    """Let one host fail and the others exit, and wait until all may start again."""
    others = [peers for host, peers in launchers.items() if host not in (failing, DATA)]
    launchers[failing].report(BROKEN, 0)
    for peers in others:
        _ordered(peers)
        peers.report(ENDED, 0)
    assert launchers[failing].job_outcome is None
    _start(launchers[failing], *others)


@pytest.mark.parametrize("failing", [MAIN, "algo-3"])
def test_all_trainer_hosts_start_again_together(exits, failing):
    """Whichever host fails, all trainer hosts learn why and restart; data hosts are informed."""
    launchers = Job(exits, 3, 1).start_all(max_restarts=1)
    _restart(launchers, failing)
    data = launchers.pop(DATA)
    order = _ordered(data)
    assert order in [Restart(1, 1, OutcomeKind.FAILURE, "ValueError: broken", may_start) for may_start in (True, False)]
    for peers in launchers.values():
        peers.report(Outcome.of_exit_code(0), 1)
    assert end_outcomes(*launchers.values()) == {JobOutcome(OutcomeKind.SUCCESS)}
    assert outcome_of(data) == JobOutcome(OutcomeKind.SUCCESS)


def test_nobody_starts_before_all_scripts_have_exited(exits):
    """Every host, including the one that failed, waits until all scripts have exited."""
    launchers = Job(exits).start_all(max_restarts=1)
    launchers["algo-2"].report(BROKEN, 0)
    assert not _ordered(launchers[MAIN]).may_start
    assert _next_attempts(launchers.values()) == {None}
    launchers[MAIN].report(ENDED, 0)
    _start(*launchers.values())


def test_after_the_last_restart_the_job_fails(exits):
    """All hosts learn the reason and the number of restarts."""
    launchers = Job(exits).start_all(max_restarts=1)
    _restart(launchers, "algo-2")
    launchers["algo-2"].report(Outcome.of_exit_code(3, "KeyError: last", may_restart=True), 1)
    reason = "KeyError: last\nThe job was restarted once before. First cause: ValueError: broken"
    expected = JobOutcome(OutcomeKind.FAILURE, "algo-2", 3, Reason(reason, "KeyError: last"))
    assert {outcome_of(peers) for peers in launchers.values()} == {expected}


def test_a_host_that_had_finished_is_told_to_start_again(exits):
    """A host that finished and waits for the others receives the order to restart."""
    launchers = Job(exits).start_all(max_restarts=1)
    launchers[MAIN].report(Outcome.of_exit_code(0), 0)
    launchers["algo-2"].report(BROKEN, 0)
    assert _ordered(launchers[MAIN]).number == 1
    _start(*launchers.values())


def test_a_host_that_is_stopped_ends_the_wait_of_all(exits):
    """If a host is stopped during the pause, no host starts, and all learn of the interruption."""
    launchers = Job(exits, 3).start_all(max_restarts=5)
    launchers["algo-2"].report(BROKEN, 0)
    _ordered(launchers[MAIN])
    launchers[MAIN].report(ENDED, 0)  # algo-3's script still runs, so no host may start yet
    launchers["algo-2"].report(Outcome.of_exit_code(143, "stopped"), 0)
    assert outcome_of(launchers[MAIN]).kind is OutcomeKind.INTERRUPTION
    assert _next_attempts([launchers[MAIN]]) == {None}


def test_a_host_that_comes_late_takes_part_in_a_restart(exits):
    """A host that connects late receives the order, whether or not its script has started."""
    job = Job(exits, 3)
    hub, other = (job.start(host, max_restarts=1, peers_timeout_s=TIMEOUT_S) for host in (MAIN, "algo-2"))
    connected(other)
    other.report(BROKEN, 0)
    _ordered(hub)
    hub.report(ENDED, 0)
    late = job.start("algo-3")
    _ordered(late)
    late.report(ENDED, 0)
    _start(hub, other, late)


def test_a_host_that_is_slow_to_start_takes_part_in_the_next_restart(exits):
    """A host that is too slow for a restart skips that attempt, reports it as ended and joins the next one."""
    launchers = Job(exits).start_all(max_restarts=2)
    main, slow = launchers[MAIN], launchers["algo-2"]
    main.report(BROKEN, 0)
    _ordered(slow)
    slow.report(ENDED, 0)
    _start(main)
    main.report(BROKEN, 1)
    assert _ordered(slow, 2).next_attempt(0) == 1
    assert _ordered(slow, 2).next_attempt(1) is None
    slow.report(ENDED, 1)
    _start(*launchers.values(), attempt=2)


def test_the_only_host_restarts_without_a_port(exits):
    """The only host of a job restarts by the same rules, without connections."""
    job = Job(exits, 1)
    other = job.start(MAIN)  # would occupy the port if there were one
    peers = job.start(MAIN, max_restarts=1)
    assert (peers.is_alone, other.is_alone) == (True, True)
    peers.report(BROKEN, 0)
    _start(peers)
    peers.report(BROKEN, 1)
    assert outcome_of(peers).reason.text.startswith("ValueError: broken\nThe job was restarted once")
    until(lambda: peers.is_decided and peers.is_done)


def test_a_main_host_that_cannot_be_reached_is_named_once(exits, lines):
    """Refused connections are logged once, and only after a while: until then the main host may still be starting."""
    job = Job(exits)
    other = job.start("algo-2", unreached_s=0.3)
    text = f"No launcher of this job has answered on 127.0.0.2:{job.port} (algo-1) for 0.3 s: Connection refused. "
    lines.wait_for(text)
    job.start(MAIN)
    connected(other)
    assert len([line for line in lines.seen if "has answered on" in line]) == 1


def test_a_main_host_that_is_reached_in_time_is_not_named(exits, lines):
    """The line about an unreachable main host is not logged once the host has been reached."""
    job = Job(exits)
    launchers = job.start_all(unreached_s=0.5)
    launchers[MAIN].close()  # nobody answers from here on
    time.sleep(0.7)
    assert not [line for line in lines.seen if "has answered on" in line]


def test_hosts_that_never_come_are_named_by_the_main_host(exits, lines):
    """The main host logs which hosts have not connected, and the job continues."""
    job = Job(exits, 3, 1)
    hub = job.start(MAIN, unreached_s=1.5)
    connected(job.start("algo-2"))
    lines.wait_for("For 1.5 s, no launcher has connected from: algo-3, data-1. ")
    assert hub.job_outcome is None
    hub.report(BROKEN, 0)
    assert len([line for line in lines.seen if "no launcher has connected" in line]) == 1
