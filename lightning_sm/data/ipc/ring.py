"""Slots of anonymous shared memory that two processes of one host hand to each other.

The memory is a ``memfd``: it has no name, so that nothing is left behind whichever process is killed, and it is not
bound by the 64 MB that many containers have in ``/dev/shm``. It is sparse: a slot may be declared as large as the
largest batch that is allowed, and takes memory only as far as it was ever written.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from lightning_sm.data.ipc.processes import InheritedDescriptor

_PAGE = mmap.PAGESIZE


class Ring:
    """Equal slots in one shared mapping; who may write to which slot is agreed on elsewhere, by messages.

    Args:
        fd: The memory, from ``Ring.create`` or received from another process. The ring takes it over.
        num_slots: Number of slots.
        slot_bytes: Capacity of a slot; a multiple of the page size.
    """

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(fd, num_slots * slot_bytes, mmap.MAP_SHARED)

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> Ring:
        """Make a new ring.

        Args:
            num_slots: Number of slots.
            slot_bytes: Least capacity of a slot; rounded up to whole pages.
        """
        slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        fd = os.memfd_create("lightning_sm", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_slots * slot_bytes)
        return cls(fd, num_slots, slot_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (InheritedDescriptor(self.fd), self.num_slots, self.slot_bytes)

    def slot(self, index: int) -> np.ndarray:
        """Return a new array over a slot, uint8 of shape (slot_bytes,), page aligned.

        Args:
            index: Number of the slot.
        """
        return np.frombuffer(self._map, np.uint8, self.slot_bytes, index * self.slot_bytes)

    def close(self) -> None:
        """Close the descriptor, which else goes with the ring. The mapping goes with the last array over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close
