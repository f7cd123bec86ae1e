"""Slots of anonymous shared memory that two processes on one host pass to each other.

The memory is a ``memfd``. It has no name, so nothing is left behind if a process is killed, and it is not limited to
the 64 MB that many containers have in ``/dev/shm``. It is sparse: a slot may be as large as the largest allowed batch,
but only the parts that have been written use memory.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from lightning_sm.data.ipc.processes import InheritedDescriptor

_PAGE = mmap.PAGESIZE


class Ring:
    """Slots of equal size in one shared mapping. Processes exchange messages to agree on who may write to which slot.

    Args:
        fd: Descriptor of the memory, from ``Ring.create`` or another process. The ring takes ownership of it.
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
        """Create a ring.

        Args:
            num_slots: Number of slots.
            slot_bytes: Minimum capacity of a slot; rounded up to whole pages.
        """
        slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        fd = os.memfd_create("lightning_sm", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_slots * slot_bytes)
        return cls(fd, num_slots, slot_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (InheritedDescriptor(self.fd), self.num_slots, self.slot_bytes)

    def slot(self, index: int) -> memoryview:
        """Return the page-aligned memory of a slot, ``slot_bytes`` long.

        Args:
            index: Number of the slot.
        """
        return memoryview(self._map)[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def close(self) -> None:
        """Close the descriptor before the ring is deleted. The mapping exists as long as any view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close
