"""Page-locked slots, from which copies to a GPU run while the training goes on."""

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
    """Page-locks slots of a ring, and gives them back only when no copy reads them any more.

    ``.to(device, non_blocking=True)`` returns before the copy is done. PyTorch's own page-locked memory waits for it
    by itself; for memory that was registered, this does: slots that were dropped are given back after an event that
    was recorded behind the copies.

    Args:
        release: Gives a slot back.
        cuda: ``torch.cuda``, or what stands in for it in tests.
    """

    def __init__(self, release: Callable[[int], None], cuda: Any = torch.cuda) -> None:
        self._release = release
        self._cuda = cuda
        self._locked: dict[int, int] = {}
        self._dropped: deque[int] = deque()
        self._copying: deque[tuple[Any, list[int]]] = deque()
        self._is_refused = False

    def lock(self, slot: int, array: np.ndarray) -> None:
        """Page-lock a slot as far as a batch reaches; where the system refuses, copies are merely slower.

        Args:
            slot: Number of the slot.
            array: Its bytes.
        """
        size = -(-array.nbytes // _PAGE) * _PAGE
        if self._is_refused or size <= self._locked.get(slot, 0):
            return
        runtime, address = self._cuda.cudart(), array.ctypes.data
        if slot in self._locked:
            runtime.cudaHostUnregister(address)
        status = int(runtime.cudaHostRegister(address, size, 0))
        if status:
            self._is_refused = True
            logger.warning("CUDA refused to page-lock a batch (error %d): copies to the GPU will be slower.", status)
            return
        self._locked[slot] = size

    def drop(self, slot: int) -> None:
        """Note that nothing aliases a slot any more; called from finalizers, in any thread.

        Args:
            slot: Number of the slot.
        """
        self._dropped.append(slot)

    def advance(self) -> None:
        """Give back the slots whose copies are done; called by the training thread, for every batch."""
        slots = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if slots:
            event = self._cuda.Event()
            event.record()
            self._copying.append((event, slots))
        while self._copying and self._copying[0][0].query():
            for slot in self._copying.popleft()[1]:
                self._release(slot)
