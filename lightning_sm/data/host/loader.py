"""A loader of the user on a data host: its description, its sampler's order, and its batches."""

from __future__ import annotations

import hashlib
import multiprocessing
import platform
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.collate import collate_into
from lightning_sm.data.host.generators import seed_all
from lightning_sm.data.host.identity import describe_data
from lightning_sm.data.host.iterable import OpenShards, UserCodeError, show_worker_info, worker_info
from lightning_sm.data.host.rank_samplers import check_whole, has_torchs_split, make_whole, splits_by_rank
from lightning_sm.data.host.sampler import OrderArrays, SamplerPass, UserSampler, is_of_torch, most_samples, one_thread
from lightning_sm.data.host.seeding import Seeding
from lightning_sm.data.host.worker_notes import WorkerNotes
from lightning_sm.data.ipc.processes import in_fork
from lightning_sm.data.plan.seeds import SampleSeeds, worker_seed
from lightning_sm.data.protocol.calls import LoaderPass
from lightning_sm.data.protocol.spec import FIRST_BY_HAND, BatchSpec, LoaderDescription, OrderKind
from lightning_sm.errors import DataSettingsError


class ServedLoader:
    """One ``DataLoader`` of the user's DataModule.

    Args:
        loader: The user's loader.
        name: Its place in the return value of ``*_dataloader()``, for messages: ``train_dataloader()["a"]``.
        stage: "train", "val", "test" or "predict".
        index: Position among the loaders of the stage.
        seed: Seed of the run.
        epoch: Epoch for which the hook ran.

    Raises:
        DataSettingsError: It is not a DataLoader, its class iterates in another way, or its dataset cannot be served.
    """

    def __init__(self, loader: Any, name: str, stage: str, index: int, *, seed: int = 0, epoch: int = 0) -> None:
        if not isinstance(loader, DataLoader):
            raise DataSettingsError(
                f"{name} is a {type(loader).__name__}. Data hosts serve torch.utils.data.DataLoader objects, also in "
                "dicts, lists, tuples and CombinedLoader."
            )
        collate = _collate_of(loader, name)
        _refuse_mosaic_streaming(loader.dataset, name)
        self._loader = loader
        self._seed = seed
        self._first_epoch = epoch
        self._worker_info: Any = None
        self._dataset = loader.dataset
        self._collate = collate
        self._stage = stage
        self._index = index
        self._shards = OpenShards(loader, name, stage, index)
        self._keys: tuple[tuple[int, int, int], list[Any]] | None = None
        self._seeding: Seeding | None = None  # of the worker
        self._fetches_lists = _has_own_getitems(self._dataset)
        sampler = _outer_sampler_of(loader)
        most = most_samples(_length_of(self._dataset), _length_of(sampler))
        self._sampler = UserSampler(sampler, name, most)
        self._num_sampler_passes = 0  # passes of epochs that it has run in this process
        # A sampler that must yield all of the data, because it was that of one rank.
        self._whole: Any = None
        for part in self._sampler.parts:
            if splits_by_rank(part) and make_whole(part, name):
                self._whole = part
        order, num_samples, batch_size, drop_last = _order_of(loader, stage)
        data = [*describe_data(self._dataset, sampler), str(num_samples)]
        versions = [torch.__version__, np.__version__, platform.python_version()]
        cls = type(self._dataset)
        # Keys that are not integers stay on the data hosts: trainers request their positions in the order instead.
        self._is_positional = order in ("sampler", "batch_sampler") and not self._sampler.yields_indices(
            in_batches=order == "batch_sampler"
        )
        self.description = LoaderDescription(
            name=name,
            order=order,
            num_samples=num_samples,
            batch_size=batch_size,
            drop_last=drop_last,
            identity=_short_hash(data),
            fingerprint=_short_hash([*data, *versions]),
            dataset=cls.__qualname__ if num_samples is None else f"{cls.__qualname__} of {num_samples}",
            num_batches=_length_of(sampler) if order == "batch_sampler" else None,
            is_split=any(map(splits_by_rank, self._sampler.parts)),
            own_sampler=next((type(part).__name__ for part in self._sampler.parts if not is_of_torch(part)), ""),
            dataset_length=_length_of(self._dataset),
            num_workers=loader.num_workers,
            has_indices=order != "shards" and not self._is_positional,
        )

    def advance_sampler(self, loader_pass: LoaderPass) -> None:
        """Run the sampler for the passes of earlier epochs, as far as this process has not: its state goes on.

        Args:
            loader_pass: The pass that comes next.

        Raises:
            DataSettingsError: The sampler does not end.
        """
        earlier = self._passes_before(loader_pass.epoch, loader_pass.seed)
        # Workers, which run samplers whose items are no integers, do not know the limit.
        stop = loader_pass.earlier_stop if not self._is_positional else 0
        self._sampler.advance(earlier[self._num_sampler_passes :], stop)
        self._num_sampler_passes = max(self._num_sampler_passes, len(earlier))

    def sampler_order(self, loader_pass: LoaderPass) -> OrderArrays:
        """Run the user's sampler for one pass.

        Call it in a fork of the process that has run the earlier passes: every data host must return the same order.

        Args:
            loader_pass: The pass.

        Raises:
            DataSettingsError: The sampler does not end, or yields a part of the data.
        """
        seed, epoch, pass_index = loader_pass.seed, loader_pass.epoch, loader_pass.pass_index
        self._sampler.advance(self._passes_within(seed, epoch, pass_index))
        order = self._sampler.arrays(
            self._pass_of(seed, epoch, pass_index),
            loader_pass.stop if not self._is_positional else 0,
            in_batches=self.description.order == "batch_sampler",
            has_keys=not self._is_positional,
        )
        if self._whole is not None and not order.is_cut:
            check_whole(len(order.keys), len(self._whole.dataset), self.description.name)
        return order

    def batch(self, spec: BatchSpec, arena: Arena, notes: WorkerNotes) -> Any:
        """Return a batch, built in the arena if the collate function is torch's own.

        Args:
            spec: Everything that the batch depends on.
            arena: Memory for the batch.
            notes: The notes of the worker, which say at which sample it is.

        Raises:
            UserCodeError: The user's dataset, transform or collate function failed.

        Returns:
            The collated batch, or a ``ShardEnd`` for a shard without a batch at the requested offset.
        """
        if self.description.order == "shards":
            shards, shard, offset, _ = spec.keys.tolist()
            notes.set_text(f"batch {offset} of shard {shard} of {shards}")
            return self._shards.batch(spec)
        show_worker_info(self._worker_info)
        seeds = SampleSeeds(spec.seed, self._stage, self._index, spec.epoch, spec.pass_index)
        keys: list[Any] = spec.keys.tolist()
        if self._is_positional:
            all_keys = self._all_keys(spec)
            keys = [all_keys[position] for position in keys]
        if self._seeding is None:  # the worker has its own copy of the dataset by now
            self._seeding = Seeding(self.description.name, self._dataset, self._collate)
        seed = self._seeding.start(seeds.of("pass"))
        samples = self._samples(keys, seeds, spec, seed, notes)
        if seed:
            seed(seeds.of("batch", spec.position))
        notes.set_text(f"the collate function, for indices {keys[0]!r} to {keys[-1]!r}")
        try:
            if self.description.batch_size is None and self.description.order != "batch_sampler":
                return self._collate(samples[0])
            return collate_into(self._collate, samples, arena)
        except Exception as error:
            raise UserCodeError(f"index {keys!r}") from error

    def check_seeding(self) -> None:
        """Notice random draws that were not expected. Call it after the batches of a request."""
        seeding = self._shards.seeding if self.description.order == "shards" else self._seeding
        if seeding is not None:
            seeding.check()

    def enter_worker(self, host: str, worker_id: int, num_workers: int) -> None:
        """Set ``get_worker_info()`` and run the user's ``worker_init_fn``; shards do both when they open.

        Args:
            host: Name of the data host.
            worker_id: Number of the worker on its host.
            num_workers: Workers on the host.
        """
        if self.description.order == "shards":
            return
        seed = worker_seed(self._seed, host, self._stage, self._index, worker_id)
        self._worker_info = worker_info(worker_id, num_workers, seed, self._dataset)
        show_worker_info(self._worker_info)
        if self._loader.worker_init_fn is not None:
            # As in a DataLoader, a generator that it makes from torch.initial_seed() differs between workers.
            seed_all(seed)
            self._loader.worker_init_fn(worker_id)

    @property
    def start_method(self) -> str:
        """How its workers start: "fork", "spawn" or "forkserver", by the loader or by the script's own default."""
        context: Any = self._loader.multiprocessing_context or multiprocessing
        return context.get_start_method(allow_none=True) or "fork"

    def worker_parts(self) -> dict[str, Any]:
        """Return what a worker needs of the user's loader: what a worker of ``DataLoader`` gets."""
        names = ("dataset", "collate_fn", "worker_init_fn", "batch_size", "drop_last")
        return {name: getattr(self._loader, name) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the user's loader has beside this. It may be what cannot be pickled, such as a sampler."""
        loader: Any = SimpleNamespace(**self.worker_parts())
        return {
            **vars(self),
            "_loader": loader,
            "_shards": OpenShards(loader, self.description.name, self._stage, self._index),
            "_seeding": None,
            "_sampler": self._sampler if self._is_positional else None,
        }

    def _samples(
        self,
        keys: list[Any],
        seeds: SampleSeeds,
        spec: BatchSpec,
        seed: Callable[[int], None] | None,
        notes: WorkerNotes,
    ) -> list[Any]:
        if self._fetches_lists:
            if seed:
                seed(seeds.of("list", spec.position))
            notes.set_text(f"indices {keys[0]!r} to {keys[-1]!r}")
            try:
                return list(self._dataset.__getitems__(keys))  # type: ignore[attr-defined]  # torch's own protocol
            except Exception as error:
                raise UserCodeError(f"index {keys!r}") from error
        samples = []
        own_seeds = iter(seeds.of_samples(spec.positions) if seed else ())
        for key in keys:
            if seed:
                seed(next(own_seeds))
            if self._is_positional:
                notes.set_text(f"index {key!r}")
            else:
                notes.set_index(key)
            try:
                samples.append(self._dataset[key])
            except Exception as error:
                raise UserCodeError(f"index {key!r}") from error
        return samples

    def _all_keys(self, spec: BatchSpec) -> list[Any]:
        """Return the keys of a pass, for a sampler that does not yield integers."""
        pass_key = (spec.seed, spec.epoch, spec.pass_index)
        if self._keys is None or self._keys[0] != pass_key:
            # In a fork: samplers keep state, but all workers, even those that start later, must get the same keys.
            keys = in_fork(lambda: self._run_sampler(*pass_key))
            if self.description.order == "batch_sampler":
                keys = [key for batch in keys for key in batch]
            self._keys = (pass_key, keys)
        return self._keys[1]

    def _run_sampler(self, seed: int, epoch: int, pass_index: int) -> list[Any]:
        one_thread()
        earlier = [*self._passes_before(epoch, seed), *self._passes_within(seed, epoch, pass_index)]
        return self._sampler.order(self._pass_of(seed, epoch, pass_index), earlier)

    def _passes_before(self, epoch: int, seed: int) -> list[SamplerPass]:
        # "test" and "predict" have a single pass, whatever epoch training has reached.
        first = self._first_epoch if self._stage in ("train", "val") else epoch
        return [self._pass_of(seed, past, 0) for past in range(first, epoch)]

    def _passes_within(self, seed: int, epoch: int, pass_index: int) -> list[SamplerPass]:
        """Return the earlier passes of the epoch, if a CombinedLoader restarts this loader; none before one by hand."""
        num_earlier = pass_index if pass_index < FIRST_BY_HAND else 0
        return [self._pass_of(seed, epoch, number) for number in range(num_earlier)]

    def _pass_of(self, seed: int, epoch: int, pass_index: int) -> SamplerPass:
        return SamplerPass(epoch, SampleSeeds(seed, self._stage, self._index, epoch, pass_index))


def describe_structure(
    loaders: Any, name: str, stage: str, *, seed: int = 0, epoch: int = 0
) -> tuple[Any, list[ServedLoader]]:
    """Separate the loaders that a ``*_dataloader()`` hook returned from their containers.

    Args:
        loaders: A loader, or nested lists, tuples, dicts and ``CombinedLoader``s of loaders.
        name: The hook, for messages.
        stage: "train", "val", "test" or "predict".
        seed: Seed of the run.
        epoch: Epoch for which the hook ran.

    Raises:
        DataSettingsError: It contains something else.

    Returns:
        The structure as JSON values, with positions in place of loaders, and the loaders.
    """
    served: list[ServedLoader] = []

    def take_apart(part: Any, path: str) -> Any:
        if isinstance(part, dict):
            return {"dict": [[key, take_apart(value, f"{path}[{key!r}]")] for key, value in part.items()]}
        if isinstance(part, (list, tuple)):
            kind = "tuple" if isinstance(part, tuple) else "list"
            return {kind: [take_apart(value, f"{path}[{number}]") for number, value in enumerate(part)]}
        if hasattr(part, "iterables") and hasattr(part, "_mode"):  # CombinedLoader of either Lightning
            return {"combined": part._mode, "of": take_apart(part.iterables, path)}
        served.append(ServedLoader(part, path, stage, len(served), seed=seed, epoch=epoch))
        return len(served) - 1

    return take_apart(loaders, f"{name}()"), served


@dataclass(frozen=True)
class _FilteringCollate:
    """The collate function of a loader of torch_geometric, and what its iterator does to batches after that."""

    collate: Callable[[Any], Any]
    filter: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        return self.filter(self.collate(samples))


def _collate_of(loader: DataLoader[Any], name: str) -> Callable[[Any], Any]:
    """Return what makes a batch of samples, after checking that iterating over the loader does nothing else."""
    collate: Callable[[Any], Any] = loader.collate_fn
    for method in ("__iter__", "_get_iterator"):
        owner = next(cls for cls in type(loader).__mro__ if method in vars(cls))
        # torchdata's StatefulDataLoader yields what DataLoader yields.
        if owner.__module__.partition(".")[0] in ("torch", "torchdata"):
            continue
        # NodeLoader, LinkLoader and ZipLoader sample in collate_fn, and fetch the features of the sample either there,
        # with filter_per_worker, or in the iterator.
        filter_batch = getattr(loader, "filter_fn", None) if method == "_get_iterator" else None
        if owner.__module__.startswith("torch_geometric.loader.") and callable(filter_batch):
            if not loader.filter_per_worker:  # type: ignore[attr-defined]  # an attribute of these loaders
                collate = _FilteringCollate(collate, filter_batch)
            continue
        raise DataSettingsError(
            f"{name} is a {type(loader).__name__}, but data hosts do not call {owner.__qualname__}.{method}(): "
            "they build each batch themselves, from sampler, dataset and collate_fn. Move what the method does to "
            "batches into collate_fn, or into on_after_batch_transfer() of the DataModule, which runs on the trainers."
        )
    return collate


def _refuse_mosaic_streaming(dataset: Any, name: str) -> None:
    """Refuse a dataset whose workers wait for each other: on a data host, virtual shards open one after the other."""
    for cls in type(dataset).__mro__:
        # StreamingDataset._resume_incr_epoch() (streaming/base/dataset.py) is a barrier of all workers of the node.
        if cls.__module__.startswith("streaming.") and cls.__name__ == "StreamingDataset":
            raise DataSettingsError(
                f"The dataset of {name} is a StreamingDataset of MosaicML, whose workers wait for each other when a "
                "pass begins. On a data host they would wait forever: it reads virtual shards one after the other. "
                "Train without data hosts, or read the files with a dataset that splits itself by get_worker_info()."
            )


def _order_of(loader: DataLoader[Any], stage: str) -> tuple[OrderKind, int | None, int | None, bool]:
    """Return the order of a loader, the number of samples, the batch size, and whether the last batch is dropped."""
    if isinstance(loader.dataset, IterableDataset):
        return "shards", None, loader.batch_size, loader.drop_last
    batch_sampler: Any = loader.batch_sampler
    # Lightning predicts every sample, so predict loaders drop nothing.
    may_drop = stage != "predict"
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        if isinstance(batch_sampler, BatchSampler) and not may_drop:
            batch_sampler.drop_last = False
        return "batch_sampler", None, None, False
    sampler = _sampler_of(loader)
    size = None if batch_sampler is None else int(batch_sampler.batch_size)
    drop_last = may_drop and batch_sampler is not None and bool(batch_sampler.drop_last)
    dataset: Any = loader.dataset
    if type(sampler) is SequentialSampler:
        return "sequential", len(sampler), size, drop_last
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(dataset):
        return "shuffled", len(sampler), size, drop_last
    if isinstance(sampler, DistributedSampler) and has_torchs_split(sampler):
        # The plan splits the data over the ranks, too. It needs no padding, whatever their number, and the sampler's
        # drop_last only says that it needs none.
        samples: Any = sampler.dataset
        return "shuffled" if sampler.shuffle else "sequential", len(samples), size, drop_last
    return "sampler", len(sampler) if hasattr(sampler, "__len__") else None, size, drop_last


def _outer_sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the batch sampler of a class of the user's, or else the sampler of single samples."""
    batch_sampler: Any = loader.batch_sampler
    is_own = batch_sampler is not None and type(batch_sampler) is not BatchSampler
    return batch_sampler if is_own and not isinstance(loader.dataset, IterableDataset) else _sampler_of(loader)


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # Lightning treats both as "no length"
        return None


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of single samples, if the loader has one."""
    batch_sampler: Any = loader.batch_sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else loader.sampler


def _has_own_getitems(dataset: Any) -> bool:
    """Return whether a dataset fetches lists of samples. ``Subset`` only passes a list on to the dataset in it."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _short_hash(parts: list[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
