"""Sizes of the messages between trainers and data hosts, and the end of a stream. No torch, no gRPC."""

from __future__ import annotations

import hashlib

from lightning_sm._structs import Natural, Struct

# Batches are sent in pieces of this size, the fastest between 0.5 and 4 MiB (benchmarks/wire.py): smaller pieces cost
# more thread switches, and larger ones do not fit into the caches.
CHUNK_BYTES = 2 << 20

# Maximum number of batches per request. A longer request could grow a hundredfold in memory.
MAX_RANGE_LENGTH = 256


def snapshot_hash() -> hashlib.blake2b:
    """Return a new hash object for the digest that names a source's snapshot; update it with all bytes."""
    return hashlib.blake2b(digest_size=16)


class StreamEnd(Struct, frozen=True, tag=True):
    """The answer if a stream ends before the first requested batch.

    Attributes:
        num_batches: Number of batches in the stream.
    """

    num_batches: Natural
