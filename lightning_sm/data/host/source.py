"""The parts of a user's ``DataLoader`` that are sent to a data host, as torch sends them to a spawned worker."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_sm.data.host.stand_ins import PartStandIn


@dataclass(frozen=True)
class WorkerSource:
    """The parts of a loader from which workers build batches.

    Attributes:
        name: Name of the loader, for messages.
        dataset: The dataset.
        collate_fn: Function that makes a batch from samples.
        worker_init_fn: Function to call in each worker with the worker's number, if any.
        has_ranks: Whether ``worker_init_fn`` also accepts the rank, like Lightning's.
        is_batched: Whether samples are collated into batches; if not, each sample is a batch.
        batch_size: Number of samples per batch, for an iterable dataset.
        drop_last: Whether an iterable dataset's last batch is dropped if it is incomplete.
        is_spawned: Whether workers are spawned, as with ``multiprocessing_context="spawn"``. The workers of
            loaders that hooks have created on the data hosts are always forked.
        trainer: The Trainer, if parts on the data hosts refer to it.
    """

    name: str
    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[..., None] | None
    has_ranks: bool
    is_batched: bool
    batch_size: int | None
    drop_last: bool
    is_spawned: bool
    trainer: Any

    @classmethod
    def of(cls, loader: DataLoader[Any], name: str, trainer: Any) -> WorkerSource:
        """Return the source of a loader.

        Args:
            loader: The loader.
            name: Name of the loader in messages.
            trainer: The Trainer, if any.
        """
        private: Any = loader
        init = loader.worker_init_fn
        # Lightning's function is bound to a rank. Unbind it, so that all ranks have equal sources, and a data host gets
        # the dataset only once.
        unbound = init.func if isinstance(init, partial) and _is_lightnings(init.func) else None
        parts = (loader.dataset, loader.collate_fn, unbound or init)
        stand_ins = [part for part in parts if isinstance(part, PartStandIn)]
        context: Any = loader.multiprocessing_context or multiprocessing
        return cls(
            name=name,
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            worker_init_fn=unbound or init,
            has_ranks=unbound is not None,
            is_batched=private._auto_collation,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            is_spawned=context.get_start_method(allow_none=True) in ("spawn", "forkserver") and not stand_ins,
            trainer=trainer if any(part.sees_trainer for part in stand_ins) else None,
        )

    def parts(self) -> dict[str, Any]:
        """Return the objects that the user has passed to the loader, by name."""
        return {name: getattr(self, name) for name in ("dataset", "collate_fn", "worker_init_fn")}

    def init_worker(self, number: int, rank: int) -> None:
        """Run the user's ``worker_init_fn``.

        Args:
            number: Number of the worker.
            rank: Rank of the iterator.
        """
        if self.worker_init_fn is not None:
            ranks = {"rank": rank} if self.has_ranks else {}
            self.worker_init_fn(number, **ranks)


def _is_lightnings(function: Any) -> bool:
    """Return whether a function is the ``worker_init_fn`` of ``seed_everything(workers=True)``."""
    module, name = (getattr(function, of, "") for of in ("__module__", "__name__"))
    return name == "pl_worker_init_function" and module.partition(".")[0] in ("lightning", "lightning_fabric")
