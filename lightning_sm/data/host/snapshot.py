"""Snapshots: objects serialized to bytes, from which other processes rebuild them."""

from __future__ import annotations

import mmap
import pickle
import struct
from typing import Any

from lightning_sm.errors import DataSettingsError

# A snapshot begins with the number of its parts and their sizes. Parts begin at multiples of ALIGNMENT, because NumPy
# and torch read aligned memory faster. The first part is the pickle; the others are the memory of arrays and tensors.
NUMBER = struct.Struct("<Q")
ALIGNMENT = 64


def load_from_trainers(fd: int, what: str) -> Any:
    """Rebuild an object that trainers have sent.

    Args:
        fd: Descriptor of the snapshot's memory; the caller may close it afterwards.
        what: Description of the object, for error messages.

    Raises:
        DataSettingsError: This process lacks a module, class or function that the object needs.
    """
    try:
        # The object's arrays and tensors alias the memory, which all processes share until one of them writes to it.
        parts = parts_in(memoryview(mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)))
        return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # only from trainers that know the token
    except (AttributeError, ImportError) as error:
        raise DataSettingsError(
            f"This data host cannot rebuild {what}: {error}. Data hosts run the script up to its first fit() (or "
            "SageMakerCLI): define classes and functions, and import modules, before that line, and not only on "
            "trainers. Data hosts also need the same packages."
        ) from error


def parts_in(memory: memoryview) -> list[memoryview]:
    """Return the parts of a snapshot: its pickle, then the memory of arrays and tensors.

    Args:
        memory: The snapshot.
    """
    (num_parts,) = NUMBER.unpack_from(memory)
    end = NUMBER.size * (num_parts + 1)
    parts = []
    for (size,) in NUMBER.iter_unpack(memory[NUMBER.size : end]):
        start = end + -end % ALIGNMENT
        end = start + size
        parts.append(memory[start:end])
    return parts
