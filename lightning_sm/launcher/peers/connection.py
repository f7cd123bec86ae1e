"""One connection between two launchers: sealed lines in, sealed lines out, and whether the other end still lives.

A message is one line: a MAC, then a JSON object. The key follows from the name of the job, which is no secret: it keeps
jobs and versions apart that meet on one network, and keeps no attacker out.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

# Part of the key, so that launchers which speak another version of the messages count as those of another job.
_PROTOCOL = b"lightning-sm peers 1\0"
# 1024 characters of a reason take at most 6144 bytes, as \u0001.
MAX_LINE_BYTES = 8 * 1024


@dataclass(frozen=True)
class Timings:
    """How long things may take, in seconds.

    Attributes:
        farewell_s: How long a host that has ended waits for hosts that it never heard of.
        ending_s: How long, after a failure, hosts are waited for whose scripts still run. The service leaves a
            stopped job 120 s.
        ping_s: Between two signs of life of a launcher.
        silence_s: Without any, a host is gone.
        return_s: How long a host whose connection ended may take to come back.
        hub_return_s: The same for the main host.
        hello_s: How long a connection may take until both ends know each other.
        first_retry_s: Before the second attempt to connect; the pauses double from there.
        longest_retry_s: The longest of these pauses.
        log_s: Between two log lines that say who is waited for.
        tick_s: How often the clock is looked at.
    """

    farewell_s: float = 10.0
    ending_s: float = 150.0
    ping_s: float = 5.0
    silence_s: float = 30.0
    return_s: float = 1.0
    hub_return_s: float = 10.0
    hello_s: float = 5.0
    first_retry_s: float = 0.1
    longest_retry_s: float = 5.0
    log_s: float = 30.0
    tick_s: float = 0.25


def job_key(job_identity: str) -> bytes:
    """The key of a job's messages.

    Args:
        job_identity: What tells the job from all others: its ARN or name.
    """
    return hashlib.sha256(_PROTOCOL + job_identity.encode(errors="replace")).digest()


def sealed(key: bytes, message: Message) -> bytes:
    """Make a line of a message.

    Args:
        key: The key of the job.
        message: What JSON can hold.
    """
    body = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    return _mac(key, body) + b" " + body + b"\n"


def unsealed(key: bytes, line: bytes) -> Message:
    """Read a line, without its end.

    Args:
        key: The key of the job.
        line: Anything.

    Raises:
        ConnectionError: It was not sealed with this key.
        ValueError: It holds no JSON.
        TypeError: It holds no JSON object.
    """
    mac, _, body = line.partition(b" ")
    if not hmac.compare_digest(mac, _mac(key, body)):
        raise ConnectionError("it sent what no launcher of this job and version sends")
    message = json.loads(body)
    if not isinstance(message, dict):
        raise TypeError("it sent no object")
    return message


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()


class Link:
    """One connection of this launcher. A ConnectionError from any method means: close it.

    Args:
        sock: The socket; it is made non-blocking.
        key: The key of the job.
        now: The time, in seconds of any one clock.

    Attributes:
        sock: The socket.
        is_known: Whether the other end has proved to be a launcher of this job.
        host: Name of the host at the other end, once known.
        opened: When this was made.
    """

    def __init__(self, sock: socket.socket, key: bytes, now: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.is_known = False
        self.host = ""
        self.opened = self._heard = self._pinged = now
        self._key = key
        self._received, self._unsent = b"", bytearray()

    def receive(self, now: float) -> list[Message]:
        """Read what has come; nothing, if that is less than a line.

        Args:
            now: The time.

        Raises:
            ConnectionError: The connection ended, or what came is none of this job's messages.
        """
        try:
            chunk = self.sock.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:  # a killed process leaves either this or an end of file
            chunk = b""
        if not chunk:
            raise ConnectionError("its connection ended")
        *lines, self._received = (self._received + chunk).split(b"\n")
        if any(len(line) >= MAX_LINE_BYTES for line in (*lines, self._received)):
            raise ConnectionError(f"it sent a line of more than {MAX_LINE_BYTES} bytes")
        messages = [unsealed(self._key, line) for line in lines]
        if messages:
            self._heard = now
        return messages

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the connection takes; ``keep`` sends the rest.

        Args:
            message: What JSON can hold.
        """
        self._unsent += sealed(self._key, message)
        self._flush()

    def finish(self) -> None:
        """Say that nothing more comes. With bytes unread, closing would be a reset, and what was sent might be lost."""
        with contextlib.suppress(OSError):
            self._flush()
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(MAX_LINE_BYTES):
                pass

    def keep(self, now: float, timings: Timings, ping: Message) -> None:
        """Give a sign of life, and expect one. To be called again and again.

        Args:
            now: The time.
            timings: How often, and how long.
            ping: The sign of life.

        Raises:
            ConnectionError: The other end was silent for too long.
        """
        if not self.is_known:
            if now - self.opened >= timings.hello_s:
                raise ConnectionError(f"it did not introduce itself within {timings.hello_s:g} s")
        elif now - self._heard >= timings.silence_s:
            raise ConnectionError(f"nothing was heard of it for {timings.silence_s:g} s")
        elif now - self._pinged >= timings.ping_s:
            self._pinged = now
            self.send(ping)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise ConnectionError("its connection ended") from error
