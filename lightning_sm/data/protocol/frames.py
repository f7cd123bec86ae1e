"""Frames, in which requests and batches travel over the stream between a trainer rank and a data host. No gRPC."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from lightning_sm.data.protocol.codec import decode
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.errors import WireError

# A header contains the structure of batches, and their strings.
MAX_HEADER_BYTES = 64 << 20

_FRAME = struct.Struct("<IBxxxQII")
_HEADER = struct.Struct("<Qdd")
_COUNT = struct.Struct("<I")
_BATCH = struct.Struct("<QQI")
FRAME_BYTES = _FRAME.size
MAX_STRUCTURE_BYTES = MAX_HEADER_BYTES - _HEADER.size

# Where bytes go that nobody wants.
_SCRATCH_BYTES = 256 << 10

# A traceback of a million characters, each of which JSON may write as \\u1234.
_MAX_FAILURE_BYTES = 8 << 20


class FrameKind(IntEnum):
    """The kinds of frames."""

    FETCH = 1  # an encoded FetchSpec
    CANCEL = 2  # nothing: the trainer no longer wants the answer
    HEADER = 3  # total bytes, timings, structure of the batches
    DATA = 4  # bytes of the batches; the value is their offset
    FAILURE = 5  # JSON: why there are no batches
    ENDED = 6  # the stream has no such batch; the value is how many it has


def frame(request_id: int, kind: FrameKind, size: int = 0, value: int = 0) -> bytes:
    """Return the head of a frame, which its payload of ``size`` bytes follows; ``value`` depends on the kind."""
    return _FRAME.pack(request_id, kind, value, size, 0)


def frames(message: bytes) -> Iterator[tuple[int, int, int, memoryview]]:
    """Split a message into its frames.

    Yields:
        Request id, kind, value, payload.

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
        """Where the payload goes; None: it is no longer wanted."""

    def end(self, is_complete: bool, /) -> None:
        """Note, once, whether the payload has arrived; if not, nothing more is written to the memory."""


class FrameReader:
    """Frames whose bytes arrive in parts: it says where each part goes.

    Args:
        take: Takes a frame of any kind but DATA: its request, kind, value and payload.
        place: Returns where the payload of a DATA frame goes: of its request, kind and value, with so
            many bytes; None: nowhere.
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
        self._rest = memoryview(self._head)  # where bytes go; empty: nowhere
        self._num_skipped = 0  # bytes of the payload that go nowhere

    def begin(self, num_bytes: int) -> None:
        """Prepare for a message.

        Raises:
            WireError: It ends within the head of a frame.
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
        """Note that so many bytes were written to the start of ``memory``.

        Raises:
            WireError: The message ends within a frame. ``take`` and ``place`` may raise errors, too.
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
        """Give back the memory for a payload of which no more arrives."""
        if self._destination is not None:
            destination, self._destination = self._destination, None
            destination.end(False)

    def _expect_head(self) -> None:
        if 0 < self._num_left < FRAME_BYTES:
            raise WireError(f"A message ends {self._num_left} bytes after the start of the head of a frame.")
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
    """A batch among the bytes of a step range.

    Attributes:
        start: Where its bytes begin.
        num_bytes: How many they are.
        structure: What ``pickle_batch`` returned.
    """

    start: int
    num_bytes: int
    structure: bytes


def pack_batches(batches: Sequence[EncodedBatch]) -> bytes:
    """Encode batches as a table of their places, and their structures.

    All processes on the way pass ``encoded_batches`` on as they are; the training process unpacks them.
    """
    table = [_BATCH.pack(one.start, one.num_bytes, len(one.structure)) for one in batches]
    return b"".join([_COUNT.pack(len(batches)), *table, *(batch.structure for batch in batches)])


def unpack_batches(data: bytes, num_bytes: int) -> list[EncodedBatch]:
    """Restore what ``pack_batches`` packed.

    Args:
        data: The encoded batches.
        num_bytes: Bytes of all batches together.

    Raises:
        WireError: They do not fit into the bytes.
    """
    (num_batches,) = _COUNT.unpack_from(data)
    position = _COUNT.size + num_batches * _BATCH.size
    if len(data) < position:
        raise WireError(f"{num_batches} batches are described in {len(data)} bytes.")
    batches = []
    for start, size, length in _BATCH.iter_unpack(memoryview(data)[_COUNT.size : position]):
        if start + size > num_bytes:
            raise WireError(f"A batch lies at bytes {start} to {start + size} of {num_bytes}.")
        batches.append(EncodedBatch(start, size, data[position : position + length]))
        position += length
    if position != len(data):
        raise WireError(f"The structures of {num_batches} batches have {position} bytes, but {len(data)} arrived.")
    return batches


@dataclass(frozen=True)
class StepRangeHeader:
    """The header of an answer, which precedes the bytes of a step range.

    Attributes:
        num_bytes: Bytes that follow in DATA frames.
        queue_s: Seconds that the request waited for a worker.
        produce_s: Seconds that the worker took.
        encoded_batches: Result of ``pack_batches``.
    """

    num_bytes: int
    queue_s: float
    produce_s: float
    encoded_batches: bytes

    @property
    def num_batches(self) -> int:
        """Number of batches; fewer than requested if a stream ends with them."""
        num_batches: int = _COUNT.unpack_from(self.encoded_batches)[0]
        return num_batches

    def encode(self) -> bytes:
        """Return the payload of a HEADER frame."""
        return _HEADER.pack(self.num_bytes, self.queue_s, self.produce_s) + self.encoded_batches

    @classmethod
    def decode(cls, payload: memoryview) -> StepRangeHeader:
        """Parse the payload of a HEADER frame.

        Raises:
            WireError: It is too short or too long.
        """
        least = _HEADER.size + _COUNT.size
        if not least <= len(payload) <= MAX_HEADER_BYTES:
            raise WireError(
                f"The header of batches has {len(payload)} bytes, not between {least} and {MAX_HEADER_BYTES}."
            )
        num_bytes, queue_s, produce_s = _HEADER.unpack_from(payload)
        return cls(num_bytes, queue_s, produce_s, bytes(payload[_HEADER.size :]))


def parse_failure(payload: memoryview) -> Failure:
    """Parse the payload of a FAILURE frame.

    Raises:
        WireError: It is malformed, or too long.
    """
    what = "failure that a data host reported"
    return decode(Failure, bytes(payload), what, _MAX_FAILURE_BYTES)
