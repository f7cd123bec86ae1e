"""RemoteLoader: what a trainer iterates over in place of the user's DataLoader."""

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

# Besides the window: a hedge or two under way, and what the training loop may keep: the batch it works on, the one
# before until it is garbage, one that Lightning fetched ahead, and one on its way to a GPU.
_HEDGE_SLOTS, _HELD_SLOTS = 4, 4


class _SlotArray(np.ndarray):
    """Bytes of a slot. A subclass, so that views keep this very object alive and its end can be noticed."""


class RemoteLoader:
    """Batches that data hosts make, in the order of the plan.

    Args:
        client: The feeder.
        facts: What the data hosts say of the user's loader.
        place: Where it belongs.
        position: Asked at the first batch of every pass.
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
        self._ask_position = position
        self.epoch = 0
        self._ring: tuple[Ring, int] | None = None
        self._held: set[int] = set()  # slots that a batch aliases; set operations are atomic, also for finalizers
        self._pinned: PinnedSlots | None = None
        self._has_warned = False
        self._length: tuple[int, int] | None = None
        self.num_passes = 0
        self._shards = ShardPasses(facts.name, place, self._counted) if facts.order == "shards" else None
        # Lightning looks at both, to warn of shuffled validation data and to announce epochs.
        self.sampler = _Shuffled(self) if facts.order == "shuffled" else _Sequential(self)
        self.batch_sampler = None
        self.on_epoch: Callable[[int], None] | None = None
        self.on_batch: Callable[[RemoteLoader], None] | None = None

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and rank; None if the dataset or the batch sampler decides."""
        return self.facts.batch_size

    @property
    def num_slots(self) -> int:
        """Batches that this loader can have in memory."""
        copying = _HELD_SLOTS if torch.cuda.is_available() else 0  # while a GPU reads them
        return self.place.window_batches + _HEDGE_SLOTS + _HELD_SLOTS + copying

    def __len__(self) -> int:
        """Return the number of batches in a pass, on every rank."""
        facts = self.facts
        if facts.order == "batch_sampler" or (facts.order == "sampler" and facts.num_samples is None):
            return self._listed_length()
        if self._shards is not None and (length := self._shards.length) is not None:
            return length
        if facts.num_samples is None:
            raise TypeError(f"{facts.name} has no length; data_service.batches_per_epoch gives a training loader one.")
        return num_steps(
            facts.num_samples, facts.batch_size or 1, drop_last=facts.drop_last, world_size=self.place.world_size
        )

    def _listed_length(self) -> int:
        """The data hosts run the sampler; the pass that follows finds its list ready."""
        if self._length is None or self._length[0] != self.epoch:
            facts = self._pass_facts(Position(epoch=max(self.epoch, 0)))
            self._length = self.epoch, self._client.length(facts, self.place.timeout_s)[0]
        return self._length[1]

    def _counted(self) -> tuple[int, int]:
        return self._client.length(self._pass_facts(Position(epoch=max(self.epoch, 0))), self.place.timeout_s)

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch of the next pass; Lightning calls it through ``sampler``.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self.epoch = epoch
        if self.on_epoch is not None:
            self.on_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing that is needed: the position comes from the Trainer's progress, which is never dropped.

        Lightning warns of loaders that cannot resume; by this method it sees that this one can.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing: it is the state of a loader of a run without data hosts, if there is one.

        Args:
            state_dict: The state.
        """

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: a copy, in a Trainer for another process, gives no batches."""
        own = ("_client", "_ask_position", "_ring", "_held", "_pinned", "on_epoch", "on_batch")
        return {name: value for name, value in vars(self).items() if name not in own}

    def inherit(self, other: RemoteLoader | None) -> None:
        """Go on with the slots of a loader in whose place this one comes.

        Args:
            other: The loader, of the same feeder.
        """
        if other is not None and (other.num_slots, other.place.max_batch_bytes) == (
            self.num_slots,
            self.place.max_batch_bytes,
        ):
            self._ring, self._pinned, self._held = other._ring, other._pinned, other._held

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass; nothing is asked of the data hosts before the first batch is."""
        return _Pass(self)

    def _position(self) -> Position:
        """Where the pass begins."""
        position = self._ask_position(self)
        self.num_passes += 1
        return position if self._shards is None else self._shards.begin(position)

    def _after(self, position: Position, num_batches: int | None) -> Position | None:
        """Where the pass goes on after an end; None if it is over."""
        if self._shards is None or num_batches is None:
            return None
        return self._shards.after(position, num_batches)

    def _begin(self, position: Position) -> tuple[int, int]:
        _, number = self._shared_ring()
        logger.debug(
            "%s: epoch %d, steps %d to %s", self.facts.name, position.epoch, position.first_step, position.stop_step
        )
        return number, self._client.start_pass({"ring": number, **self._pass_facts(position)})

    def _pass_facts(self, position: Position) -> dict[str, Any]:
        place, facts = self.place, self.facts
        return {
            "template": {
                "opening": place.opening,
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
        """Map a slot as a batch; when too many batches are kept, copy this one out."""
        ring, number = self._shared_ring()
        if self._pinned is not None:
            self._pinned.advance()
        array = ring.slot(slot)[:num_bytes]
        if len(self._held) >= _HELD_SLOTS:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%d batches of %s are kept, more than the %d that may stay in shared memory: from now on batches "
                    "are copied while so many are kept. Keep what you need of a batch, not the batch.",
                    len(self._held),
                    self.facts.name,
                    _HELD_SLOTS,
                )
            array = array.copy()
            self._client.release(number, slot)
            return decode(header, array)
        owner = array.view(_SlotArray)
        self._held.add(slot)
        if self._pinned is not None:
            self._pinned.lock(slot, array)
        # No method: the loader would live as long as the batch, and the batch as long as what the loader refers to.
        give_back = partial(self._client.release, number) if self._pinned is None else self._pinned.drop
        weakref.finalize(owner, _give_back, self._held, give_back, slot).atexit = False
        return decode(header, owner)


class _Pass(Iterator[Any]):
    """One pass over a loader. It begins with the first batch: only then the trainer knows where it stands."""

    def __init__(self, loader: RemoteLoader) -> None:
        self._loader = loader
        self._client = loader._client
        self._pass_id: int | None = None
        self._is_over = False
        self._finalizer: Any = None
        self._returned: float | None = None

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        began = time.perf_counter()
        if self._pass_id is None:
            self._begin(self._loader._position())
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
        self._count(began, facts)
        return batch

    def _begin(self, position: Position) -> None:
        self._at = position
        self._ring, self._pass_id = self._loader._begin(position)
        self._finalizer = weakref.finalize(self, _close, self._client, self._pass_id)
        self._finalizer.atexit = False

    def _next_message(self) -> Message | None:
        """The next batch; None at the end."""
        while True:
            message = self._client.next(self._pass_id or 0, self._loader.place.timeout_s)
            if message.kind != "end":
                return message
            position = self._loader._after(self._at, message.facts["num_batches"])
            if position is None:
                return None
            self._finalizer()
            self._begin(position)

    def close(self) -> None:
        """End the pass; batches that are still under way are called off."""
        self._is_over = True
        if self._finalizer is not None:
            self._finalizer()

    def _count(self, began: float, facts: dict[str, Any]) -> None:
        now, loader = time.perf_counter(), self._loader
        loader.stats.count(facts, now - began, None if self._returned is None else began - self._returned)
        if loader.on_batch is not None:
            loader.on_batch(loader)
        self._returned = time.perf_counter()


def _give_back(held: set[int], give_back: Callable[[int], None], slot: int) -> None:
    held.discard(slot)
    give_back(slot)


def _close(client: FeederClient, pass_id: int) -> None:
    for message in client.close_pass(pass_id):
        client.release(message.facts["ring"], message.facts["slot"])


class _Announced:
    """Passes on the epoch that Lightning announces to samplers."""

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
