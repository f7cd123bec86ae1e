"""Messages between processes of one host: JSON, bytes and file descriptors over a socket pair."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import resource
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import cache, partial
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

logger = logging.getLogger(__name__)

_LENGTHS = struct.Struct("<II")
_MAX_FDS = 8


class Message:
    """Base of the messages: each kind is a frozen dataclass, which is its own encoding.

    Fields are JSON values, dataclasses of these, and lists and dicts of such dataclasses, with two exceptions. At most
    one field of type ``bytes`` is sent as it is. Descriptors in a field ``fds`` stay open in the sender; the receiver
    owns its copies. If it has no descriptor left for one of them, it gets none of the message's, and logs an error.
    """

    _kinds: ClassVar[dict[str, type[Message]]] = {}
    _bytes_field: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        """Register a kind by its name.

        Raises:
            TypeError: Another kind has the name, or the kind has several fields of type ``bytes``.
        """
        if cls.__name__ in Message._kinds:
            raise TypeError(f"two kinds of message are called {cls.__name__}")
        names = [name for name, hint in get_type_hints(cls).items() if hint is bytes]
        if len(names) > 1:
            raise TypeError(f"{cls.__name__} has {len(names)} fields of type bytes ({', '.join(names)}); 1 is allowed")
        cls._bytes_field = names[0] if names else None
        Message._kinds[cls.__name__] = cls


class NothingReceivedError(Exception):
    """No message arrived in time. Not a TimeoutError, which the user's signal handlers may raise during the wait."""


class MessageSocket:
    """One end of a pair of Unix stream sockets. Any thread may send; only one may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._received = bytearray()
        self._fds: deque[list[int]] = deque()  # by message that has descriptors
        self._is_at_end = False

    def fileno(self) -> int:
        """Return the descriptor, for select and selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            BrokenPipeError: The other end is closed.
        """
        fields = dict(vars(message))  # dataclasses.asdict() would copy each value
        raw = b"" if message._bytes_field is None else fields.pop(message._bytes_field)
        fds = fields.pop("fds", ())
        head = json.dumps([type(message).__name__, len(fds), fields], separators=(",", ":"), default=_named).encode()
        data = b"".join((_LENGTHS.pack(len(head), len(raw)), head, raw))
        with self._sending:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            if sent < len(data):
                self._socket.sendall(memoryview(data)[sent:])

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the next message.

        Args:
            timeout_s: Seconds to wait; None: until the other end is closed.

        Raises:
            NothingReceivedError: No message arrived in time.

        Returns:
            The message; None when the other end is closed.
        """
        while (message := self._next()) is None:
            if self._is_at_end:
                return None
            if timeout_s is not None and not self._is_readable(timeout_s):
                raise NothingReceivedError
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

    def end(self) -> None:
        """Send no more messages: the other end receives those that were sent, and then None."""
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_WR)

    def shutdown(self) -> None:
        """Close the connection for both ends, also while another thread of this process receives from it."""
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _is_readable(self, timeout_s: float) -> bool:
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _read(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(self._socket, 1 << 18, _MAX_FDS)
        except ConnectionError:
            data, fds, flags = b"", [], 0
        self._received += data
        # The kernel ends a read with the data to which descriptors belong: they are all of one message.
        if flags & socket.MSG_CTRUNC:
            logger.error(
                "This process has no descriptor left for a message with descriptors (limit: %d). Raise the limit: "
                "ulimit -n.",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
            for fd in fds:
                os.close(fd)
            self._fds.append([])
        elif fds:
            self._fds.append(list(fds))
        self._is_at_end = self._is_at_end or not data

    def _next(self) -> Message | None:
        if len(self._received) < _LENGTHS.size:
            return None
        head_bytes, raw_bytes = _LENGTHS.unpack_from(self._received)
        start = _LENGTHS.size + head_bytes
        stop = start + raw_bytes
        if len(self._received) < stop:
            return None
        name, num_fds, fields = json.loads(self._received[_LENGTHS.size : start])
        kind = Message._kinds[name]
        if kind._bytes_field is not None:
            fields[kind._bytes_field] = bytes(memoryview(self._received)[start:stop])
        if "fds" in kind.__dataclass_fields__:  # type: ignore[attr-defined]  # of each kind
            fields["fds"] = tuple(self._fds.popleft()) if num_fds else ()
        message: Message = _rebuild(kind, fields)
        del self._received[:stop]
        return message


def _named(value: Any) -> dict[str, Any]:
    return {type(value).__name__: vars(value)}


def _rebuild(kind: Any, fields: dict[str, Any]) -> Any:
    """Return a dataclass from its fields, with the dataclasses in it."""
    for name, rebuild in _rebuilders(kind).items():
        fields[name] = rebuild(fields[name])
    return kind(**fields)


@cache
def _rebuilders(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """Return functions that rebuild the fields of a dataclass which JSON cannot express."""
    rebuilders = {}
    for name, hint in get_type_hints(kind).items():
        rebuild = _rebuilder(hint)
        if rebuild is not None:
            rebuilders[name] = rebuild
    return rebuilders


def _rebuilder(hint: Any) -> Callable[[Any], Any] | None:
    container, inner = get_origin(hint), get_args(hint) or (hint,)
    if container in (list, dict):
        rebuild = _rebuilder(inner[-1])
        if rebuild is None:
            return None
        if container is list:
            return lambda values: [rebuild(value) for value in values]
        return lambda values: {name: rebuild(value) for name, value in values.items()}
    kinds = {one.__name__: one for one in inner if isinstance(one, type) and dataclasses.is_dataclass(one)}
    return partial(_rebuild_by_name, kinds) if kinds else None


def _rebuild_by_name(kinds: dict[str, Any], value: dict[str, Any] | None) -> Any:
    if value is None:
        return None
    ((name, fields),) = value.items()
    return _rebuild(kinds[name], fields)


# A ``Released``, the number of the ring or of the pass, and the slot or step. Writes up to PIPE_BUF bytes are atomic.
RELEASE = struct.Struct("<IIQ")


class Released(IntEnum):
    """The kinds of records in the release pipe."""

    SLOT = 1  # number: the ring; value: the slot, which no tensor aliases now
    STEP = 2  # number: the pass; value: all steps below it were taken
    PASS = 3  # number: the pass, which is over
