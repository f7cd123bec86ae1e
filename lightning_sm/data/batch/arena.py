"""A bump allocator for the slot that a worker fills."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from lightning_sm.errors import BatchTooLargeError

ALIGNMENT = 64


class Arena:
    """A slot of shared memory, allocated from front to back.

    Args:
        buffer: The slot, writable and contiguous.

    Attributes:
        used: Number of allocated bytes. To free memory, set it to an earlier value.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._memory = buffer
        self._address = np.frombuffer(buffer, np.uint8).ctypes.data
        self._capacity = len(buffer)
        self.used = 0

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate memory at the next multiple of 64 bytes, and return it as a uint8 array of shape (nbytes,).

        Raises:
            BatchTooLargeError: The slot has too little room left.
        """
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self._capacity:
            raise BatchTooLargeError(
                f"A batch needs at least {start + nbytes} bytes, but a slot has {self._capacity}. Raise "
                "data_service.max_batch_bytes."
            )
        ctypes.memset(self._address + self.used, 0, start - self.used)  # so that equal batches have equal bytes
        self.used = start + nbytes
        return np.frombuffer(self._memory, np.uint8, nbytes, start) if nbytes else np.empty(0, np.uint8)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset of a memory block in the slot, or None if the block is outside the allocated part."""
        offset = address - self._address
        return offset if 0 <= offset <= self.used - nbytes else None
