"""How the hosts of a job agree on its outcome: real sockets on 127.0.0.x."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from lightning_sm.job.outcomes import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher.peers.outcome import Timings
from lightning_sm.launcher.peers.peers import Peers
from tests.unit.launcher.peers.launchers import (
    BROKEN,
    DATA,
    FAST,
    MAIN,
    TIMEOUT_S,
    Job,
    connected,
    end_outcomes,
    outcome_of,
    stays,
    until,
)

_SUCCESS = Outcome.of_exit_code(0)
_FINISHED = JobOutcome(OutcomeKind.SUCCESS)
_ENDED = Outcome.of_exit_code(143, "terminated")


def test_failure_reaches_all_hosts(exits):
    """All hosts learn the first failure's host, exit code and reason at once; later failures change nothing."""
    launchers = Job(exits, 3, 1).start_all()
    started = time.monotonic()
    launchers["algo-3"].report(BROKEN, 0)
    expected = JobOutcome(OutcomeKind.FAILURE, "algo-3", 3, Reason("ValueError: broken"))
    assert {outcome_of(peers) for peers in launchers.values()} == {expected}
    assert time.monotonic() - started < TIMEOUT_S / 2
    launchers["algo-2"].report(_ENDED, 0)
    launchers[MAIN].report(Outcome.of_exit_code(1, "another"), 0)
    del launchers[DATA]
    assert end_outcomes(*launchers.values()) == {expected}
    assert expected.is_failure


def test_with_the_timings_of_a_cluster_a_failure_is_known_within_about_a_second(exits):
    """With the default timings, launchers poll twice a second, so a failure spreads in about a second."""
    job, timings = Job(exits, 3), Timings()
    launchers = job.start_all(poll_s=timings.poll_s)
    launchers["algo-3"].report(BROKEN, 0)
    assert until(lambda: all(peers.job_outcome for peers in launchers.values())) < 3 * timings.poll_s + 1


def test_nobody_leaves_before_the_last_trainer(exits):
    """Hosts that finish early wait for the last trainer host; then all learn that the job is over."""
    launchers = Job(exits, 3, 1).start_all()
    early = [launchers[host] for host in (MAIN, "algo-2", DATA)]
    for peers in early:
        peers.report(_SUCCESS, 0)
    assert stays(lambda: not any(peers.is_done for peers in early), 1.5 * FAST["peers_timeout_s"])
    assert launchers[MAIN].awaited == ["algo-3"]
    launchers["algo-3"].report(_SUCCESS, 0)
    assert end_outcomes(*launchers.values()) == {_FINISHED}
    assert not _FINISHED.is_failure


def test_data_host_learns_of_the_end_while_it_serves(exits):
    """A data host whose script still runs learns that training has finished, and does not hold up the trainer hosts."""
    launchers = Job(exits, 2, 1).start_all()
    data = launchers.pop(DATA)
    for peers in launchers.values():
        peers.report(_SUCCESS, 0)
    assert end_outcomes(*launchers.values()) == {_FINISHED}
    assert outcome_of(data) == _FINISHED


def test_failed_data_host_ends_nothing(exits, lines):
    """The log names a data host that fails; training continues without failed and lost data hosts."""
    job = Job(exits, 1, 3)
    launchers = job.start_all(lost_s=0.3)
    launchers["data-1"].report(BROKEN, 0)
    lines.wait_for(
        "The script on data host data-1 failed with exit code 3. Training continues without it. Cause: ValueError"
    )
    launchers["data-2"].close()
    assert stays(lambda: launchers[MAIN].job_outcome is None, 1.0)
    launchers[MAIN].report(_SUCCESS, 0)
    assert end_outcomes(launchers[MAIN], launchers["data-1"]) == {_FINISHED}


def test_failure_before_anything_else_frees_the_data_hosts(exits):
    """A failure at the script's first import reaches all hosts, in whatever order they connect."""
    job = Job(exits, 2, 1)
    data, other = job.start(DATA, peers_timeout_s=TIMEOUT_S), job.start("algo-2", peers_timeout_s=TIMEOUT_S)
    other.report(BROKEN, 0)
    hub = job.start(MAIN)
    expected = JobOutcome(OutcomeKind.FAILURE, "algo-2", 3, Reason("ValueError: broken"))
    assert outcome_of(data) == expected
    hub.report(_ENDED, 0)
    assert end_outcomes(other, hub) == {expected}


def test_late_host_is_notified_at_once(exits):
    """A host that starts after the failure learns of it as soon as it connects, while the main host waits."""
    job = Job(exits, 3)
    hub, other = job.start(MAIN, peers_timeout_s=TIMEOUT_S, after_failure_s=2 * TIMEOUT_S), job.start("algo-2")
    connected(other)
    other.report(BROKEN, 0)
    assert outcome_of(hub).host == "algo-2"
    hub.report(_ENDED, 0)
    late = job.start("algo-3")
    assert outcome_of(late).host == "algo-2"
    late.report(_ENDED, 0)
    assert {outcome.host for outcome in end_outcomes(hub, other, late)} == {"algo-2"}


def test_main_host_that_fails_first_stays_until_all_have_come(exits):
    """A main host that fails first waits until all hosts have connected, so that late ones learn the reason."""
    job = Job(exits, 2, 1)
    hub = job.start(MAIN, peers_timeout_s=TIMEOUT_S)
    hub.report(BROKEN, 0)
    assert outcome_of(hub).host == MAIN
    other = job.start("algo-2")
    assert outcome_of(other).host == MAIN
    until(lambda: other.is_decided)
    assert not hub.is_decided  # the data host has not connected yet
    data = job.start(DATA)
    until(lambda: hub.is_decided)
    assert outcome_of(data).host == MAIN


def test_a_host_that_fails_stays_until_all_know_it(exits):
    """A failed host exits only after all hosts know of the failure: the service stops them when it exits."""
    job = Job(exits, 3)
    launchers = {host: job.start(host, poll_s=0.02 if host != "algo-3" else 1.0) for host in job.trainers}
    connected(launchers["algo-2"], launchers["algo-3"])
    launchers["algo-2"].report(BROKEN, 0)
    until(lambda: launchers["algo-2"].is_decided)
    assert [peers.job_outcome is not None for peers in launchers.values()] == [True, True, True]


def test_main_host_that_fails_waits_only_so_long_for_hosts_that_never_come(exits):
    """Hosts without this launcher do not hold up a failed job."""
    hub = Job(exits).start(MAIN)
    hub.report(BROKEN, 0)
    outcome_of(hub)
    assert FAST["peers_timeout_s"] / 2 <= until(lambda: hub.is_decided) < TIMEOUT_S / 2


def test_main_host_waits_only_so_long_for_hosts_that_never_came(exits):
    """The main host waits peers_timeout_s for hosts without this launcher, and then reports success."""
    hub = Job(exits, 3, 1).start(MAIN)
    started = time.monotonic()
    hub.report(_SUCCESS, 0)
    assert end_outcomes(hub) == {_FINISHED}
    assert FAST["peers_timeout_s"] <= time.monotonic() - started < TIMEOUT_S / 2


def test_other_host_waits_only_so_long_for_the_main_host(exits):
    """If the main host does not run this launcher, a host exits by itself after peers_timeout_s."""
    peers = Job(exits).start("algo-2")
    started = time.monotonic()
    peers.report(_SUCCESS, 0)
    assert end_outcomes(peers) == {None}
    assert FAST["peers_timeout_s"] <= time.monotonic() - started < TIMEOUT_S / 2


def test_a_host_without_others_waits_for_nobody():
    """The only host of a job opens no port and starts no thread."""
    threads = threading.active_count()
    with Peers(MAIN, Timings()) as peers:
        assert threading.active_count() == threads
        peers.report(Outcome.of_exit_code(1), 0)
        assert (peers.is_alone, peers.is_done, peers.job_outcome) == (True, True, None)


def test_interruption_counts_as_failure(exits):
    """A host whose script was killed by SIGTERM ends the job as an interruption, with exit code 143."""
    launchers = Job(exits).start_all()
    launchers[MAIN].report(Outcome.of_exit_code(143, "killed by SIGTERM"), 0)
    expected = JobOutcome(OutcomeKind.INTERRUPTION, MAIN, 143, Reason("killed by SIGTERM"))
    assert outcome_of(launchers["algo-2"]) == expected


@pytest.mark.parametrize("character", ["x", "\0", "\n", "\U0001f600", "\ud800", '"'])
def test_any_reason_arrives(exits, character):
    """A reason of 1024 characters fits into a line, whatever the characters; longer ones are cut."""
    launchers = Job(exits).start_all()
    launchers["algo-2"].report(Outcome.of_exit_code(1, character * 5000), 0)
    reason = outcome_of(launchers[MAIN]).reason.text
    assert reason == (character.replace("\ud800", r"\ud800") * 1024)[:1024]
    assert outcome_of(launchers["algo-2"]).reason.text == reason


def test_brief_interruption_of_a_connection_loses_nobody(exits):
    """A host that reconnects in time is not lost, and its report counts as usual."""
    job = Job(exits)
    hub = job.start(MAIN)
    with job.make("algo-2") as before:
        connected(before)
    again = job.start("algo-2")
    connected(again)
    hub.report(_SUCCESS, 0)
    again.report(_SUCCESS, 0)
    assert end_outcomes(hub, again) == {_FINISHED}


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_lost_main_host_is_news_only_before_the_job_has_failed(exits, lines, has_failed):
    """A host logs at once that it lost the main host, unless it already knows of a failure."""
    job = Job(exits)
    other = job.start("algo-2")
    with job.make(MAIN) as hub:
        connected(other)
        if has_failed:
            hub.report(BROKEN, 0)
            assert outcome_of(other).host == MAIN
    until(lambda: not other.is_main_host_there)
    job.start(MAIN)
    connected(other)
    assert any("Lost connection" in line for line in lines.seen) is not has_failed


def test_restarted_hub_learns_everything_again(exits):
    """A main host that comes back in time receives all reports again."""
    job = Job(exits, 3)
    others = [job.start(host, lost_s=TIMEOUT_S) for host in ("algo-2", "algo-3")]
    with job.make(MAIN):
        connected(*others)
        others[0].report(_SUCCESS, 0)
    hub = job.start(MAIN)
    until(lambda: hub.awaited == [MAIN, "algo-3"])
    for peers in (others[1], hub):
        peers.report(_SUCCESS, 0)
    assert end_outcomes(*others, hub) == {_FINISHED}


def test_fifty_hosts(exits):
    """A failure on one of 51 hosts soon reaches all others, and all can exit."""
    launchers = Job(exits, 51).start_all(poll_s=0.2)
    started = time.monotonic()
    launchers["algo-50"].report(BROKEN, 0)
    assert {outcome_of(peers).host for peers in launchers.values()} == {"algo-50"}
    assert time.monotonic() - started < TIMEOUT_S / 2
    for peers in launchers.values():
        peers.report(_ENDED, 0)
    assert {outcome.host for outcome in end_outcomes(*launchers.values())} == {"algo-50"}


def test_other_hosts_can_leave_after_the_main_host(exits):
    """Other hosts can wait for a main host that failed first, so that the service sees its exit before theirs."""
    launchers = Job(exits).start_all()
    hub, other = launchers[MAIN], launchers["algo-2"]
    assert not hub.is_main_host_there  # the hub is on the main host
    hub.report(BROKEN, 0)
    assert outcome_of(other).host == MAIN
    assert stays(lambda: other.is_main_host_there, 0.3)
    hub.close()
    until(lambda: not other.is_main_host_there)


def test_port_is_free_after_close(exits):
    """A closed hub frees its port at once, and closing twice is harmless."""
    job = Job(exits)
    for _ in range(3):
        hub, other = job.start(MAIN), job.start("algo-2")
        connected(other)
        hub.close()
        other.close()
        other.close()


def test_close_while_connecting(exits):
    """A launcher closes promptly while it is connecting or waiting for a silent program."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)) as server:
        with job.make("algo-2"):
            server.settimeout(TIMEOUT_S)
            connection, _ = server.accept()
            started = time.monotonic()
        assert time.monotonic() - started < TIMEOUT_S / 2
        connection.close()


def test_report_is_sent_before_close(exits):
    """A report is sent even if the launcher closes immediately afterwards, provided that it was connected."""
    job = Job(exits)
    hub = job.start(MAIN)
    with job.make("algo-2", poll_s=1.0) as other:
        connected(other)
        other.report(BROKEN, 0)
    expected = JobOutcome(OutcomeKind.FAILURE, "algo-2", 3, Reason("ValueError: broken"))
    assert outcome_of(hub) == expected


def test_a_main_host_that_closes_tells_the_others_first(exits):
    """A main host that is told to exit at once still reports its failure to the other hosts."""
    job = Job(exits)
    other = job.start("algo-2", poll_s=0.5)
    with job.make(MAIN) as hub:
        connected(other)
        hub.report(BROKEN, 0)
    assert outcome_of(other).host == MAIN


@pytest.mark.parametrize("seed", range(12))
def test_all_survivors_agree(exits, seed):
    """In any order of starts, reports and kills, every surviving host exits in time, and all agree on the outcome."""
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
            launchers[host] = job.start(host, lost_s=1.0)
        elif step == "kill":  # looks the same as a kill to the hub: silence without a report
            launchers[host].close()
            killed.add(host)
        else:
            launchers[host].report(_SUCCESS if step == "succeed" else Outcome.of_exit_code(int(host[-1]), host), 0)
        time.sleep(chance.choice([0.0, 0.01, 0.1, 0.5]))
    survivors = {host: peers for host, peers in launchers.items() if host not in killed}
    outcomes = end_outcomes(*survivors.values()) - {None}
    assert len(outcomes) <= 1
    if MAIN in survivors:
        assert len(outcomes) == 1
