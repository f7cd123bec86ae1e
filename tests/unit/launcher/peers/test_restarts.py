"""How the launchers of a job restart together: real sockets on 127.0.0.x."""

from __future__ import annotations

import contextlib
import queue
import threading

import pytest

from lightning_sm.job.stopping import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher.peers.messages import PROTOCOL
from lightning_sm.launcher.peers.outcome import Restart
from tests.unit.launcher.peers.launchers import DATA, MAIN, TIMEOUT_S, Job, joined, outcomes_after_waiting

BROKEN = Outcome.of_exit_code(1, "ValueError: broken", may_restart=True)
ENDED = Outcome.of_exit_code(143, "killed by SIGTERM", may_restart=True)


def _starting(launchers):
    """Begin ``wait_for_start`` on these hosts; returns a queue of (host, whether it may start)."""
    answers = queue.Queue()
    for host, peers in launchers.items():
        threading.Thread(
            target=lambda host=host, peers=peers: answers.put((host, peers.wait_for_start())), daemon=True
        ).start()
    return answers


def _restart(launchers, failing):
    """One host fails, and all others end their scripts; returns when all may start again."""
    others = {host: peers for host, peers in launchers.items() if host not in (failing, DATA)}
    launchers[failing].report(BROKEN)
    for peers in others.values():
        order = peers.restarts.get(timeout=TIMEOUT_S)
        assert not order.may_start
        assert peers.restart.number == order.number
        peers.report(ENDED)
    assert launchers[failing].wait_for_decision(TIMEOUT_S) is None
    trainers = {**others, failing: launchers[failing]}
    answers = _starting(trainers)
    assert dict(answers.get(timeout=TIMEOUT_S) for _ in trainers) == dict.fromkeys(trainers, True)
    return order


@pytest.mark.parametrize("failing", [MAIN, "algo-3"])
def test_all_trainer_hosts_start_again_together(exits, lines, failing):
    """Whichever host fails, all are told why, and start; data hosts hear of it and have no part in it."""
    launchers = Job(exits, 3, 1).start_all(max_restarts=1)
    joined(lines, "algo-2", "algo-3", DATA)
    assert _restart(launchers, failing) == Restart(1, 1, OutcomeKind.FAILURE, "ValueError: broken")
    assert launchers[DATA].restarts.get(timeout=TIMEOUT_S).cause == "ValueError: broken"
    assert launchers[DATA].restart is None
    trainers = {host: peers for host, peers in launchers.items() if host != DATA}
    assert {peers.restart for peers in trainers.values()} == {None}
    for peers in trainers.values():
        peers.report(Outcome.of_exit_code(0))
    assert set(outcomes_after_waiting(trainers).values()) == {JobOutcome(OutcomeKind.SUCCESS)}
    assert launchers[DATA].received.get(timeout=TIMEOUT_S) == JobOutcome(OutcomeKind.SUCCESS)


def test_after_the_last_restart_the_job_fails(exits, lines):
    """All hosts learn the reason, with the number of restarts."""
    launchers = Job(exits).start_all(max_restarts=1)
    joined(lines, "algo-2")
    _restart(launchers, "algo-2")
    launchers["algo-2"].report(Outcome.of_exit_code(3, "KeyError: last", may_restart=True))
    reason = "KeyError: last\nThe job was restarted once before. First cause: ValueError: broken"
    for peers in launchers.values():
        assert peers.received.get(timeout=TIMEOUT_S) == JobOutcome(
            OutcomeKind.FAILURE, "algo-2", 3, Reason(reason, "KeyError: last")
        )


def test_a_host_that_had_finished_is_told_to_start_again(exits, lines):
    """It waits for the others, and its wait ends with the order."""
    launchers = Job(exits).start_all(max_restarts=1)
    joined(lines, "algo-2")
    launchers[MAIN].report(Outcome.of_exit_code(0))
    waiting = threading.Thread(target=launchers[MAIN].wait_for_peers, daemon=True)
    waiting.start()
    launchers["algo-2"].report(BROKEN)
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    assert launchers[MAIN].restart.number == 1
    answers = _starting(launchers)
    assert dict(answers.get(timeout=TIMEOUT_S) for _ in launchers) == {MAIN: True, "algo-2": True}


def test_a_host_that_is_stopped_ends_the_wait_of_all(exits, lines):
    """A stop during the pause: nobody starts, and all learn that the host was interrupted."""
    launchers = Job(exits, 3).start_all(max_restarts=5)
    joined(lines, "algo-2", "algo-3")
    launchers["algo-2"].report(BROKEN)
    launchers[MAIN].restarts.get(timeout=TIMEOUT_S)
    launchers[MAIN].report(ENDED)  # algo-3 still ends its script, so that nobody may start yet
    answers = _starting({host: launchers[host] for host in (MAIN, "algo-2")})
    launchers["algo-2"].stop_waiting()
    assert answers.get(timeout=TIMEOUT_S) == ("algo-2", False)
    launchers["algo-2"].report(Outcome.of_exit_code(143, "stopped"))
    assert answers.get(timeout=TIMEOUT_S) == (MAIN, False)
    assert launchers[MAIN].job_outcome.kind is OutcomeKind.INTERRUPTION


def test_a_host_that_comes_late_takes_part_in_a_restart(exits, lines):
    """It learns of the order when it connects, before its script has begun or after."""
    job = Job(exits, 3)
    launchers = {host: job.start(host, max_restarts=1, peers_timeout_s=TIMEOUT_S) for host in (MAIN, "algo-2")}
    joined(lines, "algo-2")
    launchers["algo-2"].report(BROKEN)
    launchers[MAIN].restarts.get(timeout=TIMEOUT_S)
    launchers[MAIN].report(ENDED)
    launchers["algo-3"] = job.start("algo-3")
    launchers["algo-3"].restarts.get(timeout=TIMEOUT_S)
    launchers["algo-3"].report(ENDED)
    answers = _starting(launchers)
    assert dict(answers.get(timeout=TIMEOUT_S) for _ in launchers) == dict.fromkeys(launchers, True)


def test_a_host_that_is_slow_to_start_takes_part_in_the_next_restart(exits, lines):
    """The others may have failed again before it has started: it starts nothing, and reports for that attempt, too."""
    launchers = Job(exits).start_all(max_restarts=2)
    joined(lines, "algo-2")
    main, slow = launchers[MAIN], launchers["algo-2"]
    main.report(BROKEN)
    slow.restarts.get(timeout=TIMEOUT_S)
    slow.report(ENDED)
    assert main.wait_for_decision(TIMEOUT_S) is None
    assert main.wait_for_start()
    main.report(BROKEN)
    assert slow.restarts.get(timeout=TIMEOUT_S).number == 2
    assert slow.wait_for_start()
    assert slow.restart.number == 2
    slow.report(ENDED)
    answers = _starting(launchers)
    assert dict(answers.get(timeout=TIMEOUT_S) for _ in launchers) == {MAIN: True, "algo-2": True}
    assert {peers.restart for peers in launchers.values()} == {None}


def test_the_only_host_restarts_without_a_port(exits):
    """A job of one host restarts by the same rules, and has no connections."""
    job = Job(exits, 1)
    other = job.start(MAIN)  # would take the port, if there were one
    peers = job.start(MAIN, max_restarts=1)
    assert (peers.is_alone, other.is_alone) == (True, True)
    peers.report(BROKEN)
    assert peers.wait_for_decision(TIMEOUT_S) is None
    assert peers.wait_for_start()
    peers.report(BROKEN)
    assert peers.wait_for_decision(TIMEOUT_S).reason.text.startswith("ValueError: broken\nThe job was restarted once")


def test_a_main_host_that_cannot_be_reached_is_named_once(exits, lines):
    """Refused connections are no news at first; after a while one line says that failures are not reported."""
    job = Job(exits)
    job.start("algo-2", unreached_s=0.3)
    lines.wait_for(
        f"No launcher of this job has answered on 127.0.0.2:{job.port} (algo-1) for 0.3 s: Connection refused. "
    )
    with pytest.raises(queue.Empty):
        lines.queue.get(timeout=1)
    job.start(MAIN)
    joined(lines, "algo-2")


def test_a_main_host_that_is_reached_in_time_is_not_named(exits, lines):
    """The line is for those that never reached it."""
    job = Job(exits)
    job.start(MAIN)
    job.start("algo-2", unreached_s=1.0)
    joined(lines, "algo-2")
    seen = []
    with contextlib.suppress(queue.Empty):
        while True:
            seen.append(lines.queue.get(timeout=1.5))
    assert not [line for line in seen if "has answered on" in line]


def test_hosts_that_never_come_are_named_by_the_main_host(exits, lines):
    """Also one whose launcher was killed while it introduced itself; the job goes on, and its failure names them."""
    job = Job(exits, 3, 1)
    hub = job.start(MAIN, unreached_s=1.5)
    job.start("algo-2")
    killed = job.connect()
    killed.send({"protocol": PROTOCOL, "nonce": "of the host", "host": "algo-3"})
    killed.sock.close()
    joined(lines, "algo-2")
    lines.wait_for("For 1.5 s, no launcher has connected from: algo-3, data-1. ")
    assert hub.received.empty()
    hub.report(BROKEN)
    reason = "ValueError: broken\nNo launcher has ever connected from: algo-3, data-1."
    assert hub.received.get(timeout=TIMEOUT_S).reason.text == reason
    assert len([line for line in lines.seen if "no launcher has connected" in line]) == 1
