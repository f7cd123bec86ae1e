"""Hosts that are killed or suspended, programs that are not launchers, and ports that are in use."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import time

import pytest

from lightning_sm.job.secret import new_secret
from lightning_sm.job.stopping import JobOutcome, Outcome
from lightning_sm.launcher.peers.connection import MAX_LINE_BYTES, Report, Timings, peers_key, sealed
from lightning_sm.launcher.peers.peers import Peers
from tests.unit.launcher.peers.launchers import (
    BROKEN,
    FAST,
    MAIN,
    TIMEOUT_S,
    Job,
    host_process,
    joined,
    outcomes_after_waiting,
)


def test_killed_launcher_is_noticed_at_once(exits, lines):
    """A trainer host whose launcher is killed is lost for all others within moments."""
    job = Job(exits, 3)
    hub, other = job.start(MAIN), job.start("algo-2")
    process = host_process(exits, job, "algo-3")
    joined(lines, "algo-2", "algo-3")
    process.kill()
    expected = JobOutcome("lost", "algo-3", 1, "Lost host algo-3: it closed the connection")
    assert hub.received.get(timeout=TIMEOUT_S) == expected
    assert other.received.get(timeout=TIMEOUT_S) == expected


def test_killed_hub_is_noticed(exits, lines):
    """When the launcher of the main host is killed, all others call that host lost and wait no longer."""
    job = Job(exits, 3)
    process = host_process(exits, job, MAIN)
    others = {host: job.start(host) for host in ("algo-2", "algo-3")}
    lines.wait_for("Host algo-2 was welcomed.", "Host algo-3 was welcomed.")
    process.kill()
    for peers in others.values():
        outcome = peers.received.get(timeout=TIMEOUT_S)
        assert (outcome.kind, outcome.host, outcome.exit_code) == ("lost", MAIN, 1)
        peers.report(Outcome(143))
    assert {outcome.host for outcome in outcomes_after_waiting(others).values()} == {MAIN}


def test_silent_host_is_noticed(exits, lines):
    """A trainer host that falls silent, as after a power cut, is lost after silence_s."""
    job = Job(exits)
    hub = job.start(MAIN, silence_s=0.5)
    process = host_process(exits, job, "algo-2")
    joined(lines, "algo-2")
    process.send_signal(signal.SIGSTOP)
    expected = JobOutcome("lost", "algo-2", 1, "Lost host algo-2: it sent no heartbeat for 0.5 s")
    assert hub.received.get(timeout=TIMEOUT_S) == expected


def test_silent_hub_is_noticed(exits, lines):
    """A main host that falls silent is lost, although its kernel still accepts connections."""
    job = Job(exits)
    process = host_process(exits, job, MAIN)
    peers = job.start("algo-2", silence_s=0.5)
    lines.wait_for("Host algo-2 was welcomed.")
    process.send_signal(signal.SIGSTOP)
    outcome = peers.received.get(timeout=TIMEOUT_S)
    assert (outcome.kind, outcome.reason) == ("lost", "Lost host algo-1: it sent no heartbeat for 0.5 s")


def test_launcher_that_was_stopped_calls_nobody_silent(exits, lines):
    """A launcher that resumes after a suspension reads the messages that arrived before it looks at the clock."""
    job = Job(exits)
    hub = job.start(MAIN, silence_s=TIMEOUT_S)
    process = host_process(exits, job, "algo-2", silence_s=0.5)
    joined(lines, "algo-2")
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        hub.received.get(timeout=1)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(queue.Empty):
        hub.received.get(timeout=0.6)
    with pytest.raises(queue.Empty):  # it did not even connect again
        lines.queue.get_nowait()


def test_living_hosts_are_not_silent(exits, lines):
    """Pings keep launchers alive whose scripts have nothing to say."""
    job = Job(exits)
    hub, other = job.start(MAIN, silence_s=2.0), job.start("algo-2", silence_s=2.0)
    joined(lines, "algo-2")
    with pytest.raises(queue.Empty):
        other.received.get(timeout=3.0)
    assert hub.received.empty()


def _lines_of_strangers(job):
    key = job.key
    hello = {"type": "hello", "host": "algo-2"}
    return {
        "GET / HTTP/1.1": (b"GET / HTTP/1.1\r\n\r\n", "it is not a launcher of this job and version"),
        "another job": (sealed(peers_key("another", {}), hello), "it is not a launcher of this job and version"),
        "wrong MAC": (sealed(key, hello).replace(b"algo-2", b"algo-3"), "it is not a launcher of this job and version"),
        "binary": (bytes(range(256)) * 4 + b"\n", "it is not a launcher of this job and version"),
        "endless line": (b"x" * (MAX_LINE_BYTES + 1), "it sent a line longer than 8192 bytes"),
        "endless line with an end": (b"x" * MAX_LINE_BYTES + b"\n", "it sent a line longer than 8192 bytes"),
        "no object": (sealed(key, [1]), "it sent JSON that is not an object"),
        "no type": (sealed(key, {"host": "algo-2"}), "host"),
        "no hello": (sealed(key, {"type": "report", "host": "algo-2"}), "it introduced itself as 'algo-2'"),
        "unknown host": (sealed(key, {"type": "hello", "host": "algo-9"}), "it introduced itself as 'algo-9'"),
        "no name": (sealed(key, {"type": "hello", "host": {}}), "unhashable"),
        "the hub itself": (sealed(key, {"type": "hello", "host": MAIN}), "it introduced itself as 'algo-1'"),
    }


@pytest.mark.parametrize("kind", list(_lines_of_strangers(Job)))
def test_garbage_is_dropped(exits, lines, kind):
    """The hub closes connections that send what no launcher of this job sends, says why, and works on."""
    job = Job(exits)
    hub = job.start(MAIN)
    sent, why = _lines_of_strangers(job)[kind]
    stranger = job.connect()
    stranger.sendall(sent)
    with contextlib.suppress(ConnectionResetError):  # it was closed with bytes unread
        assert stranger.recv(1) == b""
    if kind != "no type":
        lines.wait_for(why)
    other = job.start("algo-2")
    for peers in (hub, other):
        peers.report(Outcome(0))
    assert set(outcomes_after_waiting({MAIN: hub, "algo-2": other}).values()) == {JobOutcome("finished")}


def test_whoever_knows_the_job_but_not_its_secret_is_told_nothing(exits, lines):
    """A launcher with the key of the job's name alone gets no byte and reports nothing; those with the secret meet."""
    job = Job(exits)
    job.key = peers_key(job.identity, new_secret())
    hub = job.start(MAIN)
    stranger = job.connect()
    key = peers_key(job.identity, {})
    report = Report(0, Outcome(1, "forged")).to_message()
    stranger.sendall(sealed(key, {"type": "hello", "host": "algo-2"}) + sealed(key, report))
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    lines.wait_for("it is not a launcher of this job and version")
    other = job.start("algo-2")
    for peers in (hub, other):
        peers.report(Outcome(0))
    assert set(outcomes_after_waiting({MAIN: hub, "algo-2": other}).values()) == {JobOutcome("finished")}


@pytest.mark.parametrize(
    "message", [{"type": "what"}, {"type": "report"}, {**Report(0, Outcome(1)).to_message(), "exit_code": "x"}]
)
def test_launcher_that_breaks_the_protocol_counts_as_lost(exits, lines, message):
    """What a launcher of this job must not send ends its connection, and nothing else."""
    job = Job(exits)
    hub = job.start(MAIN)
    host = job.connect()
    key = job.key
    host.sendall(sealed(key, {"type": "hello", "host": "algo-2"}) + sealed(key, message))
    assert hub.received.get(timeout=TIMEOUT_S).kind == "lost"


def test_main_host_waits_only_so_long_for_those_that_do_not_listen(exits, lines):
    """A launcher that never acknowledges the job's end holds the main host up for peers_timeout_s."""
    job = Job(exits)
    hub = job.start(MAIN, silence_s=TIMEOUT_S)
    key, silent = job.key, job.connect()
    report = Report(0, Outcome(0)).to_message()
    silent.sendall(sealed(key, {"type": "hello", "host": "algo-2"}) + sealed(key, report))
    joined(lines, "algo-2")
    started = time.monotonic()
    hub.report(Outcome(0))
    assert hub.wait_for_peers() == JobOutcome("finished")
    assert FAST["peers_timeout_s"] <= time.monotonic() - started < TIMEOUT_S / 2


def test_launcher_that_ends_without_confirming_is_not_waited_for(exits, lines):
    """A connection that ends after the job is over says as much as a confirmation."""
    job = Job(exits)
    hub = job.start(MAIN, peers_timeout_s=TIMEOUT_S)
    key, host = job.key, job.connect()
    report = Report(0, Outcome(0)).to_message()
    host.sendall(sealed(key, {"type": "hello", "host": "algo-2"}) + sealed(key, report))
    joined(lines, "algo-2")
    started = time.monotonic()
    hub.report(Outcome(0))
    assert hub.received.get(timeout=TIMEOUT_S) == JobOutcome("finished")
    host.close()
    hub.wait_for_peers()
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_second_connection_of_a_host_replaces_the_first(exits, lines):
    """A host that connects again, while its first connection looks alive, is there once, and not lost."""
    job = Job(exits)
    hub = job.start(MAIN)
    hello = sealed(job.key, {"type": "hello", "host": "algo-2"})
    first = job.connect()
    first.sendall(hello)
    joined(lines, "algo-2")
    second = job.connect()
    second.sendall(hello)
    joined(lines, "algo-2")
    while first.recv(1024):  # the welcome and pings, then the end
        pass
    with pytest.raises(queue.Empty):
        hub.received.get(timeout=3 * FAST["reconnect_s"])
    second.close()
    assert hub.received.get(timeout=TIMEOUT_S).kind == "lost"


def test_strangers_do_not_lock_hosts_out(exits, lines):
    """Many connections that say nothing make room for hosts; each is closed after hello_s at the latest."""
    job = Job(exits)
    hub = job.start(MAIN, hello_s=0.5)
    strangers = [job.connect() for _ in range(100)]
    other = job.start("algo-2")
    joined(lines, "algo-2")
    for peers in (hub, other):
        peers.report(Outcome(0))
    assert set(outcomes_after_waiting({MAIN: hub, "algo-2": other}).values()) == {JobOutcome("finished")}
    assert all(stranger.recv(1) == b"" for stranger in strangers)


def test_trickling_stranger_is_closed(exits, lines):
    """Sending byte by byte does not keep a connection: the first line must arrive within hello_s."""
    job = Job(exits)
    job.start(MAIN, hello_s=0.3)
    stranger = job.connect()
    stranger.settimeout(0.02)
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            stranger.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not stranger.recv(1):
                    break
    lines.wait_for("it did not introduce itself within 0.3 s")


def test_another_program_on_the_port_is_not_the_hub(exits, lines):
    """A host that reaches another program keeps looking for the launcher of its main host, and is not alarmed."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)) as server:
        server.settimeout(TIMEOUT_S)
        peers = job.start("algo-2")
        for answer in (b"HTTP/1.1 400 Bad Request\r\n", b"", sealed(peers_key("another", {}), {"type": "welcome"})):
            with server.accept()[0] as connection:
                connection.recv(1024)
                connection.sendall(answer)
        lines.wait_for("No launcher of this job answers on 127.0.0.2")
    hub = job.start(MAIN)
    for host in (peers, hub):
        host.report(Outcome(0))
    assert set(outcomes_after_waiting({MAIN: hub, "algo-2": peers}).values()) == {JobOutcome("finished")}


def test_taken_port_is_a_warning(exits, lines):
    """When the port is taken, the job runs as it would without this; the warning says what is lost."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)):
        hub = job.start(MAIN)
        lines.wait_for(f"cannot listen on 127.0.0.2:{job.port} (Address already in use)")
        hub.report(BROKEN)
        assert hub.wait_for_peers() is None


def test_name_that_does_not_resolve_is_waited_for(exits):
    """A main host whose name does not resolve yet is not an error."""
    job = Job(exits)
    peers = Peers(
        key=job.key,
        own="algo-2",
        trainers=job.trainers,
        data_hosts=[],
        main_host=MAIN,
        addresses={MAIN: "algo-1.invalid"},
        port=job.port,
        bind=job.bind,
        on_job_outcome=lambda _: None,
        timings=Timings(**FAST),
    )
    with peers:
        peers.report(Outcome(0))
        assert peers.wait_for_peers() is None
