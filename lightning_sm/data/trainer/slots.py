"""The slots in shared memory that a training process's batches alias, and their release."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from lightning_sm.data.batch.serialization import unpickle_batch
from lightning_sm.data.ipc.feeder_messages import DeliveredRange
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.trainer.feeder_client import FeederClient

logger = logging.getLogger(__name__)

# Slots in addition to the window, for hedged requests.
_HEDGE_SLOTS = 4
# The training loop may hold the current batch, the previous one until it is collected, and one that Lightning has
# prefetched. Allow for one more.
_HELD_SLOTS = 4


class _SlotArray(np.ndarray):
    """The bytes of a slot. Unlike a plain array, it is kept alive by its views, so its finalizer runs after them."""


class SlotPool:
    """The rings of a connection, one for each pass that is open at the same time; later passes reuse them.

    Args:
        client: The feeder, which fills the slots.
        max_batch_bytes: Capacity of a slot.
    """

    def __init__(self, client: FeederClient, max_batch_bytes: int) -> None:
        self._client = client
        self._max_batch_bytes = max_batch_bytes
        # By number of slots. Finalizers append to the lists, so use only atomic operations: append, pop.
        self._unused: defaultdict[int, list[SlotRing]] = defaultdict(list)

    def take(self, name: str, window_batches: int) -> SlotRing:
        """Return a ring that no other open pass uses.

        Args:
            name: Name of the loader, for messages.
            window_batches: Maximum number of requests in flight or buffered.
        """
        num_slots = window_batches + _HEDGE_SLOTS + _HELD_SLOTS
        try:
            ring = self._unused[num_slots].pop()
        except IndexError:
            ring = SlotRing(self._client, num_slots, self._max_batch_bytes)
        ring.name = name
        return ring

    def give_back(self, ring: SlotRing) -> None:
        """Reclaim the ring of a finished pass; may be called from a finalizer, in any thread."""
        self._unused[ring.num_slots].append(ring)


class SlotRing:
    """One ring, and the batches in it that the training process holds.

    Args:
        client: The feeder, which fills the slots.
        num_slots: Number of slots.
        max_batch_bytes: Capacity of a slot.

    Attributes:
        num_slots: Number of slots.
        name: Name of the loader that uses the ring.
    """

    def __init__(self, client: FeederClient, num_slots: int, max_batch_bytes: int) -> None:
        self.num_slots = num_slots
        self.name = ""
        self._ring = Ring.create(num_slots, max_batch_bytes)
        self.number = client.add_ring(self._ring)
        self._ring.close()
        self._release: Callable[[int], None] = partial(client.release, self.number)
        self._held: set[int] = set()  # slots that batches alias; finalizers rely on atomic set operations
        self._has_warned = False

    def batches(self, delivery: DeliveredRange) -> Iterator[Any]:
        """Yield batches that alias a slot, or a copy of it if the training loop holds too many slots."""
        memory = self._memory(delivery.slot, delivery.num_bytes)
        batches = delivery.batches
        return (unpickle_batch(item.structure, memory[item.start : item.start + item.num_bytes]) for item in batches)

    def _memory(self, slot: int, num_bytes: int) -> np.ndarray:
        array = np.frombuffer(self._ring.slot(slot)[:num_bytes], np.uint8)
        if len(self._held) >= _HELD_SLOTS:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: the training loop holds the batches of %d requests, the maximum that can stay in shared "
                    "memory. Further batches are copied while it holds that many. Keep only the parts of a batch that "
                    "you need.",
                    self.name,
                    len(self._held),
                )
            array = array.copy()
            self._release(slot)
            return array
        owner = array.view(_SlotArray)
        self._held.add(slot)
        # Not a method of this object, which would keep the object alive as long as the batches.
        weakref.finalize(owner, _release_slot, self._held, self._release, slot).atexit = False
        return owner


def _release_slot(held: set[int], release: Callable[[int], None], slot: int) -> None:
    held.discard(slot)
    release(slot)
