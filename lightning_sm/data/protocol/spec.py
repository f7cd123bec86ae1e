"""Sizes of what trainers and data hosts exchange, and the end of a stream. No torch, no gRPC."""

from __future__ import annotations

import hashlib

from lightning_sm._structs import Struct
from lightning_sm.data.protocol.codec import Natural

# Batches are sent in pieces of this size. Of 0.5 to 4 MiB it was the fastest (benchmarks/wire.py):
# smaller ones cost more switches between threads, larger ones leave the caches.
CHUNK_BYTES = 2 << 20

# A request asks for at most this many batches. One with more would become a hundred times its size in memory.
MAX_RANGE_LENGTH = 256


def snapshot_hash() -> hashlib.blake2b:
    """Return the hash that names the snapshot of a source; update it with all of its bytes."""
    return hashlib.blake2b(digest_size=16)


class StreamEnd(Struct, frozen=True, tag=True):
    """The answer for a stream that has none of the batches that were requested.

    Attributes:
        num_batches: How many it has.
    """

    num_batches: Natural
