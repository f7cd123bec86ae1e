"""RemoteLoader: replaces the user's DataLoader on a trainer."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_sm.data.batch.decode import decode
from lightning_sm.data.ipc.messages import Message
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.plan.samples import num_steps
from lightning_sm.data.protocol.spec import LoaderFacts
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.metrics import LoaderStats
from lightning_sm.data.trainer.passes import LoaderPlace, Position, ShardPasses
from lightning_sm.data.trainer.pinning import PinnedSlots

logger = logging.getLogger(__name__)

# Slots in addition to the window. Hedged requests need some.
_HEDGE_SLOTS = 4
# The training loop may hold the current batch, the previous one until it is garbage, one that Lightning has prefetched,
# and one that is being copied to a GPU.
_HELD_SLOTS = 4


class _SlotArray(np.ndarray):
    """Bytes of a slot. A subclass, because views of it keep this object alive, so that a finalizer sees its end."""


class RemoteLoader:
    """Iterates over the batches of a loader on the data hosts, in a deterministic order.

    Args:
        client: The feeder.
        facts: The data hosts' description of the user's loader.
        place: Where the loader belongs.
        position: Called at the first batch of every pass; returns where the pass starts.
    """

    def __init__(
        self,
        client: FeederClient,
        facts: LoaderFacts,
        place: LoaderPlace,
        position: Callable[[RemoteLoader], Position],
    ) -> None:
        self.facts = facts
        self.place = place
        self.stats = LoaderStats()
        self._client = client
        self._position = position
        self.epoch = 0
        self._ring: tuple[Ring, int] | None = None
        self._held: set[int] = set()  # slots that batches alias; set operations are atomic, also in finalizers
        self._pinned: PinnedSlots | None = None
        self._has_warned = False
        self._sampler_length: tuple[int, int] | None = None  # epoch, number of batches
        self.num_passes = 0
        self._shards = ShardPasses(facts.name, place, self._count_on_host) if facts.order == "shards" else None
        # Lightning reads both, to warn about shuffled validation data and to announce epochs.
        self.sampler = _Shuffled(self) if facts.order == "shuffled" else _Sequential(self)
        self.batch_sampler = None
        self.on_epoch: Callable[[int], None] | None = None
        self.on_batch: Callable[[RemoteLoader], None] | None = None

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and rank; None if the dataset or the batch sampler sets it."""
        return self.facts.batch_size

    @property
    def num_slots(self) -> int:
        """Number of batches that this loader can have in memory."""
        num_copied = _HELD_SLOTS if torch.cuda.is_available() else 0  # batches that a GPU still reads
        return self.place.window_batches + _HEDGE_SLOTS + _HELD_SLOTS + num_copied

    def __len__(self) -> int:
        """Return the number of batches in a pass; it is the same on every rank."""
        facts = self.facts
        if facts.order == "batch_sampler" or (facts.order == "sampler" and facts.num_samples is None):
            # A data host runs the sampler, and keeps its order for the pass that follows.
            if self._sampler_length is None or self._sampler_length[0] != self.epoch:
                self._sampler_length = self.epoch, self._count_on_host()[0]
            return self._sampler_length[1]
        if self._shards is not None and (length := self._shards.length) is not None:
            return length
        if facts.num_samples is None:
            raise TypeError(f"{facts.name} has no length. For a training loader, set data_service.batches_per_epoch.")
        return num_steps(
            facts.num_samples, facts.batch_size, drop_last=facts.drop_last, world_size=self.place.world_size
        )

    def _count_on_host(self) -> tuple[int, int]:
        return self._client.length(self._pass_facts(Position(epoch=max(self.epoch, 0))), self.place.timeout_s)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, from 0; Lightning calls it through ``sampler``."""
        self.epoch = epoch
        if self.on_epoch is not None:
            self.on_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the position is derived from the Trainer's progress.

        Lightning warns about loaders that cannot resume, unless they have this method.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore a state, which may come from a loader in a run without data hosts."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: a copy in another process gives no batches."""
        own = ("_client", "_position", "_ring", "_held", "_pinned", "on_epoch", "on_batch")
        return {name: value for name, value in vars(self).items() if name not in own}

    def inherit(self, other: RemoteLoader | None) -> None:
        """Take over the slots of the loader that this one replaces, if they have the same number and size."""
        if other is None or other.num_slots != self.num_slots:
            return
        if other.place.max_batch_bytes == self.place.max_batch_bytes:
            self._ring = other._ring
            self._pinned = other._pinned
            self._held = other._held

    def __iter__(self) -> Iterator[Any]:
        """Start a pass. The first request to the data hosts follows with the first batch."""
        return _Pass(self)

    def _start_position(self) -> Position:
        position = self._position(self)
        self.num_passes += 1
        return position if self._shards is None else self._shards.begin(position)

    def _start_pass(self, position: Position) -> int:
        _, number = self._shared_ring()
        logger.debug(
            "%s: epoch %d, steps %d to %s", self.facts.name, position.epoch, position.first_step, position.stop_step
        )
        return self._client.start_pass({"ring": number, **self._pass_facts(position)})

    def _pass_facts(self, position: Position) -> dict[str, Any]:
        place = self.place
        facts = self.facts
        return {
            "template": {
                "opening": place.request_name,
                "loader": place.index,
                "seed": place.seed,
                "epoch": position.epoch,
                "pass_index": position.pass_index,
                "rank": place.rank,
                "compression": place.compression,
            },
            "stage": place.stage,
            "order": "sequential" if position.is_sequential and facts.order == "shuffled" else facts.order,
            "num_samples": facts.num_samples,
            "batch_size": facts.batch_size,
            "drop_last": facts.drop_last,
            "rank": place.rank,
            "world_size": place.world_size,
            "num_shards": place.num_shards if facts.order == "shards" else 0,
            "first_step": position.first_step,
            "stop_step": position.stop_step,
            "window_batches": place.window_batches,
            "window_bytes": place.window_bytes,
        }

    def _shared_ring(self) -> tuple[Ring, int]:
        if self._ring is None:
            ring = Ring.create(self.num_slots, self.place.max_batch_bytes)
            number = self._client.add_ring(ring)
            self._ring = ring, number
            ring.close()
            if torch.cuda.is_available():
                self._pinned = PinnedSlots(partial(self._client.release, number))
        return self._ring

    def _batch(self, header: bytes, slot: int, num_bytes: int) -> Any:
        """Build a batch that aliases a slot, or a copy if the training loop holds too many batches."""
        ring, number = self._shared_ring()
        if self._pinned is not None:
            self._pinned.advance()
        array = ring.slot(slot)[:num_bytes]
        if len(self._held) >= _HELD_SLOTS:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: the training loop holds %d batches, the maximum that can stay in shared memory. Further "
                    "batches are copied while it holds so many. Keep only the parts of a batch that you need.",
                    self.facts.name,
                    len(self._held),
                )
            array = array.copy()
            self._client.release(number, slot)
            return decode(header, array)
        owner = array.view(_SlotArray)
        self._held.add(slot)
        if self._pinned is not None:
            self._pinned.lock(slot, array)
        # A function, not a method: a method would keep the loader alive as long as the batch.
        release = partial(self._client.release, number) if self._pinned is None else self._pinned.drop
        weakref.finalize(owner, _release_slot, self._held, release, slot).atexit = False
        return decode(header, owner)


class _Pass(Iterator[Any]):
    """One pass over a loader. It starts with the first batch: before, the Trainer does not know its position."""

    def __init__(self, loader: RemoteLoader) -> None:
        self._loader = loader
        self._client = loader._client
        self._pass_id: int | None = None
        self._is_over = False
        self._finalizer: Any = None
        self._returned_at: float | None = None

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        called_at = time.perf_counter()
        if self._pass_id is None:
            self._start(self._loader._start_position())
        try:
            message = self._next_message()
        except BaseException:
            self.close()
            raise
        if message is None:
            self.close()
            raise StopIteration
        facts = message.facts
        batch = self._loader._batch(message.payload, facts["slot"], facts["num_bytes"])
        self._client.take(facts["pass_id"], facts["step"] + 1)
        wait_s = time.perf_counter() - called_at
        busy_s = None if self._returned_at is None else called_at - self._returned_at
        self._loader.stats.count(facts, wait_s, busy_s)
        if self._loader.on_batch is not None:
            self._loader.on_batch(self._loader)
        self._returned_at = time.perf_counter()
        return batch

    def _start(self, position: Position) -> None:
        self._position = position
        self._pass_id = self._loader._start_pass(position)
        self._finalizer = weakref.finalize(self, _close_pass, self._client, self._pass_id)
        self._finalizer.atexit = False

    def _next_message(self) -> Message | None:
        """Wait for the next batch; return None at the end of the pass."""
        while True:
            message = self._client.next(self._pass_id or 0, self._loader.place.timeout_s)
            if message.kind != "end":
                return message
            shards = self._loader._shards
            num_batches = message.facts["num_batches"]
            position = None if shards is None or num_batches is None else shards.after(self._position, num_batches)
            if position is None:
                return None
            self._finalizer()
            self._start(position)

    def close(self) -> None:
        """End the pass, and cancel its requests in flight."""
        self._is_over = True
        if self._finalizer is not None:
            self._finalizer()


def _release_slot(held: set[int], release: Callable[[int], None], slot: int) -> None:
    held.discard(slot)
    release(slot)


def _close_pass(client: FeederClient, pass_id: int) -> None:
    for message in client.close_pass(pass_id):
        client.release(message.facts["ring"], message.facts["slot"])


class _Announced:
    """Passes the epoch that Lightning announces to a sampler on to the loader."""

    _loader: RemoteLoader

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


class _Sequential(_Announced, SequentialSampler):
    def __init__(self, loader: RemoteLoader) -> None:
        super().__init__(range(loader.facts.num_samples or 0))
        self._loader = loader


class _Shuffled(_Announced, RandomSampler):
    def __init__(self, loader: RemoteLoader) -> None:
        super().__init__(range(loader.facts.num_samples or 1))
        self._loader = loader
