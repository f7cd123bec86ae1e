"""Page-locked slots, from which GPUs copy asynchronously."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

logger = logging.getLogger(__name__)

_PAGE = 4096
# Maximum number of dropped slots with incomplete copies. Beyond it, a training loop that runs ahead of its GPU must
# wait: CUDA queues about a thousand kernels, but the ring has far fewer slots.
MAX_COPYING = 4


class PinnedSlots:
    """The page-locked slots of a ring, released once the copies that read them are complete.

    ``.to(device, non_blocking=True)`` returns before the copy is complete. PyTorch tracks such copies for page-locked
    memory that it allocated, but not for registered memory. Once a slot is dropped, this class therefore records an
    event on the current stream of each GPU in use, and releases the slot after these events. They do not cover copies
    on other streams, so this class must not be used if the user's code copies batches.

    Args:
        release: Releases a slot.
        cuda: The CUDA functions to use, or a stand-in for tests.
    """

    def __init__(self, release: Callable[[int], None], cuda: CUDA | None = None) -> None:
        self._release = release
        self._cuda = cuda or CUDA()
        self._locked: dict[int, tuple[int, int]] = {}  # slot to address and bytes
        self._dropped: deque[int] = deque()
        self._copying: deque[_Copy] = deque()
        self._is_refused = False

    def lock(self, slot: int, array: np.ndarray) -> None:
        """Page-lock the bytes of a batch in a slot; if CUDA refuses, copies are slower.

        Args:
            slot: Index of the slot.
            array: The bytes of the batch.
        """
        address = array.ctypes.data
        size = -(-array.nbytes // _PAGE) * _PAGE
        locked = self._locked.get(slot)
        if self._is_refused or (locked is not None and size <= locked[1]):
            return
        if locked is not None:
            self._cuda.unregister(address)
            del self._locked[slot]
        status = self._cuda.register(address, size)
        if status:
            self._is_refused = True
            logger.warning("CUDA refused to page-lock a batch (error %d): copies to the GPU will be slower.", status)
            return
        self._locked[slot] = (address, size)

    def drop(self, slot: int) -> None:
        """Mark a slot as unused by the training loop; called from finalizers, in any thread."""
        self._dropped.append(slot)

    def advance(self) -> bool:
        """Release the slots whose copies are complete, and return whether others remain.

        The training thread calls this before every batch, and repeatedly while it waits for one, since a batch cannot
        arrive without a free slot.
        """
        while self._dropped:
            self._copying.append(_Copy(self._dropped.popleft(), self._cuda.record_events()))
        while self._copying and all(event.query() for event in self._copying[0].events):
            self._release(self._copying.popleft().slot)
        return bool(self._copying)

    def wait(self, most: int = MAX_COPYING) -> None:
        """Wait until at most this many dropped slots have incomplete copies."""
        while self.advance() and len(self._copying) > most:
            for event in self._copying[0].events:
                event.synchronize()

    def close(self) -> None:
        """Wait until no GPU reads the slots, and unlock them all."""
        self._is_refused = True
        try:
            self.wait(0)
        except RuntimeError as error:  # a kernel failed earlier, which makes every call fail; the user sees that error
            logger.warning("CUDA had failed before page-locked memory was released: %s", error)
            return
        for address, _ in self._locked.values():
            self._cuda.unregister(address)
        self._locked.clear()


class _Copy(NamedTuple):
    """A dropped slot, and the events after which no copy reads it."""

    slot: int
    events: list[Any]


class CUDA:
    """The part of CUDA that ``PinnedSlots`` uses."""

    def register(self, address: int, size: int) -> int:
        """Page-lock memory, and return CUDA's error code."""
        return int(self._runtime().cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        self._runtime().cudaHostUnregister(address)

    def record_events(self) -> list[Any]:
        """Record an event on the current stream of every GPU that this process has used."""
        # Skip other GPUs: recording an event would create a context there, which takes hundreds of megabytes.
        has_context: Callable[[int], bool] = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        used = filter(has_context, range(torch.cuda.device_count()))
        return [torch.cuda.current_stream(device).record_event() for device in used]

    @staticmethod
    def _runtime() -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]
