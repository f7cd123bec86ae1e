"""Iterable datasets, cut into virtual shards that do not depend on the shape of the cluster.

Shard v of V is what ``iter(dataset)`` yields when ``get_worker_info()`` says worker v of V: the protocol by which
iterable datasets split themselves for ``DataLoader`` workers. Batch k of a shard is found by its number, so that a
shard can go on in any worker of any host: it is opened anew there and skipped to the number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker

from lightning_sm.data.plan import SampleSeeds
from lightning_sm.data.random_state import RandomStates
from lightning_sm.data.spec import BatchSpec


class EndOfShard:
    """What a shard answers when it has no batch at an offset."""


END = EndOfShard()


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
        self._shards: dict[int, _Shard] = {}
        self._pass: tuple[int, int, int] | None = None

    def batch(self, spec: BatchSpec) -> Any:
        """Return the collated batch, or ``END``.

        Args:
            spec: The batch; its keys are number of shards, shard, offset.
        """
        num_shards, number, offset = spec.keys.tolist()
        which = (spec.seed, spec.epoch, spec.pass_index)
        if which != self._pass:
            self._pass = which
            self._shards.clear()
        shard = self._shards.get(number)
        if shard is None or shard.next_offset > offset:
            seeds = SampleSeeds(spec.seed, self._stage, self._index, spec.epoch, spec.pass_index)
            shard = self._shards[number] = _Shard(self._loader, number, num_shards, seeds.of(number))
        return shard.batch(offset)


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


class _Shard:
    """An open iterator over one virtual shard."""

    def __init__(self, loader: DataLoader[Any], number: int, num_shards: int, seed: int) -> None:
        self._loader = loader
        self._number = number
        self._num_shards = num_shards
        self._seed = seed
        self._random = RandomStates(seed)
        self._samples: Iterator[Any] | None = None
        self.next_offset = 0

    def batch(self, offset: int) -> Any:
        """Return the batch at an offset that is not behind ``next_offset``; what lies between is skipped."""
        show_worker_info(self._number, self._num_shards, self._seed, self._loader.dataset)
        with self._random:
            if self._samples is None:
                self._samples = iter(self._loader.dataset)
            while True:
                samples = self._take(self._samples)
                if samples is END:
                    return END
                self.next_offset += 1
                if self.next_offset > offset:
                    return self._loader.collate_fn(samples)

    def _take(self, samples: Iterator[Any]) -> Any:
        size = self._loader.batch_size
        if size is None:
            return next(samples, END)
        taken = [sample for _, sample in zip(range(size), samples, strict=False)]
        return END if not taken or (self._loader.drop_last and len(taken) < size) else taken
