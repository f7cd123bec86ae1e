"""Snapshots: an object as bytes, from which another process rebuilds it."""

from __future__ import annotations

import mmap
import pickle
import struct
from typing import Any

# A snapshot begins with the number of its parts and their sizes. Parts begin at multiples of ALIGNMENT, as NumPy and
# torch read aligned memory faster. The first is the pickle, the others are the memory of arrays and tensors.
NUMBER = struct.Struct("<Q")
ALIGNMENT = 64


def load_object(fd: int) -> Any:
    """Rebuild an object from its snapshot.

    Its arrays and tensors alias the memory of the snapshot, which all processes share until one of them writes to it.

    Args:
        fd: The descriptor of the memory; it may be closed afterwards.

    Raises:
        AttributeError: This process lacks a class or function of the object.
        ImportError: It lacks a module.
    """
    memory = memoryview(mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    (num_parts,) = NUMBER.unpack_from(memory)
    end = NUMBER.size * (num_parts + 1)
    parts = []
    for (size,) in NUMBER.iter_unpack(memory[NUMBER.size : end]):
        start = end + -end % ALIGNMENT
        end = start + size
        parts.append(memory[start:end])
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # only from rank 0 of this job, or the parent
