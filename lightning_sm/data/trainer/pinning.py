"""Page-locked slots, which a GPU copies asynchronously."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

_PAGE = 4096


class PinnedSlots:
    """Page-locks slots of a ring, and releases them after the copies that read them.

    ``.to(device, non_blocking=True)`` returns before the copy is complete. PyTorch tracks such copies for its own
    page-locked memory, but not for memory that is registered: here, a dropped slot is released after an event that is
    recorded after the copies.

    Args:
        release: Releases a slot.
        cuda: ``torch.cuda``, or a stand-in for tests.
    """

    def __init__(self, release: Callable[[int], None], cuda: Any = torch.cuda) -> None:
        self._release = release
        self._cuda = cuda
        self._locked: dict[int, int] = {}
        self._dropped: deque[int] = deque()
        self._copying: deque[tuple[Any, list[int]]] = deque()
        self._is_refused = False

    def lock(self, slot: int, array: np.ndarray) -> None:
        """Page-lock the bytes of a batch in a slot. If the system refuses, copies are slower.

        Args:
            slot: Index of the slot.
            array: The bytes of the batch.
        """
        size = -(-array.nbytes // _PAGE) * _PAGE
        if self._is_refused or size <= self._locked.get(slot, 0):
            return
        runtime = self._cuda.cudart()
        address = array.ctypes.data
        if slot in self._locked:
            runtime.cudaHostUnregister(address)
        status = int(runtime.cudaHostRegister(address, size, 0))
        if status:
            self._is_refused = True
            logger.warning("CUDA refused to page-lock a batch (error %d): copies to the GPU will be slower.", status)
            return
        self._locked[slot] = size

    def drop(self, slot: int) -> None:
        """Mark a slot as unused by the training loop; called from finalizers, in any thread."""
        self._dropped.append(slot)

    def advance(self) -> None:
        """Release the slots whose copies are complete; the training thread calls it for every batch."""
        slots = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if slots:
            event = self._cuda.Event()
            event.record()
            self._copying.append((event, slots))
        while self._copying and self._copying[0][0].query():
            for slot in self._copying.popleft()[1]:
                self._release(slot)
