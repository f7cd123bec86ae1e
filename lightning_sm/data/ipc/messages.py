"""Messages between processes of one host: JSON, bytes and file descriptors over a socket pair."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

_LENGTHS = struct.Struct("<II")
_MAX_FDS = 8


@dataclass(frozen=True)
class Message:
    """A message from one process to another.

    Attributes:
        kind: What the message is about.
        facts: JSON values.
        payload: Raw bytes, for what is not JSON.
        fds: Open file descriptors, owned by the receiver.
    """

    kind: str
    facts: dict[str, Any]
    payload: bytes = b""
    fds: tuple[int, ...] = ()


class TypedMessage:
    """Base of the messages: each kind is a frozen dataclass, which is its own encoding.

    Its fields are JSON values, but for two names: ``payload`` is raw bytes, and ``fds`` are open file descriptors.
    These stay open in the sender, and belong to the receiver.
    """

    _kinds: ClassVar[dict[str, type[TypedMessage]]] = {}

    def __init_subclass__(cls) -> None:
        """Register a kind by its name."""
        TypedMessage._kinds[cls.__name__] = cls

    def send(self, receiver: MessageSocket) -> None:
        """Send it.

        Raises:
            BrokenPipeError: The other end is closed.
        """
        facts = dict(vars(self))
        receiver.send(type(self).__name__, facts.pop("payload", b""), facts.pop("fds", ()), **facts)

    @staticmethod
    def of(message: Message) -> TypedMessage:
        """Convert back what was sent."""
        kind = TypedMessage._kinds[message.kind]
        names = kind.__dataclass_fields__  # type: ignore[attr-defined]  # of each kind
        raw = {name: getattr(message, name) for name in ("payload", "fds") if name in names}
        return kind(**message.facts, **raw)


class MessageSocket:
    """One end of a pair of Unix stream sockets. Any thread may send; only one may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self._is_at_end = False

    def fileno(self) -> int:
        """Return the descriptor, for select and selectors."""
        return self._socket.fileno()

    def send(self, kind: str, payload: bytes = b"", fds: Sequence[int] = (), **facts: Any) -> None:
        """Send a message.

        Args:
            kind: What the message is about.
            payload: Raw bytes.
            fds: File descriptors to pass; they stay open in this process.
            **facts: JSON values.

        Raises:
            BrokenPipeError: The other end is closed.
        """
        head = json.dumps({"kind": kind, "num_fds": len(fds), **facts}, separators=(",", ":")).encode()
        data = b"".join((_LENGTHS.pack(len(head), len(payload)), head, payload))
        with self._sending:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            if sent < len(data):
                self._socket.sendall(memoryview(data)[sent:])

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the next message.

        Args:
            timeout_s: Seconds to wait; None: until the other end is closed.

        Raises:
            TimeoutError: No message arrived in time.

        Returns:
            The message; None when the other end is closed.
        """
        while (message := self._next()) is None:
            if self._is_at_end:
                return None
            if timeout_s is not None and not select.select([self._socket], [], [], timeout_s)[0]:
                raise TimeoutError
            self._read()
        return message

    def pending(self) -> list[Message]:
        """Read once and return all complete messages. Call it when the socket is readable."""
        self._read()
        return self.buffered()

    def buffered(self) -> list[Message]:
        """Return the complete messages that an earlier read received, without reading again."""
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    @property
    def is_at_end(self) -> bool:
        """Whether the other end is closed, and everything that it sent was received."""
        return self._is_at_end and len(self._received) < _LENGTHS.size

    def shutdown(self) -> None:
        """Close the connection for both ends, also while another thread of this process receives from it."""
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 18, _MAX_FDS)
        except ConnectionError:
            data, fds = b"", []
        self._received += data
        self._fds.extend(fds)
        self._is_at_end = self._is_at_end or not data

    def _next(self) -> Message | None:
        if len(self._received) < _LENGTHS.size:
            return None
        head, payload = _LENGTHS.unpack_from(self._received)
        start = _LENGTHS.size + head
        stop = start + payload
        if len(self._received) < stop:
            return None
        facts = json.loads(self._received[_LENGTHS.size : start])
        message = Message(
            facts.pop("kind"),
            facts,
            bytes(memoryview(self._received)[start:stop]),
            tuple(self._fds.popleft() for _ in range(facts.pop("num_fds"))),
        )
        del self._received[:stop]
        return message


# A ``Released``, the number of the ring or of the pass, and the slot or step. Writes up to PIPE_BUF bytes are atomic.
RELEASE = struct.Struct("<IIQ")


class Released(IntEnum):
    """What a record of the release pipe releases."""

    SLOT = 1  # number: the ring; value: the slot, which no tensor aliases now
    STEP = 2  # number: the pass; value: all steps below it were taken
    PASS = 3  # number: the pass, which is over
