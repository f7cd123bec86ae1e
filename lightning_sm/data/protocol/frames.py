"""The frames that carry requests and batches on the stream between a trainer rank and a data host. No gRPC."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from lightning_sm._structs import Natural, Real
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.message_codec import decode, decode_bounded
from lightning_sm.data.protocol.spec import MAX_RANGE_LENGTH
from lightning_sm.errors import WireError

_FRAME = struct.Struct("<IBxxxQII")
FRAME_BYTES = _FRAME.size

# Unwanted bytes are read in chunks of this size and discarded.
_SCRATCH_BYTES = 256 << 10


class FrameKind(IntEnum):
    """The kinds of frames."""

    FETCH = 1  # an encoded FetchSpec
    CANCEL = 2  # empty: the trainer no longer wants the answer
    HEADER = 3  # total bytes, timings, structure of the batches
    DATA = 4  # bytes of the batches; the value is their offset
    FAILURE = 5  # JSON: why there are no batches
    ENDED = 6  # the stream has no such batch; the value is its number of batches


def frame(request_id: int, kind: FrameKind, size: int = 0, value: int = 0) -> bytes:
    """Return the head of a frame with a payload of ``size`` bytes; the meaning of ``value`` depends on the kind."""
    return _FRAME.pack(request_id, kind, value, size, 0)


def frames(message: bytes) -> Iterator[tuple[int, int, int, memoryview]]:
    """Split a message into its frames.

    Yields:
        The request id, kind, value and payload of each frame.

    Raises:
        WireError: The message ends inside a frame.
    """
    view = memoryview(message)
    position = 0
    while position < len(view):
        if len(view) - position < FRAME_BYTES:
            raise WireError(f"A message of {len(view)} bytes ends inside the head of a frame.")
        request_id, kind, value, size, _ = _FRAME.unpack_from(view, position)
        position += FRAME_BYTES
        if size > len(view) - position:
            raise WireError(f"A frame of {size} bytes ends after {len(view) - position} bytes.")
        yield request_id, kind, value, view[position : position + size]
        position += size


class Destination(Protocol):
    """The memory for a frame's payload."""

    @property
    def memory(self) -> memoryview | None:
        """Where the payload goes; None if it is no longer wanted."""

    def end(self, is_complete: bool, /) -> None:
        """Note whether the payload arrived in full; called once, after the last write to the memory."""


class FrameReader:
    """A parser for frames that arrive in parts, which chooses the memory to receive each part into.

    Args:
        take: Called with the request id, kind, value and payload of each frame that is not DATA.
        place: Called with the request id, kind, value and size of each DATA frame; returns where the payload goes, or
            None to discard it.
    """

    def __init__(
        self,
        take: Callable[[int, int, int, memoryview], None],
        place: Callable[[int, int, int, int], Destination | None],
    ) -> None:
        self._take = take
        self._place = place
        self._num_left = 0  # bytes of the message that have not arrived
        self._head = bytearray(FRAME_BYTES)
        self._is_head = True
        self._fields = (0, 0, 0)  # request, kind, value
        self._payload = memoryview(b"")
        self._destination: Destination | None = None
        self._rest = memoryview(self._head)  # where the next bytes go
        self._num_skipped = 0  # remaining bytes of the payload to discard

    def begin(self, num_bytes: int) -> None:
        """Prepare for a message.

        Raises:
            WireError: The message ends inside the head of a frame.
        """
        self._num_left = num_bytes
        self._expect_head()

    def memory(self) -> memoryview:
        """Return where the next bytes of the message go."""
        if self._destination is not None and self._destination.memory is None:
            self._num_skipped = len(self._rest)
            self.close()
        return memoryview(bytearray(min(self._num_skipped, _SCRATCH_BYTES))) if self._num_skipped else self._rest

    def advance(self, num_bytes: int) -> None:
        """Note that ``num_bytes`` were written to the start of ``memory``.

        Raises:
            WireError: The message ends inside a frame. ``take`` and ``place`` may raise other errors.
        """
        self._num_left -= num_bytes
        if self._num_skipped:
            self._num_skipped -= num_bytes
            if not self._num_skipped:
                self._expect_head()
            return
        self._rest = self._rest[num_bytes:]
        if self._rest:
            return
        if self._is_head:
            self._begin_payload()
        else:
            self._end_payload()

    def close(self) -> None:
        """Release the memory of an incomplete payload."""
        if self._destination is not None:
            destination, self._destination = self._destination, None
            destination.end(False)

    def _expect_head(self) -> None:
        if 0 < self._num_left < FRAME_BYTES:
            raise WireError(f"A message ends {self._num_left} bytes into the head of a frame.")
        self._is_head = True
        self._rest = memoryview(self._head)

    def _begin_payload(self) -> None:
        request_id, kind, value, size, _ = _FRAME.unpack(self._head)
        if size > self._num_left:
            raise WireError(f"A frame of {size} bytes ends after {self._num_left} bytes.")
        self._is_head = False
        self._fields = request_id, kind, value
        if kind == FrameKind.DATA:
            self._destination = self._place(*self._fields, size)
            place = None if self._destination is None else self._destination.memory
            if place is None:
                self.close()
                self._num_skipped = size
                if not size:
                    self._expect_head()
                return
            self._rest = place
        else:
            self._payload = memoryview(bytearray(size))
            self._rest = self._payload
        if not size:
            self._end_payload()

    def _end_payload(self) -> None:
        if self._destination is not None:
            destination, self._destination = self._destination, None
            destination.end(True)
        else:
            self._take(*self._fields, self._payload)
        self._expect_head()


class EncodedBatch(NamedTuple):
    """The place and structure of a batch within the bytes of a step range.

    Attributes:
        start: Offset of its first byte.
        num_bytes: Size of the batch.
        structure: The result of ``pickle_batch``.
    """

    start: Natural
    num_bytes: Natural
    structure: bytes


class StepRangeHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The header of a step range, with which a worker answers, and which precedes the bytes of the range.

    Attributes:
        num_bytes: Number of bytes in the worker's slot, and in the DATA frames that follow.
        queue_s: Seconds that the request waited for a worker; 0 from the worker itself.
        produce_s: Seconds that the worker took.
        batches: The batches; fewer than requested if the stream ends with them.
    """

    num_bytes: Natural
    queue_s: Real
    produce_s: Real
    batches: Annotated[list[EncodedBatch], Meta(min_length=1, max_length=MAX_RANGE_LENGTH)]

    def encode(self) -> bytes:
        """Return the payload of a HEADER frame."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: memoryview) -> StepRangeHeader:
        """Parse the payload of a HEADER frame.

        Raises:
            WireError: The header is malformed, or a batch extends past the end of the bytes.
        """
        header = decode_bounded(msgspec.msgpack.Decoder, cls, payload, "header of batches")
        stop = max(batch.start + batch.num_bytes for batch in header.batches)
        if stop > header.num_bytes:
            raise WireError(f"A batch ends at byte {stop}, but its range has only {header.num_bytes} bytes.")
        return header


def parse_failure(payload: memoryview) -> Failure:
    """Parse the payload of a FAILURE frame.

    Raises:
        WireError: The payload is malformed or too long.
    """
    return decode(Failure, bytes(payload), "failure that a data host reported")
