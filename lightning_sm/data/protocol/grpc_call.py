"""A gRPC call, which encodes requests and finds messages in the bytes that arrive, but does no I/O.

It follows ``doc/PROTOCOL-HTTP2.md`` of github.com/grpc/grpc ("gRPC over HTTP/2").
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from lightning_sm.data.protocol.grpc_status import CallError, CallStatus, error_in
from lightning_sm.data.protocol.spec import CHUNK_BYTES
from lightning_sm.errors import WireError

if TYPE_CHECKING:
    from lightning_sm.data.protocol.h2_connection import Http2Connection

# Allow for the largest header, which describes each large tensor or array in its batches, the first piece, and small
# answers in the same message.
MAX_MESSAGE_BYTES = (64 << 20) + CHUNK_BYTES + (1 << 20)

_PREFIX = struct.Struct(">BI")  # "Length-Prefixed-Message": compressed flag and length


class MessageReceiver(Protocol):
    """The receiver of a call's messages; all methods are called in the connection's thread.

    An exception from a method ends the call and is passed to ``end``.
    """

    def begin(self, num_bytes: int) -> None:
        """Prepare for a message of ``num_bytes``, which may be 0."""

    def memory(self) -> memoryview:
        """Return memory for at least the next byte of the message; it may be filled only in part."""

    def advance(self, num_bytes: int) -> None:
        """Note that ``num_bytes`` were written to the start of ``memory``."""

    def end(self, error: Exception | None) -> None:
        """Note that the call has ended, successfully if ``error`` is None, and that the memory is no longer used."""


class Call:
    """A call on one HTTP/2 stream.

    Args:
        headers: Headers of the call.
        receiver: Receives the messages of the answer.
        requests: All requests; None if ``send`` adds them one by one.
        confirm: Checks the headers of the answer and returns the request that confirms the call; raises CallError if
            the server has not proved that it knows the token.
        waits: Whether to send nothing until the server has proved the token, and then the confirming request first.

    Attributes:
        transport: The connection; None until the call is started.
        stream_id: Number of the stream; 0 until it is open.
        has_sent_all: Whether all requests have been sent.
        has_received: Whether any part of the answer has arrived.
        trailers: The latest headers that have arrived.
        num_unreturned: Received bytes that have not been returned to the stream's window.
    """

    def __init__(
        self,
        headers: list[tuple[str, str]],
        receiver: MessageReceiver,
        requests: Iterable[bytes] | None,
        confirm: Callable[[Mapping[bytes, bytes]], bytes],
        *,
        waits: bool,
    ) -> None:
        self.headers = headers
        self.receiver = receiver
        self.transport: Http2Connection | None = None
        self.stream_id = 0
        self.has_sent_all = False
        self.has_received = False
        self.trailers: dict[bytes, bytes] = {}
        self.num_unreturned = 0
        self._requests: Iterator[bytes] | None = None if requests is None else iter(requests)
        self._confirm = confirm
        self._waits = waits
        self._is_proved = False  # the server has proved that it knows the token
        self._outgoing: deque[memoryview] = deque()
        self._prefix = bytearray(_PREFIX.size)
        self._num_prefix = 0  # bytes of the prefix that have arrived
        self._num_left = 0  # bytes of the message that are missing

    # From any thread

    def send(self, message: bytes) -> None:
        """Queue a request for sending; it is dropped if the call has ended."""
        if self.transport is not None:
            self.transport.send(self, message)

    def cancel(self) -> None:
        """End the call on both sides. The connection's thread notifies the receiver."""
        if self.transport is not None:
            self.transport.cancel(self)

    def add_request(self, message: bytes) -> None:
        """Add a request to the queue of outgoing data."""
        self._outgoing.append(_framed(message))

    # In the connection's thread

    def begin(self, headers: Mapping[bytes, bytes]) -> CallError | None:
        """Check the initial headers of the answer; return an error if they do not prove knowledge of the token."""
        try:
            confirmation = self._confirm(headers)
        except CallError as error:
            return error
        self._is_proved = True
        if self._waits:
            self._outgoing.appendleft(_framed(confirmation))
            self._waits = False
        return None

    def take_outgoing(self, room: int) -> bytes | None:
        """Return up to ``room`` bytes to send, perhaps none for now, or None once all requests have been sent."""
        if self._waits:
            return b""
        if not self._outgoing and self._requests is not None:
            message = next(self._requests, None)
            if message is None:
                self.has_sent_all = True
                return None
            self.add_request(message)
        if not self._outgoing or room <= 0:
            return b""
        part = bytes(self._outgoing[0][:room])
        self._outgoing[0] = self._outgoing[0][len(part) :]
        if not self._outgoing[0]:
            self._outgoing.popleft()
        return part

    def memory(self) -> memoryview:
        """Return where the next bytes go."""
        if self._num_prefix < _PREFIX.size:
            return memoryview(self._prefix)[self._num_prefix :]
        return self.receiver.memory()[: self._num_left]

    def advance(self, num_bytes: int) -> None:
        """Note that bytes have arrived.

        Raises:
            WireError: The message is compressed or too long. The receiver may raise other errors.
        """
        if self._num_prefix == _PREFIX.size:
            self._num_left -= num_bytes
            self.receiver.advance(num_bytes)
        else:
            self._num_prefix += num_bytes
            if self._num_prefix < _PREFIX.size:
                return
            is_compressed, self._num_left = _PREFIX.unpack(self._prefix)
            if is_compressed:  # "Compressed-Flag" needs a grpc-encoding, and this client offers none
                raise WireError("a compressed message arrived, but compression was not negotiated")
            if self._num_left > MAX_MESSAGE_BYTES:
                raise WireError(f"a message of {self._num_left} bytes arrived; {MAX_MESSAGE_BYTES} are allowed")
            self.receiver.begin(self._num_left)
        if not self._num_left:
            self._num_prefix = 0

    def outcome(self) -> CallError | None:
        """Return the error of a completed call, or None if it succeeded."""
        error = error_in(self.trailers)
        if error is None and not self._is_proved:
            return self.begin({})
        if error is None and self._num_prefix:
            return CallError(CallStatus.INTERNAL, "the answer ends within a message")
        return error


def _framed(message: bytes) -> memoryview:
    return memoryview(_PREFIX.pack(0, len(message)) + message)
