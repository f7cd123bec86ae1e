"""Builds a source's batches in a worker, as a ``DataLoader`` worker does."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _DatasetKind

from lightning_sm.data.batch.arena import ALIGNMENT, Arena
from lightning_sm.data.batch.collate import collate_into
from lightning_sm.data.batch.serialization import pickle_batch
from lightning_sm.data.host.generators import HeldGenerators, reachable, seed_all
from lightning_sm.data.host.source import WorkerSource
from lightning_sm.data.host.trainer_view import TrainerView
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.host.world import RankWorld
from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.frames import EncodedBatch
from lightning_sm.data.protocol.openings import StreamWorker
from lightning_sm.data.protocol.spec import StreamEnd

# For longer lists of indices, show only the first and the last one.
_MAX_SHOWN = 2

_BATCH_KEY = struct.Struct("<qqq")

# The position of a stream after its code has raised: later than any batch, so every further request starts the stream
# over. Its iterator may have lost samples, and a generator that has raised looks exhausted.
_UNUSABLE = sys.maxsize

Builder: TypeAlias = "IndexedBuilder | StreamBuilder"


class WorkerPlace(NamedTuple):
    """A worker's place among the workers of all data hosts.

    Attributes:
        host: Name of the data host.
        number: Number of the worker on its host.
        num_workers: Number of workers on the host.
    """

    host: str
    number: int
    num_workers: int


def builder_of(source: WorkerSource, stream: StreamWorker | None, place: WorkerPlace, notes: WorkerNotes) -> Builder:
    """Return the batch builder for a worker, after running the user's ``worker_init_fn``.

    Args:
        source: The source.
        stream: The ``DataLoader`` worker that this worker acts as; None if the dataset is indexed.
        place: Place of the worker.
        notes: This process's notes, which name its current sample.
    """
    if source.trainer is not None:
        for part in reachable(*source.parts().values()):
            if isinstance(part, TrainerView):
                part.update(source.trainer)
    if stream is not None:
        return StreamBuilder(source, stream, notes)
    return IndexedBuilder(source, place, notes)


class IndexedBuilder:
    """A builder for any batch of an indexed dataset. Random numbers depend on the batch, not on the worker.

    Args:
        source: The source.
        place: Place of the worker.
        notes: This process's notes, which name its current sample.
    """

    def __init__(self, source: WorkerSource, place: WorkerPlace, notes: WorkerNotes) -> None:
        self._source = source
        self._notes = notes
        self._world = RankWorld()
        # Each worker on each host has a different seed.
        seed = _hash(f"{place.host}/{place.number}/{source.name}".encode()) % (1 << 31)
        _show_worker_info(place.number, place.num_workers, seed, source.dataset)
        # Lightning's worker_init_fn only sets seeds, which ``build`` does for each batch.
        if not source.has_ranks:
            notes.set_text("worker_init_fn")
            # Generators that it creates from torch.initial_seed() must differ between workers, as in a DataLoader.
            seed_all(seed)
            source.init_worker(place.number, 0)
        self._held = HeldGenerators(source.dataset, source.collate_fn)
        self._has_searched_again = False

    def build(self, encoded_spec: bytes, memory: memoryview) -> list[EncodedBatch] | StreamEnd:
        """Build the batches of a request, each from its index.

        Args:
            encoded_spec: The request.
            memory: The slot for the batches.

        Raises:
            BatchTypeError: A batch cannot be pickled.
            BatchTooLargeError: The slot is too small.
        """
        spec = FetchSpec.decode(encoded_spec)
        self._world.show(spec.rank, spec.world_size)
        builds = (partial(self._batch, spec, number) for number in range(spec.num_batches))
        batches = _encode_batches(memory, builds)
        if not self._has_searched_again:  # code may create its generators on first use
            self._held.search_again()
            self._has_searched_again = True
        return batches

    def _batch(self, spec: FetchSpec, number: int, arena: Arena) -> Any:
        source, notes = self._source, self._notes
        notes.set_text("unpickling what the sampler yielded")
        index = pickle.loads(spec.indices[number])  # noqa: S301  # from a trainer that knows the token
        # Include the rank, because the ranks of a job often have the same base seed.
        seed = _hash(_BATCH_KEY.pack(spec.seed, spec.rank, spec.first + number))
        seed_all(seed)
        self._held.seed(seed)
        samples = self._samples(index)
        notes.set_text(f"the collate function, for {_shown(index)}")
        return collate_into(source.collate_fn, samples, arena) if source.is_batched else source.collate_fn(samples)

    def _samples(self, index: Any) -> Any:
        """Fetch the samples to collate, as torch's ``_MapDatasetFetcher`` does."""
        dataset, notes = self._source.dataset, self._notes
        notes.set_text(_shown(index))
        if not self._source.is_batched:
            return dataset[index]
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(index)
        samples = []
        for key in index:
            if type(key) is int and key.bit_length() < 64:  # noqa: PLR2004  # fits into the notes
                notes.set_index(key)
            else:
                notes.set_text(f"index {key!r}")
            samples.append(dataset[key])
        return samples


class StreamBuilder:
    """A builder that acts as a ``DataLoader`` worker over an iterable dataset, with the same random numbers.

    Args:
        source: The source.
        stream: The ``DataLoader`` worker that this worker acts as.
        notes: This process's notes, which name its current batch.
    """

    def __init__(self, source: WorkerSource, stream: StreamWorker, notes: WorkerNotes) -> None:
        self._source = source
        self._stream = stream
        self._notes = notes
        self._pass = 0
        RankWorld().show(stream.rank, stream.world_size)
        # Seed and run worker_init_fn in the same order as torch's _worker_loop.
        seed = stream.seed + stream.number
        random.seed(seed)
        torch.manual_seed(seed)
        torch_worker: Any = _utils.worker
        np.random.seed(torch_worker._generate_state(stream.seed, stream.number))
        _show_worker_info(stream.number, stream.num_workers, seed, source.dataset)
        notes.set_text("worker_init_fn")
        source.init_worker(stream.number, stream.rank)
        self._open()

    def _open(self) -> None:
        self._notes.set_text("iter(dataset)")
        source = self._source
        kinds: Any = _DatasetKind
        self._fetcher: Any = kinds.create_fetcher(
            kinds.Iterable, source.dataset, source.is_batched, source.collate_fn, source.drop_last
        )
        self._num_built, self._has_ended = 0, False

    def build(self, encoded_spec: bytes, memory: memoryview) -> list[EncodedBatch] | StreamEnd:
        """Build the batches of a request, after skipping any earlier batches that this process has not built."""
        spec = FetchSpec.decode(encoded_spec)
        if (spec.seed, spec.first) < (self._pass, self._num_built):
            # A batch was lost in transit, or user code has raised, and a stream cannot go back. Exit: a new process
            # starts over and skips ahead.
            self._notes.set_text(f"its own request, to start a stream over and skip to batch {spec.first}")
            os._exit(0)
        # A persistent worker starts a new pass here, and first builds what torch's worker would have built ahead: its
        # random numbers depend on that. A process that replaces another is too far behind, and reads nothing of
        # earlier passes.
        due = dict(enumerate(spec.num_before, spec.seed - len(spec.num_before)))
        due = due if self._pass in due else {}
        while self._pass < spec.seed:
            with suppress(Exception):  # torch drops errors in batches that nobody wants, too
                while self._num_built < due.get(self._pass, 0) and not self._has_ended:
                    self._next()
            self._open()
            self._pass += 1
        while self._num_built < spec.first:
            if isinstance(self._next(), StreamEnd):
                return StreamEnd(self._num_built)
        return _encode_batches(memory, (lambda _: self._next() for _ in range(spec.num_batches)))

    def _next(self) -> Any:
        self._notes.set_text(f"batch {self._num_built} of worker {self._stream.number} of {self._stream.num_workers}")
        if not self._has_ended:
            number, self._num_built = self._num_built, _UNUSABLE
            try:
                batch = self._fetcher.fetch([None] * (self._source.batch_size or 0))
            except StopIteration:
                self._has_ended, self._num_built = True, number
            else:
                self._num_built = number + 1
                return batch
        return StreamEnd(self._num_built)


def _encode_batches(memory: memoryview, batches: Iterable[Callable[[Arena], Any]]) -> list[EncodedBatch] | StreamEnd:
    """Build batches in a slot, one after the other.

    Args:
        memory: The slot.
        batches: Functions that each build a batch, perhaps in the arena, or return a ``StreamEnd`` if none is left.

    Returns:
        The batches (fewer than requested if the stream ends), or the stream's end if there are none.
    """
    encoded: list[EncodedBatch] = []
    used = 0
    for build in batches:
        start = -(-used // ALIGNMENT) * ALIGNMENT
        arena = Arena(memory[start:])
        batch = build(arena)
        if isinstance(batch, StreamEnd):
            return encoded or batch
        structure = pickle_batch(batch, arena)
        encoded.append(EncodedBatch(start, arena.used, structure))
        used = start + arena.used
    return encoded


def _hash(key: bytes) -> int:
    """Return an unsigned 64-bit hash of a key."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _show_worker_info(number: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Set what ``torch.utils.data.get_worker_info()`` returns."""
    torch_worker: Any = _utils.worker
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=dataset)


def _shown(index: Any) -> str:
    """Describe a batch's index, for messages."""
    if isinstance(index, list) and len(index) > _MAX_SHOWN:
        return f"indices {index[0]!r} to {index[-1]!r} ({len(index)})"
    return f"index {index!r}"
