"""Iterable datasets, cut into virtual shards that do not depend on the shape of the cluster.

Shard v of V is what ``iter(dataset)`` yields when ``get_worker_info()`` says worker v of V: the protocol by which
iterable datasets split themselves for ``DataLoader`` workers. Batch k of a shard is found by its number, so that a
shard can go on in any worker of any host: it is opened anew there and skipped to the number.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker as torch_worker

from lightning_sm.data.host.random_state import RandomStates, seed_all
from lightning_sm.data.plan.seeds import SampleSeeds
from lightning_sm.data.protocol.spec import BatchSpec

# Ranks that all read the whole dataset need an iterator each. More would be too much for datasets with large buffers.
_MAX_COPIES = 8


_NOTHING = object()


class ShardAnswer:
    """What a shard answers in place of a batch.

    Attributes:
        end: Number of batches in the shard; None: there are more than were asked about.
    """

    def __init__(self, end: int | None) -> None:
        self.end = end


class ShardError(Exception):
    """The user's code failed in a shard; the cause is the user's exception.

    Args:
        where: Which shard, and which batch of it.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class OpenShards:
    """The shards of one loader that are open in this worker.

    Args:
        loader: The user's loader, over an iterable dataset.
        stage: "train", "val", "test" or "predict".
        index: Position among the loaders of the stage.
    """

    def __init__(self, loader: DataLoader[Any], stage: str, index: int) -> None:
        self._loader = loader
        self._stage = stage
        self._index = index
        self._open: dict[int, list[_Shard]] = {}  # least recently used first

    def batch(self, spec: BatchSpec) -> Any:
        """Return the collated batch, or a ``ShardAnswer``.

        Args:
            spec: The batch; its keys are number of shards, shard, offset, and whether the batch itself is wanted.

        Raises:
            ShardError: The user's code failed.
        """
        num_shards, number, offset, is_wanted = spec.keys.tolist()
        which = (spec.seed, spec.epoch, spec.pass_index, num_shards)
        shard = self._shard(which, number, offset)
        try:
            samples = shard.samples(offset)
            if samples is None:
                return ShardAnswer(shard.next_offset)
            return self._collated(shard, samples, offset) if is_wanted else ShardAnswer(None)
        except Exception as error:
            # An iterator that has raised is at its end, and must not be asked again.
            self._open[number].remove(shard)
            raise ShardError(f"batch {offset} of shard {number} of {num_shards}") from error

    def count(self, num_shards: int, seed: int, epoch: int, pass_index: int) -> list[int]:
        """Return the number of batches in every shard, by reading all of them.

        Args:
            num_shards: Shards.
            seed: Base of all random states.
            epoch: Epoch of the training.
            pass_index: Number of the pass within the epoch.
        """
        which = (seed, epoch, pass_index, num_shards)
        return [self._new(which, number).num_left() for number in range(num_shards)]

    def _collated(self, shard: _Shard, samples: list[Any], offset: int) -> Any:
        # A state of its own: shards that were skipped to this batch have not collated those before.
        with shard.showing_worker_info():
            seed_all(shard.seeds.of_batch(offset, shard.number))
            return self._loader.collate_fn(samples[0] if self._loader.batch_size is None else samples)

    def _shard(self, which: tuple[int, int, int, int], number: int, offset: int) -> _Shard:
        """Return the one that has the shortest way to an offset, or a new one."""
        known = [shard for shard in self._open.get(number, ()) if shard.which == which][-_MAX_COPIES:]
        near = [shard for shard in known if shard.next_offset <= offset]
        shard = max(near, key=lambda shard: shard.next_offset) if near else self._new(which, number)
        self._open[number] = [*(other for other in known if other is not shard), shard]
        return shard

    def _new(self, which: tuple[int, int, int, int], number: int) -> _Shard:
        seed, epoch, pass_index, _ = which
        return _Shard(self._loader, which, number, SampleSeeds(seed, self._stage, self._index, epoch, pass_index))


def show_worker_info(worker_id: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Make ``torch.utils.data.get_worker_info()`` answer as in a ``DataLoader`` worker.

    Args:
        worker_id: Number of the worker, or of the virtual shard.
        num_workers: How many there are.
        seed: Seed of the worker.
        dataset: The dataset.
    """
    info: Any = torch_worker.WorkerInfo(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)
    torch_worker._worker_info = info


def own_copy(dataset: Any) -> Any:
    """Copy a dataset, so that several iterators over it in one process do not disturb each other.

    Copied are datasets, the datasets that they hold, alone or in lists, tuples and dicts, and generators of random
    numbers. Everything else is shared: a dataset that holds its samples in memory would be copied for every shard.

    Args:
        dataset: The dataset.
    """
    return _copied(dataset, {})


def _copied(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    new = value
    if isinstance(value, torch.Generator):
        new = value.clone_state()
    elif isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
        new = copy.deepcopy(value)
    elif isinstance(value, Dataset):
        new = known[id(value)] = copy.copy(value)
        for name, attribute in list(getattr(value, "__dict__", {}).items()):
            new.__dict__[name] = _copied(attribute, known)
    elif isinstance(value, dict) and any(isinstance(item, Dataset) for item in value.values()):
        new = {name: _copied(item, known) for name, item in value.items()}
    elif type(value) in (list, tuple) and any(isinstance(item, Dataset) for item in value):
        new = type(value)(_copied(item, known) for item in value)
    return new


class _Shard:
    """An open iterator over one virtual shard."""

    def __init__(
        self, loader: DataLoader[Any], which: tuple[int, int, int, int], number: int, seeds: SampleSeeds
    ) -> None:
        self.which, self.number, self.seeds = which, number, seeds
        self.next_offset = 0
        self._loader = loader
        self._random = RandomStates(seeds.of(number))
        self._dataset: Any = None
        self._samples: Iterator[Any] | None = None
        self._is_over = False

    def samples(self, offset: int) -> list[Any] | None:
        """Return the samples of the batch at an offset that is not behind ``next_offset``; None if it has ended."""
        with self.showing_worker_info(), self._random:
            while (samples := self._take()) is not None:
                self.next_offset += 1
                if self.next_offset > offset:
                    return samples
        return None

    def num_left(self) -> int:
        """Read to the end, and return the number of batches."""
        with self.showing_worker_info(), self._random:
            while self._take() is not None:
                self.next_offset += 1
        return self.next_offset

    @contextmanager
    def showing_worker_info(self) -> Iterator[None]:
        """Be worker ``number`` for the user's code; other loaders of the process are not."""
        before = torch_worker._worker_info
        if self._dataset is None and not self._is_over:
            is_prepared = self._loader.worker_init_fn is not None
            self._dataset = copy.deepcopy(self._loader.dataset) if is_prepared else own_copy(self._loader.dataset)
        show_worker_info(self.number, self.which[-1], self.seeds.of(self.number), self._dataset)
        try:
            yield
        finally:
            torch_worker._worker_info = before

    def _take(self) -> list[Any] | None:
        if self._is_over:
            return None
        if self._samples is None:
            if self._loader.worker_init_fn is not None:
                self._loader.worker_init_fn(self.number)
            self._samples = iter(self._dataset)
        size = self._loader.batch_size or 1
        taken: list[Any] = []
        # Not by iter(), as loops do: a dataset that is its own iterator would begin anew.
        while len(taken) < size and (sample := next(self._samples, _NOTHING)) is not _NOTHING:
            taken.append(sample)
        if taken and not (self._loader.drop_last and len(taken) < size):
            return taken
        self._is_over = True
        self._samples = self._dataset = None  # buffers and files
        return None
