"""Messages between processes of one host: JSON, bytes and file descriptors over a socket pair."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import select
import socket
import struct
import threading
from collections import deque
from enum import IntEnum
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

_LENGTHS = struct.Struct("<II")
_MAX_FDS = 8


class Message:
    """Base of the messages: each kind is a frozen dataclass, which is its own encoding.

    Fields are JSON values, dataclasses of these, or lists of such dataclasses, except for two names: ``payload`` is raw
    bytes, and ``fds`` are file descriptors. They stay open in the sender, and belong to the receiver.
    """

    _kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        """Register a kind by its name."""
        if cls.__name__ in Message._kinds:
            raise TypeError(f"two kinds of message are called {cls.__name__}")
        Message._kinds[cls.__name__] = cls


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

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            BrokenPipeError: The other end is closed.
        """
        facts = dict(vars(message))  # dataclasses.asdict() would copy each value
        payload = facts.pop("payload", b"")
        fds = facts.pop("fds", ())
        head = json.dumps([type(message).__name__, len(fds), facts], separators=(",", ":"), default=vars).encode()
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
        name, num_fds, facts = json.loads(self._received[_LENGTHS.size : start])
        kind = Message._kinds[name]
        fields = kind.__dataclass_fields__  # type: ignore[attr-defined]  # of each kind
        if "payload" in fields:
            facts["payload"] = bytes(memoryview(self._received)[start:stop])
        if "fds" in fields:
            facts["fds"] = tuple(self._fds.popleft() for _ in range(num_fds))
        message: Message = _rebuilt(kind, facts)
        del self._received[:stop]
        return message


def _rebuilt(kind: Any, facts: dict[str, Any]) -> Any:
    """Return a dataclass from its fields, with those in it."""
    for name, (inner, is_list) in _dataclasses_in(kind).items():
        value = facts[name]
        facts[name] = [_rebuilt(inner, item) for item in value] if is_list else _rebuilt(inner, value)
    return kind(**facts)


@functools.cache
def _dataclasses_in(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the fields that are dataclasses, or lists of them: the class, and whether it is a list."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        inner = next(iter(get_args(hint)), hint) if get_origin(hint) is list else hint
        if dataclasses.is_dataclass(inner):
            found[name] = inner, inner is not hint
    return found


# A ``Released``, the number of the ring or of the pass, and the slot or step. Writes up to PIPE_BUF bytes are atomic.
RELEASE = struct.Struct("<IIQ")


class Released(IntEnum):
    """What a record of the release pipe releases."""

    SLOT = 1  # number: the ring; value: the slot, which no tensor aliases now
    STEP = 2  # number: the pass; value: all steps below it were taken
    PASS = 3  # number: the pass, which is over
