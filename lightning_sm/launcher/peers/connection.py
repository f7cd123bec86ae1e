"""One connection between two launchers, which prove that they belong to the job, then exchange messages.

Each MAC covers the greetings of both, so that it proves nothing on any other connection. The key is derived from the
job's secret, which keeps out everybody else. In a job without a secret, it is derived from the job's name, and only
separates jobs that share a network. A hub reveals nothing before it has seen the proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_sm.job.secret import job_key
from lightning_sm.job.variables import JOB_SECRET
from lightning_sm.launcher import timeline
from lightning_sm.launcher.peers.messages import (
    PROTOCOL,
    AnyMessage,
    Greeting,
    Proof,
    StillThere,
    parse_greeting,
    parse_message,
    to_line,
)

_NONCE_BYTES = 16
# A reason of 1024 characters takes at most 7168 bytes, if each is a surrogate, which becomes \\ud800, and so does its
# headline.
MAX_LINE_BYTES = 16 * 1024
# For the other end to read the last messages, and to close the connection.
_LAST_WORDS_S = 0.5
_ANOTHER_KEY = f"its {JOB_SECRET.name} (or, without one, its job's name) differs from that of this host"


@dataclass(frozen=True)
class Timings:
    """The limits and intervals of the launchers' communication, in seconds.

    Attributes:
        peers_timeout_s: How long a host whose script has ended waits for hosts that never connected.
        after_failure_s: How long to wait, after a failure, for hosts whose scripts still run.
        heartbeat_s: The time between two heartbeats of a launcher.
        silence_s: After how long without heartbeats a connection is closed, as if it had been lost.
        reconnect_s: How long a host may take to reconnect.
        unreached_s: After how long a host logs that it has never reached the main host's launcher, and the main host
            which hosts have never reached it.
        hello_s: How long the two ends of a new connection may take to introduce themselves.
        first_retry_s: The pause before the second attempt to connect; further pauses double.
        longest_retry_s: The longest of these pauses.
        log_s: The time between two log lines that name the awaited hosts.
        tick_s: The time between two checks of all these limits.
    """

    peers_timeout_s: float = timeline.ABSENT_HOSTS_S
    after_failure_s: float = timeline.AFTER_FAILURE_S
    heartbeat_s: float = 5.0
    silence_s: float = timeline.SILENCE_S
    reconnect_s: float = timeline.RECONNECT_S
    unreached_s: float = 60.0
    hello_s: float = 5.0
    first_retry_s: float = 0.1
    longest_retry_s: float = 5.0
    log_s: float = 30.0
    tick_s: float = 0.25


def peers_key(job_identity: str, env: Mapping[str, str]) -> bytes:
    """Derive the key by which a job's launchers recognise each other.

    Args:
        job_identity: The job's ARN or name.
        env: Environment variables, which may contain the job's secret.
    """
    return job_key("lightning-sm launchers", job_identity, env)


class Connection:
    """One connection of this launcher. When ``receive`` raises an error, the connection is lost.

    Args:
        reader: From asyncio, with the limit ``MAX_LINE_BYTES``.
        writer: From asyncio.
        key: The key of the job.
        hello_s: How long both ends may take to introduce themselves, in seconds.

    Attributes:
        address: IP address of the other end.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, hello_s: float) -> None:
        self.address = str((writer.get_extra_info("peername") or ["a closed connection"])[0])
        self._reader = reader
        self._writer = writer
        self._key = key
        self._greetings = b""  # the lines that the MACs cover
        self._received_at = self._heartbeat_at = time.monotonic()
        self._why_lost = "it closed the connection"
        why = f"it did not introduce itself within {hello_s:g} s"
        self._deadline = asyncio.get_running_loop().call_later(hello_s, self.drop, why)

    async def introduce(self, own: str) -> None:
        """Exchange the first messages with the hub, as the host ``own``.

        Raises:
            OSError: The connection is lost, or the other end's version or key differs.
            ValueError: The other end sent a line that no launcher sends.
        """
        self._greet(host=own)
        _check_protocol(await self._greeting())
        self.send(Proof(self._mac("host")))
        if not self._is_proof(await self.receive(), "hub"):
            raise PermissionError(_ANOTHER_KEY)
        self._deadline.cancel()

    async def admit(self, is_known: Callable[[str], bool]) -> str:
        """Exchange the first messages with a host, and return its name.

        Args:
            is_known: Returns whether a name is that of another host of the job.

        Raises:
            OSError: The connection is lost, or the other end's version or key differs.
            ValueError: The other end sent a line that no launcher sends, or its name is not that of another host.
        """
        hello = await self._greeting()
        self._greet()
        _check_protocol(hello)
        host = hello.host
        if not self._is_proof(await self.receive(), "host"):
            self.send(Proof(""))  # an invalid proof: the other launcher then logs the mismatch, too
            raise PermissionError(f"it introduced itself as {host!r}, but {_ANOTHER_KEY}")
        if not is_known(host):
            raise ValueError(f"it introduced itself as {host!r}, which is not another host of this job")
        self.send(Proof(self._mac("hub")))
        self._deadline.cancel()
        return host

    async def receive(self) -> AnyMessage:
        """Return the next message.

        Raises:
            OSError: The connection is lost, or was dropped.
            ValueError: The other end sent a line that no launcher sends.
        """
        return parse_message(await self._line())

    def send(self, message: AnyMessage) -> None:
        """Send a message. If the connection is lost, ``receive`` raises the error."""
        self._writer.write(to_line(message))

    def keep_alive(self, now: float, timings: Timings) -> None:
        """Send a heartbeat when one is due, and drop the connection if the other end sends none. Call this regularly.

        Args:
            now: The time, in seconds of ``time.monotonic``.
            timings: How often to send one, and how long to wait for the other end's.
        """
        if now - self._received_at >= timings.silence_s:
            self.drop(f"it sent no heartbeat for {timings.silence_s:g} s")
        elif now - self._heartbeat_at >= timings.heartbeat_s:
            self._heartbeat_at = now
            self.send(StillThere())

    def drop(self, why: str) -> None:
        """Close the connection at once; ``receive`` raises an error with this reason."""
        self._why_lost = why
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send the rest, let the other end close the connection, and close it.

        Closing it at once, with bytes unread, would send a reset, which could discard what was sent.
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
        except ConnectionError:  # when the other process was killed, there is either this or an end of file
            line = b""
        if not line.endswith(b"\n"):
            raise ConnectionError(self._why_lost)
        self._received_at = time.monotonic()
        return line

    def _greet(self, host: str = "") -> None:
        line = to_line(Greeting(PROTOCOL, secrets.token_hex(_NONCE_BYTES), host))
        self._greetings += line
        self._writer.write(line)

    async def _greeting(self) -> Greeting:
        line = await self._line()
        self._greetings += line
        return parse_greeting(line)

    def _mac(self, who: str) -> str:
        return hmac.new(self._key, who.encode() + b"\0" + self._greetings, hashlib.sha256).hexdigest()

    def _is_proof(self, message: AnyMessage, who: str) -> bool:
        return isinstance(message, Proof) and hmac.compare_digest(message.mac.encode(), self._mac(who).encode())


def _check_protocol(greeting: Greeting) -> None:
    protocol = greeting.protocol
    if protocol != PROTOCOL:
        raise ConnectionError(
            f"it speaks version {protocol!r} of the launchers' protocol, this host version {PROTOCOL}: install the "
            "same version of lightning-sm on all hosts"
        )
