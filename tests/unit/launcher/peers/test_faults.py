"""Killed and suspended hosts, programs that are not launchers, and unreachable main hosts."""

from __future__ import annotations

import contextlib
import signal
import socket
import time

import pytest

from lightning_sm.job.host_keys import new_secret
from lightning_sm.job.outcomes import JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher.peers import hub as hub_module
from lightning_sm.launcher.peers import messages
from lightning_sm.launcher.peers.client import Client
from lightning_sm.launcher.peers.messages import MAX_LINE_BYTES, Answer, Question, from_line, mac_of, peers_key, to_line
from lightning_sm.launcher.peers.outcome import Timings
from tests.unit.launcher.peers.launchers import (
    BROKEN,
    FAST,
    MAIN,
    TIMEOUT_S,
    Job,
    answered,
    connected,
    end_outcomes,
    host_process,
    outcome_of,
    stays,
    until,
)

_SUCCESS = Outcome.of_exit_code(0)
_FINISHED = JobOutcome(OutcomeKind.SUCCESS)
_LOST = JobOutcome(OutcomeKind.LOST, "algo-3", 1, Reason("Lost host algo-3"))


def _end_well(*launchers):
    """Report success from all hosts, and check that the job succeeds."""
    for peers in launchers:
        peers.report(_SUCCESS, 0)
    assert end_outcomes(*launchers) == {_FINISHED}


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_launcher_that_is_killed_or_falls_silent_is_noticed(exits, signum):
    """A trainer host whose launcher sends nothing for lost_s is reported to all other hosts as lost."""
    job = Job(exits, 3)
    hub, other = job.start(MAIN, lost_s=0.5), job.start("algo-2")
    process = host_process(exits, job, "algo-3")
    until(lambda: hub.awaited == job.trainers and not hub.is_done)
    connected(other)
    until(lambda: "algo-3" not in hub._tracker.absent)
    process.send_signal(signum)
    reason = Reason("Lost host algo-3: its launcher has sent nothing for 0.5 s")
    expected = JobOutcome(OutcomeKind.LOST, "algo-3", 1, reason)
    assert (outcome_of(hub), outcome_of(other)) == (expected, expected)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_hub_that_is_killed_or_falls_silent_is_noticed(exits, monkeypatch, signum):
    """All other hosts consider the main host lost and stop waiting, even if its kernel still accepts connections."""
    monkeypatch.setattr("lightning_sm.launcher.peers.client._ANSWER_S", 0.3)
    job = Job(exits, 3)
    process = host_process(exits, job, MAIN)
    others = [job.start(host, lost_s=0.5) for host in ("algo-2", "algo-3")]
    connected(*others)
    process.send_signal(signum)
    for peers in others:
        outcome = outcome_of(peers)
        assert (outcome.kind, outcome.host, outcome.exit_code) == (OutcomeKind.LOST, MAIN, 1)
        peers.report(Outcome.of_exit_code(143), 0)
    assert {outcome.host for outcome in end_outcomes(*others)} == {MAIN}


def test_a_launcher_that_was_suspended_is_there_again(exits):
    """A launcher that resumes within lost_s reconnects, and neither end considers the other lost."""
    job = Job(exits)
    hub = job.start(MAIN, lost_s=TIMEOUT_S)
    process = host_process(exits, job, "algo-2", lost_s=1.5)
    until(lambda: not hub._tracker.absent)
    process.send_signal(signal.SIGSTOP)
    assert stays(lambda: hub.job_outcome is None, 2.0)
    process.send_signal(signal.SIGCONT)
    assert stays(lambda: hub.job_outcome is None, 1.6)
    assert process.poll() is None


def test_living_hosts_are_not_silent(exits):
    """Launchers keep polling while their scripts have nothing to report."""
    launchers = Job(exits).start_all(lost_s=1.0)
    assert stays(lambda: not any(peers.job_outcome for peers in launchers.values()), 2.0)


_STRANGERS = {
    "GET / HTTP/1.1": (b"GET / HTTP/1.1\r\n\r\n", "its LIGHTNING_SM_JOB_SECRET"),
    "binary": (bytes(range(256)) * 4 + b"\n", "its LIGHTNING_SM_JOB_SECRET"),
    "endless line": (b"x" * (2 * MAX_LINE_BYTES + 1), "Separator is not found"),
    "endless line with an end": (b"x" * (MAX_LINE_BYTES + 1) + b"\n", "Separator is found, but chunk is longer"),
    "nothing": (b"\n", "its LIGHTNING_SM_JOB_SECRET"),
    "half a line": (b"0123", "it sent no line within 0.5 s"),
}


@pytest.mark.parametrize("kind", _STRANGERS)
def test_garbage_is_dropped(exits, lines, monkeypatch, kind):
    """The hub closes connections that break the protocol without answering, logs the reason and keeps working."""
    monkeypatch.setattr(hub_module, "_SILENCE_S", 0.5 if kind == "half a line" else TIMEOUT_S)
    job = Job(exits)
    hub = job.start(MAIN)
    sent, why = _STRANGERS[kind]
    stranger = job.connect()
    stranger.sock.sendall(sent)
    lines.wait_for(why)
    assert stranger.is_closed()
    _end_well(hub, job.start("algo-2"))


@pytest.mark.parametrize("host", ["algo-9", MAIN, ""])
def test_only_other_hosts_of_the_job_are_answered(exits, lines, host):
    """The hub answers only the job's other hosts, even if the key is right."""
    job = Job(exits)
    job.start(MAIN)
    stranger = job.connect()
    stranger.sock.sendall(stranger.request(host, job.key))
    lines.wait_for(f"it calls itself {host!r}, which is not another host of this job")
    assert stranger.is_closed()


def test_whoever_knows_the_job_but_not_its_secret_is_told_nothing(exits, lines):
    """A launcher with a key made from the job's name alone gets no answer, and the main host logs the reason."""
    job, secret = Job(exits), new_secret()
    job.key = peers_key(job.identity, secret)
    hub = job.start(MAIN)
    stranger = job.connect()
    stranger.sock.sendall(stranger.request("algo-2", peers_key(job.identity, {}), outcome=BROKEN))
    assert stranger.is_closed()
    why = "its LIGHTNING_SM_JOB_SECRET (or, without one, its job's name) differs from that of this host"
    lines.wait_for(f"Closed a connection from 127.0.0.1: {why}.")
    job.key = peers_key(job.identity, {})
    with job.make("algo-2", unreached_s=0.1):
        lines.wait_for(f"has answered on 127.0.0.2:{job.port} (algo-1) for 0.1 s: it closed the connection.")
    job.key = peers_key(job.identity, secret)
    _end_well(hub, job.start("algo-2"))


def test_what_was_recorded_proves_nothing_later(exits, lines):
    """A replayed request is refused, because each connection has another challenge."""
    job = Job(exits)
    hub = job.start(MAIN)
    recorded = job.connect()
    assert recorded.ask("algo-2", job.key) == Answer(is_known=True)
    line = recorded.request("algo-2", job.key, outcome=BROKEN)
    replayed = job.connect()
    replayed.sock.sendall(line)
    assert replayed.is_closed()
    lines.wait_for("its LIGHTNING_SM_JOB_SECRET")
    assert hub.job_outcome is None


def test_an_answer_belongs_to_its_request():
    """A MAC is valid only for the request and the kind of message that it was made for."""
    key = b"key of the job"
    request, again = (to_line(Question("algo-2", nonce), key, b"random") for nonce in ("one", "two"))
    answer = to_line(Answer(is_over=True), key, mac_of(request))
    assert from_line(answer, Answer, key, mac_of(request)).is_over
    for line, kind, covered in (
        (answer, Answer, mac_of(again)),
        (request, Answer, b"random"),
        (request, Question, b""),
    ):
        with pytest.raises(PermissionError, match="LIGHTNING_SM_JOB_SECRET"):
            from_line(line, kind, key, covered)


def test_an_impostor_of_the_hub_is_told_nothing(exits):
    """A program that poses as the hub without the secret receives no report, and its orders are ignored."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)) as server:
        server.settimeout(TIMEOUT_S)
        peers = job.start("algo-2", peers_timeout_s=TIMEOUT_S)
        peers.report(BROKEN, 0)
        with server.accept()[0] as connection, connection.makefile("rb") as lines:
            connection.sendall(b"random\n")
            request = lines.readline()
            assert from_line(request, Question, job.key, b"random\n").outcome is None
            connection.sendall(to_line(Answer(job_outcome=_FINISHED, is_over=True), b"another key", mac_of(request)))
            assert lines.readline() == b""
    assert (peers.job_outcome, peers.is_main_host_there) == (None, False)


_BAD = {
    "another kind": b'{"what": 1}',
    "no outcome": b'{"host": "algo-2", "nonce": "", "outcome": 7}',
    "a huge number": b'{"host": "algo-2", "nonce": "", "attempt": 1e999}',
    "no JSON": b"[" * 5000,
}


@pytest.mark.parametrize("kind", _BAD)
def test_a_message_that_no_launcher_sends_ends_its_connection(exits, kind):
    """A malformed message with a valid MAC closes its connection and has no other effect."""
    job = Job(exits)
    hub = job.start(MAIN)
    host = job.connect()
    host.sock.sendall(_signed(_BAD[kind], Question, job.key, host.challenge))
    assert host.is_closed()
    assert hub.job_outcome is None


def _signed(text, kind, key, covered):
    """Return a line with this text and a valid MAC."""
    return b"%s %s\n" % (messages._mac(kind, text, key, covered), text)


@pytest.mark.parametrize("text", [b'{"job_outcome": 7}', b'{"restart": {"number": 1e999}}', b"7", b"[" * 5000])
def test_a_hub_that_breaks_the_protocol_is_connected_to_again(exits, lines, text):
    """After a malformed answer from the hub, the host reconnects and learns the job's outcome."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)) as server:
        server.settimeout(TIMEOUT_S)
        peers = job.start("algo-2", lost_s=TIMEOUT_S)
        with server.accept()[0] as connection, connection.makefile("rb") as received:
            connection.sendall(b"random\n")
            line = received.readline()
            connection.sendall(to_line(Answer(), job.key, mac_of(line)))
            connection.sendall(_signed(text, Answer, job.key, mac_of(received.readline())))
            lines.wait_for("Lost connection to the launcher on algo-1")
        with server.accept()[0] as connection:
            answered(connection, job.key, Answer(job_outcome=_LOST, is_over=True))
            assert outcome_of(peers) == _LOST
            assert peers.is_done


def test_main_host_waits_only_so_long_for_those_that_do_not_ask(exits):
    """The main host waits at most peers_timeout_s for a connected launcher that does not ask for the outcome."""
    job = Job(exits)
    hub = job.start(MAIN, lost_s=TIMEOUT_S)
    silent = job.connect()
    assert silent.ask("algo-2", job.key, outcome=_SUCCESS) == Answer(is_known=True)
    started = time.monotonic()
    hub.report(_SUCCESS, 0)
    assert end_outcomes(hub) == {_FINISHED}
    assert FAST["peers_timeout_s"] <= time.monotonic() - started < TIMEOUT_S / 2


def test_launcher_that_has_left_is_not_waited_for(exits):
    """The main host does not wait for a launcher that has closed its connection."""
    job = Job(exits)
    hub = job.start(MAIN, peers_timeout_s=TIMEOUT_S)
    host = job.connect()
    host.ask("algo-2", job.key, outcome=_SUCCESS)
    hub.report(_SUCCESS, 0)
    assert outcome_of(hub) == _FINISHED
    host.lines.close()
    host.sock.close()
    assert until(lambda: hub.is_done) < TIMEOUT_S / 2


def test_second_connection_of_a_host_replaces_the_first(exits):
    """A host that reconnects while its first connection still looks alive counts once and is not lost."""
    job = Job(exits)
    hub = job.start(MAIN, lost_s=1.0)
    first, second = job.connect(), job.connect()
    first.ask("algo-2", job.key)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert second.ask("algo-2", job.key) == Answer(is_known=True)
        time.sleep(0.05)
    assert hub.job_outcome is None


def test_strangers_do_not_lock_hosts_out(exits, monkeypatch):
    """Many silent connections do not keep hosts from connecting; each one is closed after a while."""
    monkeypatch.setattr(hub_module, "_SILENCE_S", 0.5)
    job = Job(exits)
    hub = job.start(MAIN)
    strangers = [job.connect() for _ in range(100)]
    _end_well(hub, job.start("algo-2"))
    assert all(stranger.is_closed() for stranger in strangers)


def test_trickling_stranger_is_closed(exits, lines, monkeypatch):
    """A connection that sends single bytes is closed like a silent one."""
    monkeypatch.setattr(hub_module, "_SILENCE_S", 0.3)
    job = Job(exits)
    job.start(MAIN)
    stranger = job.connect()
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            stranger.sock.sendall(b"x")
            time.sleep(0.02)
    lines.wait_for("it sent no line within 0.3 s")


def test_another_program_on_the_port_is_not_the_hub(exits, lines):
    """A host that reaches another program keeps looking for the main host's launcher."""
    job = Job(exits)
    with socket.create_server((job.bind, job.port)) as server:
        server.settimeout(TIMEOUT_S)
        peers = job.start("algo-2", peers_timeout_s=TIMEOUT_S)
        for answer in (b"HTTP/1.1 400 Bad Request\r\n", b"", b"random\nmac {}\n"):
            with server.accept()[0] as connection:
                connection.sendall(answer)
        assert not peers.is_main_host_there
    _end_well(job.start(MAIN), peers)


def test_name_that_does_not_resolve_is_waited_for(exits):
    """A main host whose name cannot be resolved yet is not an error."""
    job = Job(exits)
    address = "algo-1.invalid", job.port
    peers = Client("algo-2", main_host=MAIN, address=address, key=job.key, timings=Timings(**FAST))
    with peers:
        peers.report(_SUCCESS, 0)
        assert end_outcomes(peers) == {None}
