"""The ``RemoteDataLoader``: a ``DataLoader`` whose workers are on data hosts.

Everything else of it runs here, as in stock Lightning: dataset, samplers, length.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader

from lightning_sm.data.host.pickler import PickledObject, pickle_object
from lightning_sm.data.host.source import WorkerSource
from lightning_sm.data.protocol.openings import Opening, StreamWorker
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.remote_iterator import IteratorPosition, RemoteIterator
from lightning_sm.data.trainer.same_name import named_as
from lightning_sm.data.trainer.slots import SlotPool

logger = logging.getLogger(__name__)

_SLOW_PICKLE_S = 1.0

_TO_DATA_HOSTS = (
    "Data hosts get the dataset, the collate function and worker_init_fn of a loader, pickled, as the workers of "
    'DataLoader do with multiprocessing_context="spawn". Open it in __getitem__ when it is first needed, or in '
    "worker_init_fn, and leave it out in __getstate__. Or set data_service.hooks=data: data hosts then run the "
    "DataModule's hooks, and keep the datasets that these make."
)

# Names of the hooks that make the loaders of a stage, by Lightning's name of the stage.
HOOKS = {"train": "train", "sanity_check": "val", "validate": "val", "test": "test", "predict": "predict"}

# Hooks of the DataModule, of the LightningModule and of the strategy that get batches before they are on the device.
_COPYING_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "batch_to_device")


class RemoteDataLoader(DataLoader[Any]):
    """A ``DataLoader`` whose workers are on data hosts; made by ``remote_loader``."""

    # Of the class that ``remote_loader`` makes; pickling reads the second one.
    _remote: LoaderSource
    users_class: type[DataLoader[Any]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as the user's loader: the source belongs to this process."""
        return object.__new__, (self.users_class,), {**vars(self), "_iterator": None}

    def _get_iterator(self) -> Any:
        source = self._remote
        position, source.begins_at = source.begins_at, None
        iterator = RemoteIterator(self, source, position)
        source.iterator = weakref.ref(iterator)
        return iterator


class LoaderSource:
    """The source of one loader on the data hosts, and the memory for its batches.

    Args:
        connection: The connection to the data hosts.
        name: What messages call the loader.
        rank: This rank.
        world_size: Number of ranks.
        trainer: The Trainer; None if there is none.

    Attributes:
        iterator: The last iterator over the loader, as long as it lives.
        begins_at: Where the next one begins; None: at the first batch.
    """

    def __init__(
        self, connection: ServiceConnection, name: str, rank: int, world_size: int, trainer: Any = None
    ) -> None:
        self.connection = connection
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.trainer = trainer
        self.iterator: Callable[[], RemoteIterator | None] = lambda: None
        self.begins_at: IteratorPosition | None = None
        self._feeder: FeederClient | None = None
        self._slots: SlotPool | None = None
        self._digest = ""
        self._close: Callable[[], object] | None = None
        self._is_pinned = False
        self._is_spawned = False

    def limit(self, loader: DataLoader[Any]) -> float:
        """Return how many batches the Trainer reads at most; infinite if there is no limit. Call it at the first one.

        Args:
            loader: The loader, which need not have a length.
        """
        trainer = self.trainer
        stage = None if trainer is None else trainer.state.stage
        if stage is None:
            return math.inf
        found: float = math.inf
        limits = [getattr(trainer, f"limit_{HOOKS[stage.value]}_batches")]
        if stage.value == "train":
            # Fewer than this loader has where a shorter one ends the epoch, or where it begins again within the epoch.
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            found = max(0, trainer.num_training_batches - done)
        if stage.value == "sanity_check":
            limits.append(trainer.num_sanity_val_steps)
        for limit in limits:
            if isinstance(limit, int):
                found = min(found, limit)
            elif limit < 1.0:
                with suppress(TypeError, NotImplementedError):  # it has no length, and Lightning refuses the limit
                    found = min(found, int(len(loader) * limit))
        return found

    def reports(self, loader: DataLoader[Any]) -> tuple[bool, bool]:
        """Return whether batches are reported, as those of training are, and whether each is that of a step.

        Args:
            loader: The loader, of which an iterator begins.
        """
        trainer = self.trainer
        if trainer is None or not trainer.training:
            return False, False
        return True, trainer.fit_loop._combined_loader.flattened[0] is loader

    def pickled(self, loader: DataLoader[Any]) -> PickledObject:
        """Pickle what the loader is made of now, and connect to the data hosts, if that has not been done.

        Args:
            loader: The loader.
        """
        connection = self.connection
        is_quiet = self.trainer is not None and self.trainer.local_rank != 0
        connection.open(self.rank, self.world_size, is_quiet=is_quiet)
        if self._feeder is not connection.feeder:  # a connection ends with an exception, and begins again
            self._feeder, self._slots, self._digest, self._close = connection.feeder, None, "", None
        self._is_pinned = loader.pin_memory and self.trainer is not None and not _copies_batches(self.trainer)
        source = WorkerSource.of(loader, self.name, self.trainer)
        self._is_spawned = source.is_spawned
        began = time.monotonic()
        pickled = pickle_object(
            source,
            by_name=connection.is_of_job,
            named={f"{self.name}.{name}": part for name, part in source.parts().items()},
            advice=_TO_DATA_HOSTS,
        )
        seconds = time.monotonic() - began
        if seconds >= _SLOW_PICKLE_S and self.rank == 0:
            logger.info(
                "Pickling the dataset of %s (%.0f MB) took %.1f s. It is pickled whenever an iterator starts, so that "
                "data hosts see what has changed. persistent_workers=True keeps the iterator, and "
                "data_service.hooks=data keeps the dataset on the data hosts.",
                self.name,
                pickled.num_bytes / 1e6,
                seconds,
            )
        return pickled

    def opening(self, pickled: PickledObject, name: str, stream: StreamWorker | None = None) -> Opening:
        """Return an opening of what ``pickled`` has returned."""
        return Opening(name, pickled.digest, stream, is_spawned=self._is_spawned)

    def open(self, pickled: PickledObject, owner: object) -> Opening:
        """Let data hosts start the workers of an indexed dataset, and wait for them.

        Args:
            pickled: What ``pickled`` has returned.
            owner: What needs them, as long as it lives. Until the next call they stay in any case.

        Raises:
            DataServiceError: No data host can, or none did in time.
        """
        feeder, opening = self.connection.feeder, self.opening(pickled, pickled.digest)
        feeder.open_source(opening, pickled, owner)
        if pickled.digest != self._digest:
            close, self._close = self._close, feeder.open_source(opening, pickled, self)
            self._digest = pickled.digest
            if close is not None:
                close()
        self.wait(opening)
        return opening

    def wait(self, opening: Opening) -> None:
        """Wait until a data host has started workers.

        Raises:
            DataServiceError: None can, or none did in time.
        """
        self.connection.feeder.wait_for_source(
            opening, f"open the dataset of {self.name}", self.connection.settings.startup_timeout_s
        )

    @property
    def slots(self) -> SlotPool:
        """The memory for batches."""
        if self._slots is None:
            settings = self.connection.settings
            self._slots = SlotPool(
                self.connection.feeder,
                self.name,
                self.window_batches,
                settings.max_batch_bytes,
                is_pinned=self._is_pinned,
            )
            self.connection.add_slots(self._slots)
        return self._slots

    @property
    def window_batches(self) -> int:
        """Limit of requests in flight or buffered."""
        return self.connection.settings.window_batches or self.connection.default_window()


def remote_loader(loader: Any, source: LoaderSource) -> Any:
    """Return a loader whose workers are on data hosts; one that is no ``DataLoader`` stays as it is.

    It has the class of the user's loader, which reaches ``RemoteDataLoader`` by ``super()`` in its place between that
    class and ``DataLoader``, and its attributes.

    Args:
        loader: The loader.
        source: What becomes its source.
    """
    if isinstance(loader, RemoteDataLoader):
        return loader
    own = type(loader)
    why = _why_local(own)
    if why:
        # A list of batches, or a tensor, has nothing to load.
        if source.rank == 0 and hasattr(own, "__iter__") and own.__module__ not in ("builtins", "torch"):
            _warn_once(f"{own.__module__}.{own.__qualname__}", source.name, why)
        return loader
    bases = (RemoteDataLoader,) if own is DataLoader else (own, RemoteDataLoader)
    # A class of its own has the source: Lightning makes some loaders again from their class and their arguments.
    remote: Any = object.__new__(named_as(own, *bases, _remote=source, users_class=own))
    remote.__dict__.update(loader.__dict__)
    return remote


def _copies_batches(trainer: Any) -> bool:
    """Return whether the user's own code copies batches to GPUs, on streams that page-locked slots do not know of."""
    owners = (trainer.datamodule, trainer.lightning_module, trainer.strategy)
    return any(_overrides(owner, hook) for owner in owners for hook in _COPYING_HOOKS)


def _overrides(own: Any, hook: str) -> bool:
    """Return whether an object of Lightning has a hook of the user's: neither Lightning's own nor ours."""
    method = getattr(type(own), hook, None)
    known = ("lightning", "pytorch_lightning", "lightning_sm")
    return method is not None and method.__module__.partition(".")[0] not in known


def _why_local(own: type) -> str:
    """Return why a loader of a class cannot have its workers on data hosts; empty: it can."""
    if not issubclass(own, DataLoader):
        return "is no DataLoader"
    for cls in own.__mro__[: own.__mro__.index(DataLoader)]:
        for name in ("__iter__", "_get_iterator"):
            method = vars(cls).get(name)
            if isinstance(method, FunctionType) and "super" not in method.__code__.co_names:
                return f"has a {name}() of its own, which does not call that of DataLoader"
    return ""


@cache
def _warn_once(cls: str, name: str, why: str) -> None:
    logger.warning(
        "%s returns a %s, which %s: its batches are loaded here, as without data hosts. Data hosts load those of each "
        "DataLoader.",
        name,
        cls,
        why,
    )


def position_of(loader: Any) -> IteratorPosition | None:
    """Return where the last iterator over a loader is; None if there is none, or it has no workers on data hosts."""
    iterator = loader._remote.iterator() if isinstance(loader, RemoteDataLoader) else None
    return None if iterator is None else iterator.position


def begin_at(loader: RemoteDataLoader, position: IteratorPosition) -> None:
    """Let the next iterator over a loader go on like one of another run; a sampler is to skip what is done itself.

    Args:
        loader: The loader.
        position: Where the other one was.
    """
    loader._remote.begins_at = position
    loader._iterator = None  # that of persistent workers would begin again with its own seed
