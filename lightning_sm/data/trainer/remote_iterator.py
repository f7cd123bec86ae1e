"""The iterator of a ``RemoteDataLoader``, which runs the sampler and receives the batches that data hosts build."""

from __future__ import annotations

import pickle
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from lightning_sm._random_state import RandomState
from lightning_sm.data.ipc.feeder_messages import DeliveredRange, StartIterator
from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.openings import Opening, StreamWorker
from lightning_sm.data.trainer.feeder_client import FeederClient, HeldOpening
from lightning_sm.data.trainer.slots import SlotPool, SlotRing
from lightning_sm.errors import DataServiceError
from lightning_sm.record.data_figures import BatchFigures

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lightning_sm.data.trainer.remote_loader import LoaderSource

# Odd, so that its multiples modulo a power of two do not repeat.
_STEP = 0x9E3779B97F4A7C15

# Send the indices of at least this many batches at a time, because a message costs more than the indices of a batch. If
# the window is small, send those of half of it, so that data hosts always have something to do.
_MIN_SUPPLY = 4


@dataclass(frozen=True)
class IteratorPosition:
    """An iterator's position, from which an iterator in another run can continue with the same batches.

    Attributes:
        seed: Base seed of the iterator.
        number: Number of times the iterator has been reset.
        num_batches: Number of batches delivered since the last reset.
        ends: For a stream, the number of batches from each exhausted worker.
    """

    seed: int
    number: int
    num_batches: int
    ends: dict[int, int] = field(default_factory=dict)


class RemoteIterator(_BaseDataLoaderIter):
    """A torch iterator whose batches come from data hosts.

    Args:
        loader: The loader.
        source: The loader's source on the data hosts.
        begins_at: Where to start; None for the first batch. The sampler must skip earlier batches itself. A
            stream's workers reread the current pass from its start, but not the passes before it, so they lose the
            changes that these made to their RNG state.

    Attributes:
        held: The opening of an indexed dataset.
    """

    def __init__(
        self, loader: DataLoader[Any], source: LoaderSource, begins_at: IteratorPosition | None = None
    ) -> None:
        super().__init__(loader)
        if self._num_workers:
            # Like torch's iterator with workers, run the sampler's __iter__ a second time.
            super()._reset(loader, first_iter=True)
        self._source = source
        self._num_resets = 0
        if begins_at is not None:  # after super() has drawn a seed, as the interrupted run did
            self._base_seed, self._num_resets = begins_at.seed, begins_at.number
            self._num_yielded = begins_at.num_batches
        self._reports, self._is_step = source.reports(loader)
        self._batches: _Batches | _StreamBatches | None = None
        self.held: list[HeldOpening] = []
        # Raised at the first batch: if it were raised here, another error in Lightning's teardown would hide it.
        self._error: DataServiceError
        try:
            if self._dataset_kind == _DatasetKind.Iterable:
                self._batches = _StreamBatches(source, int(self._base_seed), loader)
            else:
                self.held = source.open(loader)
            self._start(loader, begins_at)
        except DataServiceError as error:
            self._batches, self._error = None, error

    @property
    def position(self) -> IteratorPosition:
        """The current position."""
        ends = dict(self._batches.ends) if isinstance(self._batches, _StreamBatches) else {}
        return IteratorPosition(int(self._base_seed), self._num_resets, self._num_yielded, ends)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:  # torch's signature
        """Start another pass with the same iterator, as ``DataLoader`` does with ``persistent_workers``."""
        super()._reset(loader, first_iter)
        if self._batches is None:
            return
        self._batches.close()
        self._num_resets += 1
        self._start(loader)

    def _start(self, loader: DataLoader[Any], begins_at: IteratorPosition | None = None) -> None:
        if isinstance(self._batches, _StreamBatches):
            ends = {} if begins_at is None else begins_at.ends
            self._batches.begin(self._num_resets, self._num_yielded, ends)
        else:
            # Each pass needs different seeds, although an iterator with persistent workers keeps its base seed.
            seed = (int(self._base_seed) + self._num_resets * _STEP) % (1 << 63)
            opening, source = self.held[0].opening, self._source
            batches = _FeederPass(source, opening, source.first_request(opening, seed, self._num_yielded))
            # A reference cycle would keep the workers until garbage collection.
            self._batches = _Batches(source, batches, weakref.proxy(self), loader)
            if self._num_workers:
                self._batches.supply(as_torch=True)  # torch prefetches here, so random samplers draw their order now

    def _next_data(self) -> Any:
        if self._batches is None:
            raise self._error
        batch = self._batches.next()
        if self._reports:
            self._source.connection.reporter.batch(self._source.trainer, self._batches.figures, is_step=self._is_step)
        if not self._pin_memory:
            return batch
        # A copy, as in torch, whose allocator knows when a GPU has read it. Nothing here would know that of the slot.
        return _utils.pin_memory.pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]


class _FeederPass:
    """One pass of an iterator in the feeder, which yields batches as they are delivered."""

    def __init__(
        self, source: LoaderSource, opening: Opening, fetch: FetchSpec, num_parts: int = 1, ahead: int = 0
    ) -> None:
        connection = source.connection
        settings = connection.settings
        self.client: FeederClient = connection.feeder
        self._timeout_s = settings.batch_timeout_s
        is_stream = opening.stream is not None
        # A stream must first read all earlier batches.
        self._first_timeout_s = self._timeout_s * (1 + fetch.first + sum(fetch.num_before) if is_stream else 1)
        window = ahead or max(2, -(-source.window_batches // num_parts))
        slots = connection.slots
        self._ring: SlotRing = slots.take(source.name, window)
        self.pass_id = self.client.start_iterator(
            partial(
                StartIterator,
                loader=source.name,
                source=opening.source,
                is_stream=is_stream,
                fetch=fetch,
                ring=self._ring.number,
                window_batches=window,
                is_window_fixed=bool(ahead or settings.window_batches),
                window_bytes=settings.window_bytes // num_parts,
            )
        )
        self.close = weakref.finalize(self, _close, self.client, self.pass_id, slots, self._ring)
        self.close.atexit = False
        self._ready: deque[tuple[BatchFigures, Iterator[Any]]] = deque()
        self._has_ended = False
        self.wanted_until = window
        self.figures: BatchFigures

    def next(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: There are no more batches.
            DataServiceError: The batch failed or did not arrive in time.
        """
        if not self._ready:
            if self._has_ended:
                raise StopIteration
            message = self.client.next(self.pass_id, self._first_timeout_s)
            self._first_timeout_s = self._timeout_s
            if not isinstance(message, DeliveredRange):
                self._has_ended = True
                self.close()
                raise StopIteration
            self.client.take(self.pass_id, message.first_step + message.num_steps)
            self.wanted_until = message.wanted_until
            self._ready.extend([(message.figures, self._ring.batches(message))] * message.num_steps)
        self.figures, batches = self._ready.popleft()
        return next(batches)


class _Batches:
    """The batches of an indexed dataset."""

    def __init__(
        self,
        source: LoaderSource,
        feeder_pass: _FeederPass,
        iterator: RemoteIterator,
        loader: DataLoader[Any],
    ) -> None:
        self._source = source
        self._iterator = iterator
        self._loader = loader
        self._pass = feeder_pass
        self._num_supplied = 0
        self._num_taken = 0
        self._stock_ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._limit: float | None = None
        self._has_ended = False
        self._error: Exception | None = None

    @property
    def figures(self) -> BatchFigures:
        """Figures of the last batch."""
        return self._pass.figures

    def next(self) -> Any:
        """Return the next batch."""
        if not self._stock_ahead or not self._num_taken:
            self.supply()
        try:
            batch = self._pass.next()
        except StopIteration:
            if self._error is not None:
                raise self._error from None
            raise
        self._num_taken += 1
        if self._stock_ahead:
            self.supply()
        return batch

    def supply(self, *, as_torch: bool = False) -> None:
        """Run the sampler for the batches that may be requested; if it fails, ``next`` raises its error later.

        Args:
            as_torch: Whether to run the sampler no further than torch would. Before the first batch is requested, and
                beyond the Trainer's limit, it never runs further, because the state of a sampler that is not exhausted
                depends on how far it was read. Neither does a sampler that draws random numbers for each batch, because
                training draws from the same generators.
        """
        stop = self._stop(as_torch)
        fewest = min(_MIN_SUPPLY, (stop - self._num_taken + 1) // 2)
        if self._has_ended or (self._num_supplied >= self._least and self._num_supplied + fewest > stop):
            return
        indices: list[bytes] = []
        while self._num_supplied < self._stop(as_torch) and not self._has_ended:
            # The first batch's index may draw the order of all others.
            before = RandomState.now() if self._num_supplied == 1 else None
            indices += self._index()
            if before is not None:
                self._source.note_order(is_fixed=before.is_same(RandomState.now()))
        self._pass.client.supply(self._pass.pass_id, indices, is_end=self._has_ended)

    @property
    def _least(self) -> int:
        """The number of indices that torch's iterator would have drawn by now."""
        return self._num_taken + max(1, self._stock_ahead)

    def _stop(self, as_torch: bool) -> int:
        if as_torch or not self._source.has_fixed_order:
            return self._least
        if self._limit is None:
            self._limit = self._source.limit(self._loader)
        return int(max(self._least, min(self._limit, self._pass.wanted_until)))

    def _index(self) -> tuple[bytes, ...]:
        """Return the pickled indices of the next batch in a tuple, which is empty if there is no batch."""
        try:
            index = pickle.dumps(self._iterator._next_index(), pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        except StopIteration:
            self._has_ended = True
            return ()
        except Exception as error:  # noqa: BLE001  # raised in place of the batch
            self._has_ended, self._error = True, error
            return ()
        self._num_supplied += 1
        return (index,)

    def close(self) -> None:
        """End the pass and cancel its requests."""
        self._pass.close()


class _StreamBatches:
    """The batches of an iterable dataset, whose workers take turns as in torch.

    Args:
        source: The loader's source on the data hosts.
        seed: Base seed of the iterator.
        loader: The loader.

    Attributes:
        ends: Number of batches from each exhausted worker.
        figures: Figures of the last batch.
    """

    def __init__(self, source: LoaderSource, seed: int, loader: DataLoader[Any]) -> None:
        self.ends: dict[int, int] = {}
        self.figures: BatchFigures
        self._source = source
        self._num_workers = num_workers = max(1, loader.num_workers)
        # How many batches each persistent worker builds ahead of the consumer: as many as in torch, because the
        # worker's random numbers in the next pass depend on it. 0 for other workers.
        self._ahead = loader.persistent_workers * (loader.prefetch_factor or 0)
        # For each worker, how many batches it has to have built in the last passes, as in ``FetchSpec``.
        self._num_before: list[list[int]] = [[] for _ in range(num_workers)]
        ranks = source.rank, source.world_size
        self._held = source.open(
            loader, [StreamWorker(*ranks, worker, num_workers, seed) for worker in range(num_workers)]
        )

    def begin(self, number: int, num_done: int, ends: dict[int, int]) -> None:
        """Start a pass.

        Args:
            number: Number of the pass, from 0.
            num_done: Number of batches to skip.
            ends: Number of batches from each worker that was exhausted within the skipped batches.
        """
        self.ends = dict(ends)
        self._counts = [0] * self._num_workers
        turns = deque(range(self._num_workers))
        while turns and num_done:
            worker = turns.popleft()
            if self._counts[worker] != ends.get(worker):
                self._counts[worker] += 1
                num_done -= 1
                turns.append(worker)
        self._passes = deque((worker, self._pass_of(worker, number)) for worker in turns)

    def _pass_of(self, worker: int, number: int) -> _FeederPass:
        opening = self._held[worker].opening
        fetch = self._source.first_request(opening, number, self._counts[worker], self._num_before[worker])
        return _FeederPass(self._source, opening, fetch, self._num_workers, self._ahead)

    def next(self) -> Any:
        """Return the next batch; the workers take turns until they are exhausted."""
        while self._passes:
            worker, worker_pass = self._passes.popleft()
            try:
                batch = worker_pass.next()
            except StopIteration:
                self.ends[worker] = self._counts[worker]
                continue
            self._counts[worker] += 1
            self._passes.append((worker, worker_pass))
            self.figures = worker_pass.figures
            return batch
        raise StopIteration

    def close(self) -> None:
        """End all passes, cancel their requests, and note how far the next pass finds the workers."""
        for _, worker_pass in self._passes:
            worker_pass.close()
        pairs = zip(self._counts, self._num_before, strict=True)
        self._num_before = [[*([] if num else before), num + self._ahead] for num, before in pairs]


def _close(client: FeederClient, pass_id: int, slots: SlotPool, ring: SlotRing) -> None:
    client.close_pass(pass_id)
    slots.give_back(ring)
