"""Frames, in which requests and batches travel over the stream between a trainer rank and a data host. No gRPC."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.from_json import from_json, parse_json
from lightning_sm.errors import WireError

# A header contains the structure of batches, and their strings.
MAX_HEADER_BYTES = 64 << 20

_FRAME = struct.Struct("<IBxxxQII")
_HEADER = struct.Struct("<QddI")
_COUNT = struct.Struct("<I")
_BATCH = struct.Struct("<QQI")
FRAME_BYTES = _FRAME.size
MAX_STRUCTURE_BYTES = MAX_HEADER_BYTES - _HEADER.size

# A traceback of a million characters, each of which JSON may write as \\u1234.
_MAX_FAILURE_BYTES = 8 << 20


class FrameKind(IntEnum):
    """The kinds of frames."""

    FETCH = 1  # an encoded StepRangeSpec
    CANCEL = 2  # nothing: the trainer no longer wants the answer
    HEADER = 3  # total bytes, timings, structure of the batches
    DATA = 4  # bytes of the batches; the value is their offset
    FAILURE = 5  # JSON: why there are no batches
    COMPRESSED = 6  # the same as DATA, but compressed
    ENDED = 7  # the virtual shard has no such batch; the value is how many it has, and 1 more; 0 if that is unknown


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


class EncodedBatch(NamedTuple):
    """The place of a batch among the bytes of a step range, and its structure: the header from ``encode``."""

    start: int
    num_bytes: int
    structure: bytes


def pack_batches(batches: Sequence[EncodedBatch]) -> bytes:
    """Encode batches as a table of their places, and their structures.

    All processes on the way pass ``encoded_batches`` on as they are; the training process unpacks them.
    """
    table = [_BATCH.pack(batch.start, batch.num_bytes, len(batch.structure)) for batch in batches]
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
        num_bytes: Bytes that follow in DATA or, before their compression, in COMPRESSED frames.
        queue_s: Seconds that the request waited for a worker.
        produce_s: Seconds that the worker took.
        encoded_batches: Result of ``pack_batches``.
        worker: Number of the worker on its data host.
    """

    num_bytes: int
    queue_s: float
    produce_s: float
    encoded_batches: bytes
    worker: int = 0

    @property
    def num_batches(self) -> int:
        """Number of batches; fewer than requested if a virtual shard ends with them."""
        num_batches: int = _COUNT.unpack_from(self.encoded_batches)[0]
        return num_batches

    def encode(self) -> bytes:
        """Return the payload of a HEADER frame."""
        return _HEADER.pack(self.num_bytes, self.queue_s, self.produce_s, self.worker) + self.encoded_batches

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
        num_bytes, queue_s, produce_s, worker = _HEADER.unpack_from(payload)
        return cls(num_bytes, queue_s, produce_s, bytes(payload[_HEADER.size :]), worker)


def parse_failure(payload: memoryview) -> Failure:
    """Parse the payload of a FAILURE frame.

    Raises:
        WireError: It is malformed, or too long.
    """
    what = "failure that a data host reported"
    return from_json(Failure, parse_json(bytes(payload), what, _MAX_FAILURE_BYTES), what)
