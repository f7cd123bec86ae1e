"""Messages between processes of one host: typed structs and file descriptors over a socket pair."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
import struct
import threading
from collections import deque
from enum import IntEnum
from typing import ClassVar

import msgspec
from msgspec.structs import force_setattr

from lightning_sm._structs import Struct, decoder, encode

logger = logging.getLogger(__name__)

# Size of the message in bytes, and number of its descriptors.
_HEAD = struct.Struct("<II")
_MAX_FDS = 8


class Message(Struct, frozen=True, tag=True):
    """Base class for messages, which are encoded in MessagePack with the name of their kind.

    Descriptors in a field ``fds`` stay open in the sender, and the receiver owns its copies. A receiver that runs out
    of descriptors gets none of those in the message, and logs an error.
    """

    _kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        """Register a kind of message by its name.

        Raises:
            TypeError: Another kind has the same name.
        """
        if cls.__name__ in Message._kinds:
            raise TypeError(f"two kinds of message are called {cls.__name__}")
        Message._kinds[cls.__name__] = cls


class NothingReceivedError(Exception):
    """No message arrived in time. Not a TimeoutError, which the user's signal handlers may raise during the wait."""


class MessageSocket:
    """One end of a pair of Unix stream sockets. Any thread may send; only one may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._received = bytearray()
        self._fds: deque[list[int]] = deque()  # a list for each message with descriptors
        self._is_at_end = False

    def fileno(self) -> int:
        """Return the descriptor, for select and selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            BrokenPipeError: The other end is closed.
        """
        fds = getattr(message, "fds", ())
        body = encode(message, _ENCODER)
        data = _HEAD.pack(len(body), len(fds)) + body
        with self._sending:
            sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
            if sent < len(data):
                self._socket.sendall(memoryview(data)[sent:])

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Wait for the next message.

        Args:
            timeout_s: Seconds to wait; None for no limit.

        Raises:
            NothingReceivedError: No message arrived in time.

        Returns:
            The message, or None if the other end is closed.
        """
        while (message := self._next()) is None:
            if self._is_at_end:
                return None
            if timeout_s is not None and not self._is_readable(timeout_s):
                raise NothingReceivedError
            self._read()
        return message

    def pending(self) -> list[Message]:
        """Read once, and return all complete messages. Call this when the socket is readable."""
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
        """Whether the other end is closed, and everything that it sent has been received."""
        return self._is_at_end and len(self._received) < _HEAD.size

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _is_readable(self, timeout_s: float) -> bool:
        poll = select.poll()  # select() rejects descriptors above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _read(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(self._socket, 1 << 18, _MAX_FDS)
        except ConnectionError:
            data, fds, flags = b"", [], 0
        self._received += data
        # The kernel ends a read after data with descriptors, so all descriptors of a read belong to one message.
        if flags & socket.MSG_CTRUNC:
            logger.error(
                "This process has run out of file descriptors (limit: %d). Raise the limit with ulimit -n.",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
            for fd in fds:
                os.close(fd)
            self._fds.append([])
        elif fds:
            self._fds.append(list(fds))
        self._is_at_end = self._is_at_end or not data

    def _next(self) -> Message | None:
        if len(self._received) < _HEAD.size:
            return None
        num_bytes, num_fds = _HEAD.unpack_from(self._received)
        end = _HEAD.size + num_bytes
        if len(self._received) < end:
            return None
        with memoryview(self._received) as view:
            # Pass the kinds each time: modules that define more kinds may have been imported since.
            message: Message = decoder(msgspec.msgpack.Decoder, *Message._kinds.values()).decode(view[_HEAD.size : end])
        if num_fds:
            force_setattr(message, "fds", tuple(self._fds.popleft()))  # replaces the sender's numbers
        del self._received[:end]
        return message


_ENCODER = msgspec.msgpack.Encoder()


# A record in the release pipe: a ``Released``, the number of the ring or pass, and the slot or step. Writes of up to
# PIPE_BUF bytes are atomic.
RELEASE = struct.Struct("<IIQ")


class Released(IntEnum):
    """The kinds of records in the release pipe."""

    SLOT = 1  # number: the ring; value: the slot, which no tensor aliases any more
    STEP = 2  # number: the pass; value: the step before which all steps were taken
    PASS = 3  # number: the pass, which has ended
