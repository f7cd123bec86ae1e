"""Hosts that are killed or suspended, programs that are not launchers, and ports that are in use."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import queue
import signal
import socket
import time

import pytest

from lightning_sm.job.secret import new_secret
from lightning_sm.job.stopping import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher.peers.connection import MAX_LINE_BYTES, Timings, peers_key
from lightning_sm.launcher.peers.hub import Hub
from lightning_sm.launcher.peers.messages import PROTOCOL, JobEnd, Proof, Report, StillThere, to_line
from lightning_sm.launcher.peers.peers import Peers
from tests.unit.launcher.peers.launchers import (
    BROKEN,
    FAST,
    MAIN,
    TIMEOUT_S,
    Job,
    Raw,
    host_process,
    joined,
    mac,
    outcomes_after_waiting,
    proof,
    welcome,
)

_REPORT = json.loads(to_line(Report(0, Outcome.of_exit_code(1))))
_LOST = JobOutcome(OutcomeKind.LOST, "algo-3", 1, Reason("Lost host algo-3"))
_END = json.loads(to_line(JobEnd(_LOST, is_over=True)))


def test_killed_launcher_is_noticed_at_once(exits, lines):
    """A trainer host whose launcher is killed is lost for all others within moments."""
    job = Job(exits, 3)
    hub, other = job.start(MAIN), job.start("algo-2")
    process = host_process(exits, job, "algo-3")
    joined(lines, "algo-2", "algo-3")
    process.kill()
    expected = JobOutcome(OutcomeKind.LOST, "algo-3", 1, Reason("Lost host algo-3: it closed the connection"))
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
        assert (outcome.kind, outcome.host, outcome.exit_code) == (OutcomeKind.LOST, MAIN, 1)
        peers.report(Outcome.of_exit_code(143))
    assert {outcome.host for outcome in outcomes_after_waiting(others).values()} == {MAIN}


def test_silent_host_is_noticed(exits, lines):
    """A trainer host that falls silent, as after a power cut, is lost after silence_s."""
    job = Job(exits)
    hub = job.start(MAIN, silence_s=0.5)
    process = host_process(exits, job, "algo-2")
    joined(lines, "algo-2")
    process.send_signal(signal.SIGSTOP)
    expected = JobOutcome(OutcomeKind.LOST, "algo-2", 1, Reason("Lost host algo-2: it sent no heartbeat for 0.5 s"))
    assert hub.received.get(timeout=TIMEOUT_S) == expected


def test_silent_hub_is_noticed(exits, lines):
    """A main host that falls silent is lost, although its kernel still accepts connections."""
    job = Job(exits)
    process = host_process(exits, job, MAIN)
    peers = job.start("algo-2", silence_s=0.5)
    lines.wait_for("Host algo-2 was welcomed.")
    process.send_signal(signal.SIGSTOP)
    outcome = peers.received.get(timeout=TIMEOUT_S)
    assert (outcome.kind, outcome.reason.text) == (OutcomeKind.LOST, "Lost host algo-1: it sent no heartbeat for 0.5 s")


def test_launcher_that_was_stopped_calls_nobody_silent(exits, lines):
    """A launcher that resumes after a suspension reads the messages that arrived before it looks at the clock."""
    job = Job(exits)
    hub = job.start(MAIN, silence_s=TIMEOUT_S)
    process = host_process(exits, job, "algo-2", silence_s=1.5)
    joined(lines, "algo-2")
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        hub.received.get(timeout=2)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(queue.Empty):
        hub.received.get(timeout=1.6)
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


_STRANGERS = {
    "GET / HTTP/1.1": (b"GET / HTTP/1.1\r\n\r\n", "it sent a line that is not JSON"),
    "binary": (bytes(range(256)) * 4 + b"\n", "it sent a line that is not JSON"),
    "deep": (b"[" * 5000 + b"\n", "it sent a line that no launcher sends"),
    "endless line": (b"x" * (2 * MAX_LINE_BYTES + 1), "it sent a line longer than 16384 bytes"),
    "endless line with an end": (b"x" * (MAX_LINE_BYTES + 1) + b"\n", "it sent a line longer than 16384 bytes"),
    "no object": (b"[1]\n", "it sent a line that no launcher sends"),
    "nothing": (b"{}\n", "it speaks version None of the launchers' protocol"),
    "half a line": (b'{"protocol"', "it did not introduce itself within 0.5 s"),
}


def _end_well(launchers):
    """All hosts succeed, whatever came before."""
    for peers in launchers.values():
        peers.report(Outcome.of_exit_code(0))
    assert set(outcomes_after_waiting(launchers).values()) == {JobOutcome(OutcomeKind.SUCCESS)}


@pytest.mark.parametrize("kind", _STRANGERS)
def test_garbage_is_dropped(exits, lines, kind):
    """The hub closes connections that send what no launcher sends, tells nothing, says why, and works on."""
    job = Job(exits)
    hub = job.start(MAIN, hello_s=0.5 if kind == "half a line" else TIMEOUT_S)
    sent, why = _STRANGERS[kind]
    stranger = job.connect()
    stranger.send(sent)
    lines.wait_for(why)
    assert stranger.is_closed()
    _end_well({MAIN: hub, "algo-2": job.start("algo-2")})


@pytest.mark.parametrize("host", ["algo-9", MAIN, ""])
def test_only_other_hosts_of_the_job_are_welcome(exits, lines, host):
    """Also if the proof is right."""
    job = Job(exits)
    job.start(MAIN)
    assert job.connect().introduce(host, job.key) is None
    lines.wait_for(f"it introduced itself as {str(host)!r}, which is not another host of this job")


def test_whoever_knows_the_job_but_not_its_secret_is_told_nothing(exits, lines):
    """A launcher with the key of the job's name alone learns and reports nothing, and both ends name the reason."""
    job, secret = Job(exits), new_secret()
    job.key = peers_key(job.identity, secret)
    hub = job.start(MAIN)
    hub.report(Outcome.of_exit_code(0))
    stranger = job.connect()
    assert stranger.introduce("algo-2", peers_key(job.identity, {})) == proof("")
    with contextlib.suppress(OSError):
        stranger.send(Report(0, Outcome.of_exit_code(1, "forged")))
    assert stranger.is_closed()
    why = "its LIGHTNING_SM_JOB_SECRET (or, without one, its job's name) differs from that of this host"
    lines.wait_for(f"Closed a connection from 127.0.0.1: it introduced itself as 'algo-2', but {why}.")
    job.key = peers_key(job.identity, {})
    with job.make("algo-2"):
        lines.wait_for(f"No launcher of this job answers on 127.0.0.2:{job.port} (algo-1) yet: {why}.")
    job.key = peers_key(job.identity, secret)
    _end_well({MAIN: hub, "algo-2": job.start("algo-2")})


def test_what_was_recorded_proves_nothing_later(exits, lines):
    """All bytes of a host that was welcomed, sent again, are refused: the hub's nonce is another one."""
    job = Job(exits)
    hub = job.start(MAIN)
    recorded = job.connect()
    assert recorded.introduce("algo-2", job.key)["mac"]
    recorded.send(StillThere())
    replayed = job.connect()
    replayed.send(recorded.sent + to_line(Report(0, BROKEN)))
    assert json.loads(replayed.line())["nonce"]
    assert json.loads(replayed.line()) == proof("")
    assert replayed.is_closed()
    lines.wait_for("it introduced itself as 'algo-2', but its LIGHTNING_SM_JOB_SECRET")
    assert hub.received.empty()


def test_other_versions_are_named_on_both_sides(exits, lines):
    """Neither side proves anything to the other, whose version it does not know."""
    job = Job(exits)
    with job.make(MAIN):
        stranger = job.connect()
        assert stranger.introduce("algo-2", job.key, protocol=PROTOCOL + 1) is None
        lines.wait_for(f"it speaks version {PROTOCOL + 1} of the launchers' protocol, this host version {PROTOCOL}")
    with socket.create_server((job.bind, job.port)) as server:
        job.start("algo-2")
        server.settimeout(TIMEOUT_S)
        with server.accept()[0] as connection:
            hub = Raw(connection)
            assert json.loads(hub.line())["host"] == "algo-2"
            hub.send({"protocol": 3, "nonce": "of the hub"})
            assert hub.is_closed()
    lines.wait_for("it speaks version 3 of the launchers' protocol", "install the same version of lightning-sm")


def test_an_impostor_of_the_hub_is_told_nothing(exits, lines):
    """A program that answers like a hub, but does not have the secret, gets no report, and its orders do not count."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)) as server:
        server.settimeout(TIMEOUT_S)
        peers = job.start("algo-2", reconnect_s=TIMEOUT_S)
        peers.report(BROKEN)
        with server.accept()[0] as connection:
            hub = Raw(connection)
            greetings = hub.line()
            hub.send({"protocol": PROTOCOL, "nonce": "of the hub"})
            reflected = json.loads(hub.line())
            assert reflected == proof(mac(job.key, b"host", greetings + hub.sent))
            hub.send(reflected, JobEnd(JobOutcome(OutcomeKind.SUCCESS)))
            assert hub.line() == b""
        lines.wait_for("No launcher of this job answers on 127.0.0.2")
    assert peers.received.empty()
    assert peers.job_outcome is None


@pytest.mark.parametrize(
    "message",
    [
        {"type": "what"},
        {"type": "Report"},
        {**_REPORT, "outcome": {**_REPORT["outcome"], "exit_code": "x"}},
        b'{"type": "Report", "attempt": 1e999}\n',
        {**_REPORT, "attempt": -math.inf},
        {**_REPORT, "attempt": math.nan},
        {**_REPORT, "outcome": {**_REPORT["outcome"], "kind": []}},
        {**_REPORT, "outcome": {**_REPORT["outcome"], "kind": "won"}},
        {**_REPORT, "reason": "because"},
        _END,
        Proof(""),
        {"type": {}},
        {},
    ],
)
def test_launcher_that_breaks_the_protocol_counts_as_lost(exits, lines, message):
    """What a launcher of this job must not send ends its connection, and nothing else."""
    job = Job(exits)
    hub = job.start(MAIN)
    host = job.connect()
    host.introduce("algo-2", job.key)
    host.send(message)
    assert hub.received.get(timeout=TIMEOUT_S).kind is OutcomeKind.LOST


@pytest.mark.parametrize(
    "message",
    [
        {**_END, "outcome": {**_END["outcome"], "exit_code": math.inf}},
        b'{"type": "OrderRestart", "restart": {"number": 1e999, "most": 1, "kind": "failure", "cause": ""}}\n',
        {"type": "JobEnd", "outcome": 7},
        _REPORT,
    ],
)
def test_a_hub_that_breaks_the_protocol_is_connected_to_again(exits, lines, message):
    """What a hub of this job must not send ends the connection; the host goes on, and learns how the job ends."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)) as server:
        server.settimeout(TIMEOUT_S)
        peers = job.start("algo-2", reconnect_s=TIMEOUT_S)
        with server.accept()[0] as connection:
            welcome(connection, job.key).send(message)
            lines.wait_for("Lost connection to the launcher on algo-1")
        with server.accept()[0] as connection:
            welcome(connection, job.key).send(_END)
            assert peers.received.get(timeout=TIMEOUT_S) == _LOST


def test_half_a_connection_is_none(exits, lines):
    """A host that can be written to, but that sends nothing any more, is lost at once, not after silence_s."""
    job = Job(exits)
    hub = job.start(MAIN, silence_s=TIMEOUT_S)
    host = job.connect()
    host.introduce("algo-2", job.key)
    host.sock.shutdown(socket.SHUT_WR)
    expected = JobOutcome(OutcomeKind.LOST, "algo-2", 1, Reason("Lost host algo-2: it closed the connection"))
    assert hub.received.get(timeout=TIMEOUT_S) == expected
    assert host.is_closed()


def test_main_host_waits_only_so_long_for_those_that_do_not_listen(exits, lines):
    """A launcher that never acknowledges the job's end holds the main host up for peers_timeout_s."""
    job = Job(exits)
    hub = job.start(MAIN, silence_s=TIMEOUT_S)
    silent = job.connect()
    silent.introduce("algo-2", job.key)
    silent.send(Report(0, Outcome.of_exit_code(0)))
    started = time.monotonic()
    hub.report(Outcome.of_exit_code(0))
    assert hub.wait_for_peers() == JobOutcome(OutcomeKind.SUCCESS)
    assert FAST["peers_timeout_s"] <= time.monotonic() - started < TIMEOUT_S / 2


def test_launcher_that_ends_without_confirming_is_not_waited_for(exits, lines):
    """A connection that ends after the job is over says as much as a confirmation."""
    job = Job(exits)
    hub = job.start(MAIN, peers_timeout_s=TIMEOUT_S)
    host = job.connect()
    host.introduce("algo-2", job.key)
    host.send(Report(0, Outcome.of_exit_code(0)))
    started = time.monotonic()
    hub.report(Outcome.of_exit_code(0))
    assert hub.received.get(timeout=TIMEOUT_S) == JobOutcome(OutcomeKind.SUCCESS)
    host.sock.close()
    hub.wait_for_peers()
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_second_connection_of_a_host_replaces_the_first(exits, lines):
    """A host that connects again, while its first connection looks alive, is there once, and not lost."""
    job = Job(exits)
    hub = job.start(MAIN)
    first, second = job.connect(), job.connect()
    first.introduce("algo-2", job.key)
    second.introduce("algo-2", job.key)
    assert first.is_closed()
    with pytest.raises(queue.Empty):
        hub.received.get(timeout=3 * FAST["reconnect_s"])
    second.sock.close()
    assert hub.received.get(timeout=TIMEOUT_S).kind is OutcomeKind.LOST


def test_a_hub_that_ends_closes_a_connection_that_it_has_just_accepted(exits):
    """A connection that arrives in the hub's last moment is closed like the others, and not left to the collector."""
    job = Job(exits)

    async def accept_and_close():
        hub = Hub(
            time.monotonic(),
            own=MAIN,
            trainers=job.trainers,
            data_hosts=[],
            address=(job.bind, job.port),
            key=job.key,
            timings=Timings(**FAST),
            max_restarts=0,
            on_news=list,
        )
        await hub.open()
        stranger = job.connect()
        accepted = asyncio.all_tasks()
        while not (serving := [task for task in asyncio.all_tasks() - accepted if "_serve" in repr(task)]):
            await asyncio.sleep(0)
        assert inspect.getcoroutinestate(serving[0].get_coro()) == "CORO_CREATED"
        await hub.close()
        return stranger

    stranger = asyncio.run(asyncio.wait_for(accept_and_close(), TIMEOUT_S))
    assert stranger.line() == b""


def test_strangers_do_not_lock_hosts_out(exits, lines):
    """Many connections that say nothing make room for hosts; each is closed after hello_s at the latest."""
    job = Job(exits)
    hub = job.start(MAIN, hello_s=0.5)
    strangers = [job.connect() for _ in range(100)]
    other = job.start("algo-2")
    joined(lines, "algo-2")
    _end_well({MAIN: hub, "algo-2": other})
    assert all(stranger.is_closed() for stranger in strangers)


@pytest.mark.parametrize("has_greeted", [False, True])
def test_trickling_stranger_is_closed(exits, lines, has_greeted):
    """Sending byte by byte does not keep a connection: the last line of an introduction must arrive within hello_s."""
    job = Job(exits)
    job.start(MAIN, hello_s=0.3)
    stranger = job.connect()
    if has_greeted:
        stranger.send({"protocol": PROTOCOL, "nonce": "of the host", "host": "algo-2"})
        assert stranger.line()
    stranger.sock.settimeout(0.02)
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            stranger.send(b"x")
            with contextlib.suppress(TimeoutError):
                if not stranger.sock.recv(1):
                    break
    lines.wait_for("it did not introduce itself within 0.3 s")


def test_another_program_on_the_port_is_not_the_hub(exits, lines):
    """A host that reaches another program keeps looking for the launcher of its main host, and is not alarmed."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)) as server:
        server.settimeout(TIMEOUT_S)
        peers = job.start("algo-2")
        for answer in (b"HTTP/1.1 400 Bad Request\r\n", b"", b'{"protocol": 4}\n{"mac": ""}\n'):
            with server.accept()[0] as connection:
                connection.recv(1024)
                connection.sendall(answer)
        lines.wait_for("No launcher of this job answers on 127.0.0.2")
    _end_well({MAIN: job.start(MAIN), "algo-2": peers})


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
        peers.report(Outcome.of_exit_code(0))
        assert peers.wait_for_peers() is None
