"""The ``RemoteLoader``, which replaces the user's DataLoader on a trainer."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from msgspec.structs import replace
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_sm.data.ipc.feeder_messages import DeliveredRange, EndOfPass, LoaderPlace, PassRequest, Position
from lightning_sm.data.plan.samples import num_steps
from lightning_sm.data.protocol.figures import BatchFigures
from lightning_sm.data.protocol.spec import FIRST_BY_HAND, LoaderDescription
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.last_step import LastStep
from lightning_sm.data.trainer.passes import ShardPasses
from lightning_sm.data.trainer.resume import SamplerOrderId
from lightning_sm.data.trainer.slots import SlotPool, SlotRing

logger = logging.getLogger(__name__)


class RemoteLoader:
    """The loader of a trainer: iterates over the batches of a loader on the data hosts, in a deterministic order.

    Args:
        client: The feeder.
        description: The data hosts' description of the user's loader.
        place: Where the loader belongs.
        slots: The memory for its batches.
        position: Called at the first batch of every pass; returns where the pass starts.
    """

    def __init__(
        self,
        client: FeederClient,
        description: LoaderDescription,
        place: LoaderPlace,
        slots: SlotPool,
        position: Callable[[RemoteLoader, Iterator[Any]], Position],
    ) -> None:
        self.description = description
        self.place = place
        self.slots = slots
        self._client = client
        self._position = position
        self.epoch = 0
        # (epoch, limit), number of batches; None: the sampler goes on, and has no length.
        self._sampler_length: tuple[tuple[int, int | None], int | None] | None = None
        # Returns the batches to which the user limits the Trainer's passes; None: they are not limited.
        self.limit: Callable[[], int | None] = lambda: None
        # Returns the batches that the Trainer can read at most in one pass; None: unknown.
        self.reach: Callable[[], int | None] = lambda: None
        # The order of the sampler in the last pass of the Trainer.
        self.order: SamplerOrderId | None = None
        self.num_passes = 0
        self._by_hand = -1, 0  # epoch, index of the user's last own pass in it
        # The last evaluation, and the index of the last pass in it.
        self._in_evaluation: tuple[Callable[[], object], int] = (lambda: None), 0
        self._shards = (
            ShardPasses(description.name, place, self._count_on_host) if description.order == "shards" else None
        )
        # Lightning reads both, to warn about shuffled validation data and to announce epochs.
        self.sampler = _Shuffled(self) if description.order == "shuffled" else _Sequential(self)
        self.batch_sampler: Any = None
        self.on_epoch: Callable[[int], None] | None = None
        # Called when the training loop begins to wait for a batch, and with its figures when it has arrived.
        self.on_wait: Callable[[], None] | None = None
        self.on_batch: Callable[[BatchFigures], None] | None = None
        # Called with the indices of each batch of the Trainer.
        self.on_indices: Callable[[list[int]], None] | None = None
        self.last_step: LastStep | None = None
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would change nothing: the user's loader is on the data hosts.

        Raises:
            AttributeError: It is none of this object's own attributes.
        """
        own = vars(self)
        if "_is_made" in own and (name not in own or name == "sampler"):
            raise AttributeError(
                f"{name!r} of a loader cannot be set in a training process: {self.description.name} is on the data "
                "hosts. Set it where the DataModule makes the loader."
            )
        super().__setattr__(name, value)

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and rank; None if the dataset or the batch sampler sets it."""
        return self.description.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is dropped."""
        return self.description.drop_last

    @property
    def num_workers(self) -> int:
        """Workers of the user's loader; data hosts have workers of their own."""
        return self.description.num_workers

    @property
    def dataset(self) -> RemoteDataset:
        """The stand-in for the dataset, of which a trainer has only the length."""
        return RemoteDataset(self.description)

    def __getattr__(self, name: str) -> Any:
        """Explain which attributes of a ``DataLoader`` a trainer has."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.__class__.__name__} has no attribute {name!r}. The DataLoader is on the data hosts; a trainer has "
            "its batches, its length, batch_size, drop_last, num_workers, and len(dataset)."
        )

    def __len__(self) -> int:
        """Return the number of batches in a pass; it is the same on every rank."""
        description = self.description
        if description.order == "batch_sampler" or (description.order == "sampler" and description.num_samples is None):
            # A data host runs the sampler, and keeps its order for the pass that follows.
            key = self.epoch, self.limit()
            if self._sampler_length is None or self._sampler_length[0] != key:
                self._sampler_length = key, self._sampler_steps()
            if self._sampler_length[1] is None:
                raise TypeError(f"{description.name} has no length: its sampler has none, and does not end in time.")
            return self._sampler_length[1]
        if self._shards is not None and (length := self._shards.length) is not None:
            return length
        if description.num_samples is None:
            raise TypeError(
                f"{description.name} has no length. For a training loader, set data_service.batches_per_epoch."
            )
        return num_steps(
            description.num_samples,
            description.batch_size,
            drop_last=description.drop_last,
            world_size=self.place.world_size,
        )

    def _count_on_host(self) -> tuple[int, int]:
        length = self._client.length(self.place, self.description, Position(epoch=max(self.epoch, 0)))
        return length.num_steps, length.num_dropped

    def _sampler_steps(self) -> int | None:
        """Let a data host run the sampler as far as the Trainer will read, and return the number of batches, if any."""
        position = Position(max(self.epoch, 0), stop_step=self.reach(), earlier_stop_step=self.limit())
        length = self._client.length(self.place, self.description, position)
        if not length.is_cut:
            return length.num_steps
        if self.description.num_batches is None:
            return self.limit()
        return num_steps(self.description.num_batches, None, drop_last=False, world_size=self.place.world_size)

    def digest(self, epoch: int, order: SamplerOrderId) -> str:
        """Return the digest of the sampler's order in an epoch, for the pass and the cut of another order."""
        position = Position(epoch, order.pass_index, earlier_stop_step=self.limit(), order_stop=order.stop)
        return self._client.length(self.place, self.description, position).digest

    def _note_order(self, position: Position) -> None:
        """Note the order of a pass of the Trainer, for the checkpoints that are saved within it."""
        if self.place.stage == "train" and self.description.order in ("sampler", "batch_sampler"):
            stop = PassRequest(0, self.place, self.description, position).loader_pass.stop
            length = self._client.length(self.place, self.description, position)
            self.order = SamplerOrderId(position.pass_index, stop, length.digest)

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
        """Ignore a state, which may come from a loader in a run of the Trainer without data hosts."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: a copy in another process gives no batches."""
        own = (
            *("_client", "_position", "slots", "limit", "reach", "on_epoch", "on_wait", "on_batch", "on_indices"),
            *("last_step", "_in_evaluation"),
        )
        return {name: value for name, value in vars(self).items() if name not in own}

    def __iter__(self) -> Iterator[Any]:
        """Start a pass. The first request to the data hosts follows with the first batch."""
        return _PassIterator(self)

    def next_manual_pass(self, epoch: int) -> int:
        """Return the index of the user's next own pass in an epoch: no pass of the Trainer has it."""
        last_epoch, last = self._by_hand
        self._by_hand = epoch, last + 1 if epoch == last_epoch else 0
        return FIRST_BY_HAND + self._by_hand[1]

    def next_pass_in(self, evaluation: object) -> int:
        """Return the index of the next pass in an evaluation: a CombinedLoader that cycles restarts a short loader.

        Args:
            evaluation: The iterator of the CombinedLoader.
        """
        last, index = self._in_evaluation
        index = index + 1 if last() is evaluation else 0
        self._in_evaluation = weakref.ref(evaluation), index
        return index

    def _start_position(self, own: _PassIterator) -> Position:
        position = self._position(self, own)
        if self.last_step is not None:
            mode = self.last_step.mode(self.description, self.place, is_manual=position.is_manual_iteration)
            position = replace(position, tail=mode)
        if position.is_manual_iteration:
            return position if self._shards is None else self._shards.whole(position)
        self.num_passes += 1
        self._note_order(position)
        return position if self._shards is None else self._shards.begin(position)


class RemoteDataset:
    """The stand-in for the user's dataset, which is on the data hosts.

    Args:
        description: The loader of the dataset.
    """

    def __init__(self, description: LoaderDescription) -> None:
        self._description = description

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            TypeError: The user's dataset has no length.
        """
        if self._description.dataset_length is None:
            raise TypeError(f"{self._description.dataset} ({self._description.name}) has no length.")
        return self._description.dataset_length

    def __getattr__(self, name: str) -> Any:
        """Explain that a trainer has nothing else of the dataset."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.__class__.__name__} has no attribute {name!r}: {self._elsewhere()} Numbers and strings that "
            "setup() sets on the DataModule are copied to the trainers."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Explain that the dataset would not change.

        Raises:
            AttributeError: It is an attribute of the user's dataset.
        """
        if name != "_description":
            raise AttributeError(
                f"{name!r} cannot be set: {self._elsewhere()} Set an attribute of the DataModule "
                "that the hook of the loader reads, with reload_dataloaders_every_n_epochs=1 of the Trainer. A dataset "
                "that needs the epoch reads self.trainer.current_epoch of the DataModule."
            )
        super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> Any:
        """Explain that a trainer has no samples.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"There is no sample {index!r} here: {self._elsewhere()}")

    def _elsewhere(self) -> str:
        description = self._description
        return f"{description.dataset} ({description.name}) is on the data hosts, and a trainer has only its length."


# (figures of a batch, iterator over the batches of its slot, which yields it, its weight).
_BatchSource: TypeAlias = tuple[BatchFigures, Iterator[Any], float]


class _PassIterator(Iterator[Any]):
    """One pass over a loader. It starts with the first batch: before, the Trainer does not know its position."""

    def __init__(self, loader: RemoteLoader) -> None:
        self._loader = loader
        self._client = loader._client
        self._ring: SlotRing | None = None
        self._position: Position
        self._pass_id = 0
        self._is_over = False
        self._finalizer: Any = None
        self._sources: deque[_BatchSource] = deque()  # one for each batch, in the order of delivery
        # By row: the batches of a block of shards that is not complete.
        self._block_rows: defaultdict[int, list[_BatchSource]] = defaultdict(list)
        self._end: EndOfPass | None = None
        self._keys: Iterator[list[int]] = iter(())
        self._figures: BatchFigures

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._loader.on_wait is not None and (self._ring is None or not self._position.is_manual_iteration):
            self._loader.on_wait()
        try:
            batch = self._next_batch()
        except BaseException:
            self.close()
            raise
        if self._position.is_manual_iteration:
            return batch
        if self._loader.on_batch is not None:
            self._loader.on_batch(self._figures)
        if self._loader.on_indices is not None:
            self._loader.on_indices(next(self._keys))
        return batch

    def _next_batch(self) -> Any:
        if self._ring is None:
            self._ring = self._start(self._loader._start_position(self))
        while not self._sources:
            self._receive(self._ring)
        self._figures, batches, weight = self._sources.popleft()
        if self._loader.last_step is not None:
            self._loader.last_step.take(weight, is_manual=self._position.is_manual_iteration)
        return next(batches)

    def _receive(self, ring: SlotRing) -> None:
        """Wait for the next batches.

        Raises:
            StopIteration: The pass is over.
        """
        message = self._end or self._client.next(self._pass_id, self._loader.place.timeout_s, ring.poll)
        if isinstance(message, DeliveredRange):
            figures, batches = message.figures(), ring.batches(message)
            source = figures, batches, 1.0
            self._client.take(message.pass_id, message.first_step + message.num_steps)
            if message.row is None:
                self._sources.extend([source] * (message.num_steps - 1))
                self._sources.append((figures, batches, message.tail_weight))
                self._keys = iter(message.keys)
                return
            for row in range(message.row, message.row + message.num_steps):
                self._block_rows[row].append(source)
            self._sources.extend(self._block_rows.pop(0, ()))
            return
        for row in sorted(self._block_rows):
            self._sources.extend(self._block_rows[row])
        self._block_rows.clear()
        if isinstance(message, EndOfPass):
            self._end = message
            if not self._sources:
                self._start_again(message)

    def _start(self, position: Position) -> SlotRing:
        slots = self._loader.slots
        ring = slots.take()
        logger.debug(
            "%s: epoch %d, steps %d to %s",
            self._loader.description.name,
            position.epoch,
            position.first_step,
            position.stop_step,
        )
        self._position = position
        tells_keys = self._loader.on_indices is not None
        self._pass_id = self._client.start_pass(
            self._loader.place, self._loader.description, position, ring.number, tells_keys=tells_keys
        )
        self._finalizer = weakref.finalize(self, _close_pass, self._client, self._pass_id, slots, ring)
        self._finalizer.atexit = False
        return ring

    def _start_again(self, end: EndOfPass) -> None:
        """Continue with the last step, if it was held back, or start over where the shards end within the pass.

        Raises:
            StopIteration: The pass is over.
        """
        shards, last_step = self._loader._shards, self._loader.last_step
        position = None
        if end.held_step is not None and last_step is not None:
            mode = last_step.mode_of_held(self._loader.description, self._loader.place)
            position = replace(self._position, first_step=end.held_step, tail=mode)
        elif shards is not None and end.num_batches is not None:
            position = shards.after(self._position, end.num_batches)
        if position is None:
            raise StopIteration
        self._end = None
        self._finalizer()
        self._ring = self._start(position)

    def close(self) -> None:
        """End the pass, and cancel its requests in flight."""
        self._is_over = True
        self._sources.clear()
        self._block_rows.clear()
        if self._finalizer is not None:
            self._finalizer()


def _close_pass(client: FeederClient, pass_id: int, slots: SlotPool, ring: SlotRing) -> None:
    client.close_pass(pass_id)
    slots.give_back(ring)


class _Announced:
    """A sampler that passes the epoch which Lightning announces on to the loader."""

    _loader: RemoteLoader

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


class _Sequential(_Announced, SequentialSampler):
    def __init__(self, loader: RemoteLoader) -> None:
        super().__init__(range(loader.description.num_samples or 0))
        self._loader = loader


class _Shuffled(_Announced, RandomSampler):
    def __init__(self, loader: RemoteLoader) -> None:
        super().__init__(range(loader.description.num_samples or 1))
        self._loader = loader
