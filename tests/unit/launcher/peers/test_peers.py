"""How the hosts of a job agree on its end: real sockets on 127.0.0.x."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time

import pytest

from lightning_sm.job.stopping import JobOutcome, Outcome, OutcomeKind, Reason
from tests.unit.launcher.peers.launchers import BROKEN, DATA, FAST, MAIN, TIMEOUT_S, Job, joined, outcomes_after_waiting


def test_failure_reaches_all_hosts(exits, lines):
    """All hosts learn of the first failure at once, with host, exit code and reason; later ones change nothing."""
    job = Job(exits, 3, 1)
    launchers = job.start_all()
    joined(lines, "algo-2", "algo-3", DATA)
    started = time.monotonic()
    launchers["algo-3"].report(BROKEN)
    expected = JobOutcome(OutcomeKind.FAILURE, "algo-3", 3, Reason("ValueError: broken"))
    assert {peers.received.get(timeout=TIMEOUT_S) for peers in launchers.values()} == {expected}
    assert time.monotonic() - started < TIMEOUT_S / 2
    launchers["algo-2"].report(Outcome.of_exit_code(143, "terminated"))
    launchers[MAIN].report(Outcome.of_exit_code(1, "another"))
    del launchers[DATA]
    assert set(outcomes_after_waiting(launchers).values()) == {expected}
    assert all(peers.received.empty() for peers in launchers.values())
    assert expected.is_failure


def test_nobody_leaves_before_the_last_trainer(exits, lines):
    """Hosts that finished first wait for the last one; then all learn that the job is over."""
    job = Job(exits, 3, 1)
    launchers = job.start_all()
    joined(lines, "algo-2", "algo-3", DATA)
    events = queue.Queue()

    def end(host):
        launchers[host].report(Outcome.of_exit_code(0))
        launchers[host].wait_for_peers()
        events.put(host)

    early = [threading.Thread(target=end, args=(host,), daemon=True) for host in (MAIN, "algo-2", DATA)]
    for thread in early:
        thread.start()
    with pytest.raises(queue.Empty):
        events.get(timeout=1.5 * FAST["peers_timeout_s"])
    events.put("the last one ends")
    launchers["algo-3"].report(Outcome.of_exit_code(0))
    assert launchers["algo-3"].wait_for_peers() == JobOutcome(OutcomeKind.SUCCESS)
    for thread in early:
        thread.join(TIMEOUT_S)
    assert events.get() == "the last one ends"
    assert {peers.received.get(timeout=TIMEOUT_S) for peers in launchers.values()} == {JobOutcome(OutcomeKind.SUCCESS)}
    assert not JobOutcome(OutcomeKind.SUCCESS).is_failure


def test_data_host_learns_of_the_end_while_it_serves(exits, lines):
    """A data host whose script runs learns that the trainers have finished, and does not hold them up."""
    job = Job(exits, 2, 1)
    launchers = job.start_all()
    joined(lines, "algo-2", DATA)
    data = launchers.pop(DATA)
    for peers in launchers.values():
        peers.report(Outcome.of_exit_code(0))
    assert set(outcomes_after_waiting(launchers).values()) == {JobOutcome(OutcomeKind.SUCCESS)}
    assert data.received.get(timeout=TIMEOUT_S) == JobOutcome(OutcomeKind.SUCCESS)


def test_failed_data_host_ends_nothing(exits, lines):
    """A data host that fails or vanishes is named in the log; training continues without it."""
    job = Job(exits, 1, 3)
    launchers = job.start_all()
    joined(lines, *job.data_hosts)
    launchers["data-1"].report(BROKEN)
    lines.wait_for(
        "The script on data host data-1 failed with exit code 3. Training continues without it. Cause: ValueError"
    )
    launchers["data-2"].close()
    lines.wait_for("Lost connection to the launcher on data host data-2: it closed the connection.")
    launchers[MAIN].report(Outcome.of_exit_code(0))
    assert launchers[MAIN].wait_for_peers() == JobOutcome(OutcomeKind.SUCCESS)
    assert launchers["data-1"].wait_for_peers() == JobOutcome(OutcomeKind.SUCCESS)


def test_failure_before_anything_else_frees_the_data_hosts(exits):
    """A script's failure at its first import reaches all hosts, in whatever order they connect."""
    job = Job(exits, 2, 1)
    data, other = job.start(DATA), job.start("algo-2")
    other.report(BROKEN)
    hub = job.start(MAIN)
    expected = JobOutcome(OutcomeKind.FAILURE, "algo-2", 3, Reason("ValueError: broken"))
    assert data.received.get(timeout=TIMEOUT_S) == expected
    hub.report(Outcome.of_exit_code(143))
    assert set(outcomes_after_waiting({"algo-2": other, MAIN: hub}).values()) == {expected}


def test_late_host_is_notified_at_once(exits):
    """A host that starts after the failure learns of it as soon as it connects, while the main host waits."""
    job = Job(exits, 3)
    hub, other = job.start(MAIN, peers_timeout_s=TIMEOUT_S, after_failure_s=2 * TIMEOUT_S), job.start("algo-2")
    other.report(BROKEN)
    assert hub.received.get(timeout=TIMEOUT_S).host == "algo-2"
    hub.report(Outcome.of_exit_code(143))
    late = job.start("algo-3")
    assert late.received.get(timeout=TIMEOUT_S).host == "algo-2"
    late.report(Outcome.of_exit_code(143))
    hosts = {MAIN: hub, "algo-2": other, "algo-3": late}
    assert {outcome.host for outcome in outcomes_after_waiting(hosts).values()} == {"algo-2"}


def test_main_host_that_fails_first_stays_until_all_have_come(exits):
    """A host that starts when the main host's script has failed already learns why, though that host leaves then."""
    job = Job(exits, 2, 1)
    hub, events = job.start(MAIN), queue.Queue()

    def fail():
        hub.report(BROKEN)
        hub.wait_for_absent_hosts(TIMEOUT_S)
        events.put("the main host leaves")
        hub.close()

    failing = threading.Thread(target=fail, daemon=True)
    failing.start()
    assert hub.received.get(timeout=TIMEOUT_S).host == MAIN
    other = job.start("algo-2")
    assert other.received.get(timeout=TIMEOUT_S).host == MAIN
    assert events.empty()  # the data host is still to come
    assert job.start(DATA).received.get(timeout=TIMEOUT_S).host == MAIN
    failing.join(TIMEOUT_S)
    assert not events.empty()


def test_main_host_that_fails_waits_only_so_long_for_hosts_that_never_come(exits):
    """Hosts without a launcher of ours do not keep a failed job."""
    hub = Job(exits).start(MAIN)
    hub.report(BROKEN)
    started = time.monotonic()
    hub.wait_for_absent_hosts(FAST["peers_timeout_s"])
    assert FAST["peers_timeout_s"] <= time.monotonic() - started < TIMEOUT_S / 2


def test_main_host_waits_only_so_long_for_hosts_that_never_came(exits):
    """Hosts without a launcher of ours are no error: the main host waits peers_timeout_s and calls the job finished."""
    hub = Job(exits, 3, 1).start(MAIN)
    started = time.monotonic()
    hub.report(Outcome.of_exit_code(0))
    assert hub.wait_for_peers() == JobOutcome(OutcomeKind.SUCCESS)
    assert FAST["peers_timeout_s"] <= time.monotonic() - started < TIMEOUT_S / 2


def test_other_host_waits_only_so_long_for_the_main_host(exits):
    """Where the main host has no launcher of ours, a host ends as it would alone, peers_timeout_s later."""
    peers = Job(exits).start("algo-2")
    started = time.monotonic()
    peers.report(Outcome.of_exit_code(0))
    assert peers.wait_for_peers() is None
    assert FAST["peers_timeout_s"] <= time.monotonic() - started < TIMEOUT_S / 2


def test_only_host_needs_no_port(exits):
    """A job of one host opens no port, starts no thread and waits for nobody."""
    threads = threading.active_count()
    peers = Job(exits, 1).start(MAIN)
    assert threading.active_count() == threads
    peers.report(Outcome.of_exit_code(1))
    peers.stop_waiting()
    assert peers.wait_for_peers() is None


def test_interruption_counts_as_failure(exits, lines):
    """A host that SIGTERM ended counts as failed, with exit code 143."""
    launchers = Job(exits).start_all()
    joined(lines, "algo-2")
    launchers[MAIN].report(Outcome.of_exit_code(143, "killed by SIGTERM"))
    assert launchers["algo-2"].received.get(timeout=TIMEOUT_S) == JobOutcome(
        OutcomeKind.INTERRUPTION, MAIN, 143, Reason("killed by SIGTERM")
    )


@pytest.mark.parametrize("character", ["x", "\0", "\n", "\U0001f600", "\ud800", '"'])
def test_any_reason_arrives(exits, lines, character):
    """A reason of 1024 characters fits into a line, whatever its characters; longer ones are cut."""
    launchers = Job(exits).start_all()
    joined(lines, "algo-2")
    launchers["algo-2"].report(Outcome.of_exit_code(1, character * 5000))
    reason = launchers[MAIN].received.get(timeout=TIMEOUT_S).reason.text
    assert reason == (character.replace("\ud800", r"\ud800") * 1024)[:1024]


def test_stop_waiting_ends_the_wait(exits, lines):
    """A host that is told to stop waits no longer; until then the log names the hosts that it waits for."""
    job = Job(exits)
    hub = job.start(MAIN, log_s=0.05)
    job.start("algo-2")
    joined(lines, "algo-2")
    hub.report(Outcome.of_exit_code(0))
    ended = threading.Thread(target=hub.wait_for_peers, daemon=True)
    ended.start()
    lines.wait_for("The script on this host has exited. Waiting for: algo-2.")
    assert ended.is_alive()
    hub.stop_waiting()
    ended.join(TIMEOUT_S)
    assert not ended.is_alive()


def test_waiting_without_a_report_returns(exits):
    """A launcher that never started a script has nothing to wait for."""
    assert Job(exits).start(MAIN).wait_for_peers() is None


def test_failing_callback_is_logged(exits, lines):
    """An error in the launcher's callback does not end the thread that others rely on."""

    def fail(_job_outcome):
        raise RuntimeError("callback")

    job = Job(exits)
    hub, other = job.start(MAIN, on_job_outcome=fail), job.start("algo-2")
    joined(lines, "algo-2")
    other.report(BROKEN)
    lines.wait_for("The launcher could not act on")
    hub.report(Outcome.of_exit_code(143))
    assert {outcome.host for outcome in outcomes_after_waiting({MAIN: hub, "algo-2": other}).values()} == {"algo-2"}


def test_brief_interruption_of_a_connection_loses_nobody(exits, lines):
    """A host that comes back in time is not lost, and reports as if nothing had happened."""
    job = Job(exits)
    hub = job.start(MAIN, reconnect_s=TIMEOUT_S)
    with job.make("algo-2"):
        joined(lines, "algo-2")
    again = job.start("algo-2")
    joined(lines, "algo-2")
    hub.report(Outcome.of_exit_code(0))
    again.report(Outcome.of_exit_code(0))
    assert set(outcomes_after_waiting({MAIN: hub, "algo-2": again}).values()) == {JobOutcome(OutcomeKind.SUCCESS)}


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_lost_main_host_is_news_only_before_the_job_has_failed(exits, lines, has_failed):
    """When the main host leaves after a failure that all know of, nobody logs that it is gone; else they do at once."""
    job = Job(exits)
    other = job.start("algo-2", reconnect_s=TIMEOUT_S)
    with job.make(MAIN) as hub:
        joined(lines, "algo-2")
        if has_failed:
            hub.report(BROKEN)
            assert other.received.get(timeout=TIMEOUT_S).host == MAIN
    job.start(MAIN)
    joined(lines, "algo-2")  # a second time: the connection was lost, and that was noticed
    assert any("Lost connection" in line for line in lines.seen) is not has_failed


def test_restarted_hub_learns_everything_again(exits, lines):
    """A main host that comes back in time gets all reports again."""
    job = Job(exits, 3)
    others = {host: job.start(host, reconnect_s=TIMEOUT_S) for host in ("algo-2", "algo-3")}
    with job.make(MAIN):
        joined(lines, "algo-2", "algo-3")
        others["algo-2"].report(Outcome.of_exit_code(0))
    hub = job.start(MAIN)
    joined(lines, "algo-2", "algo-3")
    for peers in (others["algo-3"], hub):
        peers.report(Outcome.of_exit_code(0))
    assert set(outcomes_after_waiting({**others, MAIN: hub}).values()) == {JobOutcome(OutcomeKind.SUCCESS)}


def test_fifty_hosts(exits, lines):
    """A failure on one of fifty hosts reaches all others soon, and all can end."""
    job = Job(exits, 51)
    launchers = job.start_all()
    joined(lines, *job.trainers[1:])
    started = time.monotonic()
    launchers["algo-50"].report(BROKEN)
    assert {peers.received.get(timeout=TIMEOUT_S).host for peers in launchers.values()} == {"algo-50"}
    assert time.monotonic() - started < TIMEOUT_S / 2
    for peers in launchers.values():
        peers.report(Outcome.of_exit_code(143))
    assert {outcome.host for outcome in outcomes_after_waiting(launchers).values()} == {"algo-50"}


def test_other_hosts_can_leave_after_the_main_host(exits, lines):
    """So that a main host that failed first, and writes a report, is the first whose exit the service sees."""
    job = Job(exits)
    hub, other = job.start(MAIN), job.start("algo-2")
    joined(lines, "algo-2")
    hub.wait_until_main_host_leaves(TIMEOUT_S)  # is itself the main host
    other.wait_until_main_host_leaves(0.1)  # not longer than that
    hub.report(BROKEN)
    assert other.received.get(timeout=TIMEOUT_S).host == MAIN
    left = threading.Event()

    def wait():
        other.wait_until_main_host_leaves(TIMEOUT_S)
        left.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert not left.wait(0.3)
    hub.close()
    assert left.wait(TIMEOUT_S)
    waiting.join(TIMEOUT_S)
    other.wait_until_main_host_leaves(TIMEOUT_S)


def test_port_is_free_after_close(exits, lines):
    """Nothing is left of a hub with connections: the next one can listen at once, and close may be repeated."""
    job = Job(exits)
    for _ in range(3):
        hub, other = job.start(MAIN), job.start("algo-2")
        joined(lines, "algo-2")
        hub.close()
        other.close()
        other.close()


def test_close_while_connecting(exits):
    """A launcher that ends while its connection is being made leaves nothing behind."""
    job = Job(exits)
    with socket.socket() as server:
        server.bind((job.bind, job.port))
        server.listen(0)
        for _ in range(5):  # the first ones fill the queue, so that the others stay between the states
            job.start("algo-2")
        for _ in range(5):
            with job.make("algo-2"):
                pass


def test_report_is_sent_before_close(exits, lines):
    """A launcher that reports and closes at once, without waiting, is noticed if it was connected."""
    job = Job(exits)
    hub = job.start(MAIN)
    with job.make("algo-2") as other:
        lines.wait_for("Host algo-2 was welcomed.")
        other.report(BROKEN)
    assert hub.received.get(timeout=TIMEOUT_S) == JobOutcome(
        OutcomeKind.FAILURE, "algo-2", 3, Reason("ValueError: broken")
    )


@pytest.mark.parametrize("seed", range(12))
def test_all_survivors_agree(exits, seed):
    """In any order of starts, reports and kills, every surviving host ends in time, and all outcomes agree."""
    chance = random.Random(seed)
    job = Job(exits, 4)
    steps = {host: ["start", chance.choice(["succeed", "succeed", "fail", "kill"])] for host in job.trainers}
    launchers, killed = {}, set()
    while steps:
        host = chance.choice(sorted(steps))
        step = steps[host].pop(0)
        if not steps[host]:
            del steps[host]
        if step == "start":
            launchers[host] = job.start(host)
        elif step == "kill":  # on the wire the same: the kernel closes the connection, and nothing was reported
            launchers[host].close()
            killed.add(host)
        else:
            launchers[host].report(
                Outcome.of_exit_code(0) if step == "succeed" else Outcome.of_exit_code(int(host[-1]), host)
            )
        if chance.random() < 0.5 and host in launchers:
            with contextlib.suppress(queue.Empty):
                launchers[host].received.get(timeout=chance.choice([0.01, 0.1, 0.5]))
    survivors = {host: peers for host, peers in launchers.items() if host not in killed}
    outcomes = set(outcomes_after_waiting(survivors).values()) - {None}
    assert len(outcomes) <= 1
    if MAIN in survivors:
        assert len(outcomes) == 1
