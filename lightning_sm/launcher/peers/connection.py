"""One connection between two launchers: both prove that they belong to the job, then exchange lines of JSON.

    host:  {"protocol": 5, "nonce": "...", "host": "algo-2"}
    hub:   {"protocol": 5, "nonce": "..."}
    host:  {"mac": "..."}
    hub:   {"mac": "..."}

Each MAC is over the first two lines, so that it proves nothing on any other connection. The key follows from the
secret of the job, which keeps out everybody else. In a job without a secret it follows from the job's name, and only
separates jobs that meet on one network. A hub tells nothing before it has seen the proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_sm.job.secret import job_key
from lightning_sm.job.stopping import Outcome, OutcomeKind, Reason
from lightning_sm.job.variables import JOB_SECRET

PeerMessage = dict[str, Any]

# The first two lines stay the same in all versions, so that launchers which differ can say so.
PROTOCOL = 5
_NONCE_BYTES = 16
# 1024 characters of a reason take at most 6144 bytes, as \u0001, and its headline as many.
MAX_LINE_BYTES = 16 * 1024
# For the other end to read what was sent, and to close the connection.
_LAST_WORDS_S = 0.5
_ANOTHER_KEY = f"its {JOB_SECRET.name} (or, without one, its job's name) differs from that of this host"


@dataclass(frozen=True)
class Timings:
    """How long things may take, in seconds.

    Attributes:
        peers_timeout_s: How long a host that has ended waits for hosts that never connected.
        after_failure_s: How long to wait, after a failure, for hosts whose scripts still run. SageMaker gives a stopped
            job 120 s.
        heartbeat_s: Between two heartbeats of a launcher.
        silence_s: After how long without heartbeats the connection to a host is closed, as if it had been lost.
        reconnect_s: How long a lost connection may take to be made again. A reset, and a packet that is lost at every
            attempt to connect, cost seconds; NCCL's own connections survive more.
        unreached_s: After how long a host says that it has never reached the main host's launcher, and the main host
            which hosts have never reached it.
        hello_s: How long a new connection may take until both ends know each other.
        first_retry_s: Before the second attempt to connect; the pauses double from there.
        longest_retry_s: The longest of these pauses.
        log_s: Between two log lines that name the hosts that are waited for.
        tick_s: Between two checks of all these times.
    """

    peers_timeout_s: float = 10.0
    after_failure_s: float = 150.0
    heartbeat_s: float = 5.0
    silence_s: float = 30.0
    reconnect_s: float = 15.0
    unreached_s: float = 60.0
    hello_s: float = 5.0
    first_retry_s: float = 0.1
    longest_retry_s: float = 5.0
    log_s: float = 30.0
    tick_s: float = 0.25


@dataclass(frozen=True)
class Report:
    """What a launcher reports to the others.

    Attributes:
        attempt: After how many restarts of the job its script was started.
        outcome: How it ended.
    """

    attempt: int
    outcome: Outcome

    def to_message(self) -> PeerMessage:
        """Return what is sent to the main host."""
        outcome = self.outcome
        return {
            "type": "report",
            "attempt": self.attempt,
            "kind": outcome.kind.value,
            "exit_code": outcome.exit_code,
            "may_restart": outcome.may_restart,
            **outcome.reason.to_message(),
        }

    @classmethod
    def from_message(cls, message: PeerMessage) -> Report:
        """Read what another launcher sent.

        Raises:
            ValueError: The kind is unknown, or a number is none.
            KeyError: A field is missing.
        """
        reason = Reason.from_message(message)
        kind, exit_code = OutcomeKind(message["kind"]), int(message["exit_code"])
        outcome = Outcome(kind, exit_code, reason, bool(message["may_restart"]))
        return cls(int(message["attempt"]), outcome)


def peers_key(job_identity: str, env: Mapping[str, str]) -> bytes:
    """The key by which a job's launchers know each other.

    Args:
        job_identity: The job's ARN or name.
        env: Environment variables, which may have the job's secret.
    """
    return job_key("lightning-sm launchers", job_identity, env)


class Connection:
    """One connection of this launcher. It is lost when ``receive`` raises an error.

    Args:
        reader: From asyncio, with the limit ``MAX_LINE_BYTES``.
        writer: From asyncio.
        key: The key of the job.
        hello_s: How long it may take until both ends know each other, in seconds.

    Attributes:
        address: IP address of the other end.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, hello_s: float) -> None:
        self.address = str((writer.get_extra_info("peername") or ["a closed connection"])[0])
        self._reader = reader
        self._writer = writer
        self._key = key
        self._greetings = b""  # the lines that the MACs are over
        self._received_at = self._heartbeat_at = time.monotonic()
        self._why_lost = "it closed the connection"
        why = f"it did not introduce itself within {hello_s:g} s"
        self._deadline = asyncio.get_running_loop().call_later(hello_s, self.drop, why)

    async def introduce(self, own: str) -> None:
        """Exchange the first messages with the hub, as the host ``own``.

        Raises:
            OSError, ValueError, TypeError: The other end is not the hub of this job.
        """
        self._greet(host=own)
        _check_protocol(await self._greeting())
        self.send({"mac": self._mac("host")})
        if not self._is_proof(await self.receive(), "hub"):
            raise PermissionError(_ANOTHER_KEY)
        self._deadline.cancel()

    async def admit(self, is_known: Callable[[str], bool]) -> str:
        """Exchange the first messages with a host, and return its name.

        Args:
            is_known: Whether a name is that of another host of the job.

        Raises:
            OSError, ValueError, TypeError: The other end is not a launcher of this job.
        """
        hello = await self._greeting()
        self._greet()
        _check_protocol(hello)
        host = str(hello.get("host"))
        if not self._is_proof(await self.receive(), "host"):
            self.send({"mac": ""})  # so that it says the same
            raise PermissionError(f"it introduced itself as {host!r}, but {_ANOTHER_KEY}")
        if not is_known(host):
            raise ValueError(f"it introduced itself as {host!r}, which is not another host of this job")
        self.send({"mac": self._mac("hub")})
        self._deadline.cancel()
        return host

    async def receive(self) -> PeerMessage:
        """Return the next message.

        Raises:
            OSError: The connection is lost, or was dropped.
            ValueError, TypeError: What arrived is not a message.
        """
        return _decoded(await self._line())

    def send(self, message: PeerMessage) -> None:
        """Send a message. If the connection is lost, ``receive`` says so."""
        self._writer.write(_encoded(message))

    def keep_alive(self, now: float, timings: Timings, message: PeerMessage) -> None:
        """Send a heartbeat when one is due, and drop the connection if the other end sends none. Call it regularly.

        Args:
            now: The time, in seconds of ``time.monotonic``.
            timings: How often, and how long to wait for the other end.
            message: The heartbeat.
        """
        if now - self._received_at >= timings.silence_s:
            self.drop(f"it sent no heartbeat for {timings.silence_s:g} s")
        elif now - self._heartbeat_at >= timings.heartbeat_s:
            self._heartbeat_at = now
            self.send(message)

    def drop(self, why: str) -> None:
        """Close the connection at once; ``receive`` raises an error with this reason."""
        self._why_lost = why
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send the rest, let the other end close the connection, and close it.

        To close it at once, with bytes unread, would be a reset, which could discard what was sent.
        """
        self._deadline.cancel()
        abort = self._writer.transport.abort
        deadline = asyncio.get_running_loop().call_later(_LAST_WORDS_S, abort)
        try:
            with contextlib.suppress(OSError):
                self._writer.write_eof()
                while await self._reader.read(MAX_LINE_BYTES):
                    pass
        finally:
            deadline.cancel()
            abort()

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readline()
        except ValueError:
            raise ConnectionError(f"it sent a line longer than {MAX_LINE_BYTES} bytes") from None
        except ConnectionError:  # a killed process leaves either this or an end of file
            line = b""
        if not line.endswith(b"\n"):
            raise ConnectionError(self._why_lost)
        self._received_at = time.monotonic()
        return line

    def _greet(self, **more: str) -> None:
        line = _encoded({"protocol": PROTOCOL, "nonce": secrets.token_hex(_NONCE_BYTES), **more})
        self._greetings += line
        self._writer.write(line)

    async def _greeting(self) -> PeerMessage:
        line = await self._line()
        self._greetings += line
        return _decoded(line)

    def _mac(self, who: str) -> str:
        return hmac.new(self._key, who.encode() + b"\0" + self._greetings, hashlib.sha256).hexdigest()

    def _is_proof(self, message: PeerMessage, who: str) -> bool:
        return hmac.compare_digest(str(message.get("mac")).encode(), self._mac(who).encode())


def _encoded(message: PeerMessage) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"


def _decoded(line: bytes) -> PeerMessage:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it sent a line that is not JSON") from None
    if not isinstance(message, dict):
        raise TypeError("it sent JSON that is not an object")
    return message


def _check_protocol(message: PeerMessage) -> None:
    protocol = message.get("protocol")
    if protocol != PROTOCOL:
        raise ConnectionError(
            f"it speaks version {protocol!r} of the launchers' protocol, this host version {PROTOCOL}: install the "
            "same version of lightning-sm on all hosts"
        )
