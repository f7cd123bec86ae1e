"""Frames, in which requests and batches travel over the stream between a trainer rank and a data host. No gRPC."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from enum import IntEnum

from lightning_sm.errors import WireError

# A header contains the structure of a batch, and its strings.
MAX_HEADER_BYTES = 64 << 20

_FRAME = struct.Struct("<IBxxxQII")
_BATCH = struct.Struct("<Qdd")
FRAME_BYTES = _FRAME.size
MAX_STRUCTURE_BYTES = MAX_HEADER_BYTES - _BATCH.size

# A traceback of a million characters, each of which JSON may write as \\u1234.
_MAX_FAILURE_BYTES = 8 << 20


class FrameKind(IntEnum):
    """What a frame contains."""

    FETCH = 1  # an encoded BatchSpec
    CANCEL = 2  # nothing: the trainer no longer wants the answer
    HEADER = 3  # total bytes, timings, structure of the batch
    DATA = 4  # bytes of the batch; the value is their offset
    FAILURE = 5  # JSON: why there is no batch
    COMPRESSED = 6  # the same as DATA, but compressed


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


def batch_head(num_bytes: int, queue_s: float, produce_s: float) -> bytes:
    """Return what precedes the structure in a HEADER frame.

    Args:
        num_bytes: Bytes that follow in DATA or, before their compression, in COMPRESSED frames.
        queue_s: Seconds that the request waited for a worker.
        produce_s: Seconds that the worker took.
    """
    return _BATCH.pack(num_bytes, queue_s, produce_s)


def parse_header(payload: memoryview) -> tuple[int, float, float, bytes]:
    """Parse the payload of a HEADER frame.

    Raises:
        WireError: It is too short or too long.

    Returns:
        Bytes of data, queue seconds, produce seconds, structure.
    """
    if not _BATCH.size <= len(payload) <= MAX_HEADER_BYTES:
        raise WireError(
            f"The header of a batch has {len(payload)} bytes, not between {_BATCH.size} and {MAX_HEADER_BYTES}."
        )
    num_bytes, queue_s, produce_s = _BATCH.unpack_from(payload)
    return num_bytes, queue_s, produce_s, bytes(payload[_BATCH.size :])


def parse_failure(payload: memoryview) -> dict[str, str]:
    """Parse the payload of a FAILURE frame.

    Raises:
        WireError: It is malformed, or too long.

    Returns:
        "error", the name of the error; "text"; and "where", the user's function that failed, or "".
    """
    if len(payload) > _MAX_FAILURE_BYTES:
        raise WireError(f"A data host reported a failure in {len(payload)} bytes; {_MAX_FAILURE_BYTES} are allowed.")
    try:
        facts = json.loads(bytes(payload))
        return {name: str(facts[name]) for name in ("error", "text", "where")}
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(f"A data host reported a failure in a malformed frame: {error!r}.") from error
