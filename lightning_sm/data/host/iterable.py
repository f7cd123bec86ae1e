"""Iterable datasets, cut into virtual shards that do not depend on the shape of the cluster.

Iterable datasets split themselves over ``DataLoader`` workers by ``get_worker_info()``. Shard v of V is the part that
the dataset yields when this returns worker v of V. A batch is requested by shard and offset, so that any worker of any
host can continue a shard: it opens the shard and skips to the offset.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ChainDataset, DataLoader, Dataset
from torch.utils.data._utils import worker as torch_worker

from lightning_sm.data.host.generators import HeldGenerators
from lightning_sm.data.host.seeding import Seeding, StreamState
from lightning_sm.data.plan.seeds import SampleSeeds
from lightning_sm.data.protocol.spec import BatchSpec, ShardEnd
from lightning_sm.errors import DataSettingsError

# Open iterators per shard. Ranks that all read the whole dataset need one each, but each may have large buffers.
_MAX_COPIES = 8

_END = object()


class UserCodeError(Exception):
    """The user's dataset, transform or collate function failed; the cause is the user's exception.

    Args:
        where: The index that failed, or the shard and the batch of it.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class _ShardPass(NamedTuple):
    seed: int
    epoch: int
    pass_index: int
    num_shards: int


class OpenShards:
    """The shards of one loader that are open in this worker.

    Args:
        loader: The user's loader, over an iterable dataset.
        name: Its name, for messages.
        stage: "train", "val", "test" or "predict".
        index: Position among the loaders of the stage.

    Attributes:
        seeding: The seeds of the loader's code in this worker.
    """

    def __init__(self, loader: DataLoader[Any], name: str, stage: str, index: int) -> None:
        self._loader = loader
        self._stage = stage
        self._index = index
        self._open: dict[int, list[_Shard]] = {}  # least recently used first
        self.seeding = Seeding(name, loader.collate_fn)

    def batch(self, spec: BatchSpec) -> Any:
        """Return the collated batch, or a ``ShardEnd``.

        Args:
            spec: The batch; its keys are number of shards, shard, offset, and whether to return the batch itself.

        Raises:
            UserCodeError: The user's dataset, transform or collate function failed.
        """
        num_shards, number, offset, is_wanted = spec.keys.tolist()
        shard_pass = _ShardPass(spec.seed, spec.epoch, spec.pass_index, num_shards)

        shard = self._shard(shard_pass, number, offset)
        try:
            with shard.showing_worker_info():
                samples, seed = shard.samples(offset)
                if samples is None:
                    return ShardEnd(shard.next_offset)
                if not is_wanted:
                    return ShardEnd(None)
                if seed:
                    # A seed of its own: the state after reading samples depends on which batches were collated.
                    seed(shard.seeds.of("batch of shard", number, offset))
                return self._loader.collate_fn(samples[0] if self._loader.batch_size is None else samples)
        except Exception as error:
            # After raising, a Python generator looks exhausted: the shard must be opened again.
            self._open[number].remove(shard)
            raise UserCodeError(f"batch {offset} of shard {number} of {num_shards}") from error

    def _shard(self, shard_pass: _ShardPass, number: int, offset: int) -> _Shard:
        """Return the open iterator over a shard that is closest before an offset, or a new one."""
        shards = self._open.get(number, [])
        if shards and shards[-1].next_offset == offset and shards[-1].shard_pass == shard_pass:
            return shards[-1]
        shards = [shard for shard in shards if shard.shard_pass == shard_pass][-_MAX_COPIES:]
        before = [shard for shard in shards if shard.next_offset <= offset]
        if before:
            shard = max(before, key=lambda shard: shard.next_offset)
            shards.remove(shard)
        else:
            seeds = SampleSeeds(shard_pass.seed, self._stage, self._index, shard_pass.epoch, shard_pass.pass_index)
            shard = _Shard(self._loader, shard_pass, number, seeds, self.seeding)
        self._open[number] = [*shards, shard]
        return shard


def worker_info(worker_id: int, num_workers: int, seed: int, dataset: Any) -> Any:
    """Return what ``torch.utils.data.get_worker_info()`` returns in a ``DataLoader`` worker.

    Args:
        worker_id: Number of the worker, or of the virtual shard.
        num_workers: Number of workers, or of virtual shards.
        seed: Seed of the worker.
        dataset: The worker's copy of the dataset.
    """
    create: Any = torch_worker.WorkerInfo
    return create(id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset)


class _ShardInfo(torch_worker.WorkerInfo):
    """What ``get_worker_info()`` returns in a shard, whatever the name under which code calls it.

    Attributes:
        is_used: Whether code has read what tells it from other shards.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers", "dataset"):
            object.__setattr__(self, "is_used", True)
        return super().__getattribute__(name)


def show_worker_info(info: Any) -> None:
    """Make ``torch.utils.data.get_worker_info()`` return ``info``: a result of ``worker_info``, or None."""
    torch_worker._worker_info = info


def _copy_dataset(value: Any, known: dict[int, Any]) -> Any:
    """Copy a dataset, so that several iterators over it in one process do not affect each other.

    Copy the dataset, the datasets that it holds (directly, or in lists, tuples and dicts), and random generators. Share
    everything else: otherwise, samples in memory would be copied for every shard.

    Args:
        value: The dataset, or something that it holds.
        known: Copies by the id of the original, so that an object is copied once.
    """
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
            new.__dict__[name] = _copy_dataset(attribute, known)
    elif isinstance(value, dict) and any(isinstance(item, Dataset) for item in value.values()):
        new = {name: _copy_dataset(item, known) for name, item in value.items()}
    elif type(value) in (list, tuple) and any(isinstance(item, Dataset) for item in value):
        new = type(value)(_copy_dataset(item, known) for item in value)
    return new


class _Shard:
    """An open iterator over one virtual shard."""

    def __init__(
        self,
        loader: DataLoader[Any],
        shard_pass: _ShardPass,
        number: int,
        seeds: SampleSeeds,
        seeding: Seeding,
    ) -> None:
        self.shard_pass = shard_pass
        self.seeds = seeds
        self.next_offset = 0
        self._loader = loader
        self._number = number
        self._seeding = seeding
        self._stream: Any = None
        self._dataset: Any = None
        self._info: Any = None
        self._samples: Iterator[Any] | None = None
        self._is_over = False

    def samples(self, offset: int) -> tuple[list[Any] | None, Callable[[int], None] | None]:
        """Return the samples of the batch at an offset, at least ``next_offset``, and what seeds the collate function.

        There are no samples if the shard has fewer batches.
        """
        if self._is_over:
            return None, None
        stream = self._stream
        seed = self._seeding.resume(stream)
        samples = None
        while self.next_offset <= offset and (samples := self._take()) is not None:
            self.next_offset += 1
        self._seeding.pause(stream)
        return samples, seed

    @contextmanager
    def showing_worker_info(self) -> Iterator[None]:
        """Make ``get_worker_info()`` return this shard, only for the code of this loader."""
        before = torch_worker._worker_info
        if self._dataset is None and not self._is_over:
            self._copy_dataset()
        show_worker_info(self._info)
        try:
            yield
        finally:
            show_worker_info(before)

    def _copy_dataset(self) -> None:
        # A worker_init_fn may change any part of the dataset: copy all of it.
        has_init = self._loader.worker_init_fn is not None
        self._dataset = copy.deepcopy(self._loader.dataset) if has_init else _copy_dataset(self._loader.dataset, {})
        seed = self.seeds.of("shard", self._number)
        create: Any = _ShardInfo
        self._info = create(id=self._number, num_workers=self.shard_pass.num_shards, seed=seed, dataset=self._dataset)
        self._stream = StreamState(seed, HeldGenerators(self._dataset))
        # Alike in all shards, as in all workers of a DataLoader: a dataset may shuffle with it, and then take its part.
        self._stream.held.seed(self.seeds.of("dataset"))

    def _take(self) -> list[Any] | None:
        size = self._loader.batch_size or 1
        taken: list[Any] = []
        if self._samples is None:
            self._samples, taken = self._open()
        if taken or self.next_offset:
            taken += _next_samples(self._samples, size - len(taken))
        if taken and not (self._loader.drop_last and len(taken) < size):
            return taken
        self._is_over = True
        # Let go of buffers and files.
        self._samples = self._dataset = self._info = self._stream = None
        return None

    def _open(self) -> tuple[Iterator[Any], list[Any]]:
        """Open the shard, and return an iterator and its first sample, if it has any.

        Raises:
            DataSettingsError: The dataset does not split itself.
        """
        if self._loader.worker_init_fn is not None:
            self._loader.worker_init_fn(self._number)
            samples = iter(self._dataset)  # it may have split the parts of a ChainDataset
        else:
            samples = self._iterator(self._dataset)
        return samples, self._first_sample(self._dataset, samples)

    def _iterator(self, dataset: Any) -> Iterator[Any]:
        return self._chain(dataset) if type(dataset) is ChainDataset else iter(dataset)

    def _chain(self, dataset: Any) -> Iterator[Any]:
        """Yield the samples of all parts of a ``ChainDataset``, each of which must split itself."""
        for part in dataset.datasets:
            vars(self._info).pop("is_used", None)
            samples = self._iterator(part)
            taken = self._first_sample(part, samples)
            while taken:
                yield from taken
                taken = _next_samples(samples, 1)

    def _first_sample(self, dataset: Any, samples: Iterator[Any]) -> list[Any]:
        """Return the first sample, if there is one, after which a dataset that splits itself has asked for its part."""
        first = _next_samples(samples, 1)
        num_shards = self.shard_pass.num_shards
        if first and num_shards > 1 and not hasattr(self._info, "is_used"):
            raise DataSettingsError(
                f"{type(dataset).__qualname__}, the dataset of {self._seeding.name}, yielded a sample without "
                f"asking for its part of the data. Each of {num_shards} virtual shards (data_service.virtual_shards) "
                "would yield all samples. In __iter__, before the first sample, read id and num_workers of "
                "torch.utils.data.get_worker_info(), and yield only that part, as for several workers of a DataLoader. "
                "Or set data_service.virtual_shards=1, if there is a single trainer rank: then one worker reads all."
            )
        return first


def _next_samples(samples: Iterator[Any], number: int) -> list[Any]:
    """Return the next samples, fewer at the end."""
    if isinstance(samples, GeneratorType):
        return list(islice(samples, number))
    # islice() calls iter(), which restarts a dataset that is its own iterator.
    taken: list[Any] = []
    while len(taken) < number and (sample := next(samples, _END)) is not _END:
        taken.append(sample)
    return taken
