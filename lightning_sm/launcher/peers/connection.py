"""One connection between two launchers: authenticated lines in both directions, and heartbeats.

A message is one line: a MAC, then a JSON object. The key follows from the job's secret, which keeps out everybody else.
In a job without a secret it follows from the job's name, and only separates jobs that meet on one network.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_sm.job.secret import job_key
from lightning_sm.job.stopping import Outcome

Message = dict[str, Any]

# Part of the key, so that a launcher with another version of the messages counts as one of another job.
_PROTOCOL = "lightning-sm peers 3"
# 1024 characters of a reason take at most 6144 bytes, as \u0001.
MAX_LINE_BYTES = 8 * 1024


@dataclass(frozen=True)
class Timings:
    """How long things may take, in seconds.

    Attributes:
        peers_timeout_s: How long a host that has ended waits for hosts that never connected.
        after_failure_s: How long to wait, after a failure, for hosts whose scripts still run. SageMaker gives a stopped
            job 120 s.
        heartbeat_s: Between two heartbeats of a launcher.
        silence_s: Without heartbeats for so long, a host is lost.
        reconnect_s: How long a lost connection may take to be made again. A reset, and a packet that is lost at every
            attempt to connect, cost seconds; NCCL's own connections survive more.
        unreached_s: After how long a host says that it has never reached the main host's launcher.
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

    def to_message(self) -> Message:
        """Return what is sent to the main host."""
        return {"type": "report", "attempt": self.attempt, **asdict(self.outcome)}

    @classmethod
    def from_message(cls, message: Message) -> Report:
        """Read what another launcher sent.

        Raises:
            ValueError: A number is none.
            KeyError: A field is missing.
        """
        outcome = Outcome(int(message["exit_code"]), str(message["reason"]), bool(message["may_restart"]))
        return cls(int(message["attempt"]), outcome)


def peers_key(job_identity: str, env: Mapping[str, str]) -> bytes:
    """The key of the messages between a job's launchers.

    Args:
        job_identity: The job's ARN or name.
        env: Environment variables, which may have the job's secret.
    """
    return job_key(_PROTOCOL, job_identity, env)


def sealed(key: bytes, message: Message) -> bytes:
    """Encode a message as a line that only holders of the key can write."""
    body = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    return _mac(key, body) + b" " + body + b"\n"


def unsealed(key: bytes, line: bytes) -> Message:
    """Check and decode a line, without its newline.

    Raises:
        ConnectionError: The line was not sealed with this key.
        ValueError: It is not valid JSON.
        TypeError: It is not a JSON object.
    """
    mac, _, body = line.partition(b" ")
    if not hmac.compare_digest(mac, _mac(key, body)):
        raise ConnectionError("it is not a launcher of this job and version")
    message = json.loads(body)
    if not isinstance(message, dict):
        raise TypeError("it sent JSON that is not an object")
    return message


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()


class Connection:
    """One connection of this launcher. When a method raises ConnectionError, the caller must close the socket.

    Args:
        sock: The socket; it becomes non-blocking.
        key: The key of the job.
        now: The time, in seconds of any one clock.

    Attributes:
        sock: The socket.
        is_known: Whether the other end has proved to be a launcher of this job.
        host: Name of the host at the other end, once known.
    """

    def __init__(self, sock: socket.socket, key: bytes, now: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.is_known = False
        self.host = ""
        self._opened_at = now
        self._received_at = now
        self._heartbeat_at = now
        self._key = key
        self._received = b""
        self._unsent = bytearray()

    def receive(self, now: float) -> list[Message]:
        """Return the messages that have arrived; none, if less than a line has.

        Raises:
            ConnectionError: The connection closed, or what arrived is not a message of this job.
        """
        try:
            chunk = self.sock.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:  # a killed process leaves either this or an end of file
            chunk = b""
        if not chunk:
            raise ConnectionError("it closed the connection")
        *lines, self._received = (self._received + chunk).split(b"\n")
        if any(len(line) >= MAX_LINE_BYTES for line in (*lines, self._received)):
            raise ConnectionError(f"it sent a line longer than {MAX_LINE_BYTES} bytes")
        messages = [unsealed(self._key, line) for line in lines]
        if messages:
            self._received_at = now
        return messages

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the socket takes; ``heartbeat`` sends the rest."""
        self._unsent += sealed(self._key, message)
        self._flush()

    def finish(self) -> None:
        """Shut down for sending. Closing with bytes unread would be a reset, which could discard what was sent."""
        with contextlib.suppress(OSError):
            self._flush()
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(MAX_LINE_BYTES):
                pass

    def heartbeat(self, now: float, timings: Timings, message: Message) -> None:
        """Send a heartbeat when one is due, and check that the other end sends its own. Call it regularly.

        Args:
            now: The time.
            timings: How often, and how long to wait for the other end.
            message: The heartbeat.

        Raises:
            ConnectionError: The other end was silent for too long.
        """
        if not self.is_known:
            if now - self._opened_at >= timings.hello_s:
                raise ConnectionError(f"it did not introduce itself within {timings.hello_s:g} s")
        elif now - self._received_at >= timings.silence_s:
            raise ConnectionError(f"it sent no heartbeat for {timings.silence_s:g} s")
        elif now - self._heartbeat_at >= timings.heartbeat_s:
            self._heartbeat_at = now
            self.send(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise ConnectionError("it closed the connection") from error
