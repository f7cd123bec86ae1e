"""The ``RemoteDataLoader``, a ``DataLoader`` whose workers are on data hosts.

Everything else (dataset, samplers, length) stays in the training process, as in stock Lightning.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import count
from time import monotonic  # bound here, because tests of scripts may replace time.monotonic
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader

from lightning_sm.data.host.pickler import PickledObject, pickle_object
from lightning_sm.data.host.source import WorkerSource
from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.openings import Opening, StreamWorker
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.feeder_client import HeldOpening
from lightning_sm.data.trainer.remote_iterator import IteratorPosition, RemoteIterator
from lightning_sm.data.trainer.same_name import named_as

logger = logging.getLogger(__name__)

_SLOW_PICKLE_S = 1.0

# Numbers of iterators, for the names of their workers.
_NUMBERS = count()

_TO_DATA_HOSTS = (
    "A loader's dataset, collate function and worker_init_fn are pickled for data hosts, as they are for DataLoader "
    'workers with multiprocessing_context="spawn". Open such an object in __getitem__ when it is first needed, or in '
    "worker_init_fn, and leave it out in __getstate__. Or set data_service.hooks=data: data hosts then run the "
    "DataModule's hooks, and keep the datasets that these create."
)

# Prefix of the hook that returns the loaders for a stage, by Lightning's name for the stage.
HOOKS = {"train": "train", "sanity_check": "val", "validate": "val", "test": "test", "predict": "predict"}


class RemoteDataLoader(DataLoader[Any]):
    """A ``DataLoader`` whose workers are on data hosts; made by ``remote_loader``."""

    # Set on the class that ``remote_loader`` makes; pickling reads ``users_class``.
    _remote: LoaderSource
    users_class: type[DataLoader[Any]]
    _kept_workers: Any = None  # the last iterator's, for the next one

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the user's loader without the source, which belongs to this process."""
        own = {name: value for name, value in vars(self).items() if name != "_kept_workers"}
        return object.__new__, (self.users_class,), {**own, "_iterator": None}

    def _get_iterator(self) -> Any:
        source = self._remote
        position, source.begins_at = source.begins_at, None
        iterator = RemoteIterator(self, source, position)
        source.iterator = weakref.ref(iterator)
        self._kept_workers = iterator.held
        return iterator


class LoaderSource:
    """The source of one loader on the data hosts, and the memory for its batches.

    Args:
        connection: The connection to the data hosts.
        name: Name of the loader, for messages.
        rank: This rank.
        world_size: Number of ranks.
        trainer: The Trainer, if any.

    Attributes:
        iterator: Returns the last iterator over the loader, or None if it is gone.
        begins_at: Where the next iterator starts; None for the first batch.
        has_fixed_order: Whether the sampler, after the first batch of a pass, has drawn no random numbers from the
            process's generators; False until known.
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
        self.has_fixed_order = False

    def first_request(self, opening: Opening, seed: int, first: int, num_before: list[int] | None = None) -> FetchSpec:
        """Return a pass's request for its first batch, without indices; for the arguments, see ``FetchSpec``."""
        return FetchSpec(opening.name, self.rank, self.world_size, seed, first, 1, [], num_before or [])

    def limit(self, loader: DataLoader[Any]) -> float:
        """Return the maximum number of batches that the Trainer reads, or infinity. Call this at the first batch.

        Args:
            loader: The loader, which need not have a length.
        """
        trainer = self.trainer
        stage = None if trainer is None else trainer.state.stage
        if stage is None:
            return math.inf
        num_batches: float = math.inf
        limits = [getattr(trainer, f"limit_{HOOKS[stage.value]}_batches")]
        if stage.value == "train":
            # May differ from the loader's length: a shorter loader may end the epoch, or this loader may restart in it.
            done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            num_batches = max(0, trainer.num_training_batches - done)
        if stage.value == "sanity_check":
            limits.append(trainer.num_sanity_val_steps)
        for limit in limits:
            if isinstance(limit, int):
                num_batches = min(num_batches, limit)
            elif limit < 1.0:
                with suppress(TypeError, NotImplementedError):  # without a length, Lightning refuses such a limit
                    num_batches = min(num_batches, int(len(loader) * limit))
        return num_batches

    def note_order(self, *, is_fixed: bool) -> None:
        """Note whether the sampler had drawn all of its random numbers by the first batch of a pass."""
        self.has_fixed_order = is_fixed
        if not is_fixed and self.rank == 0:
            _log_once(
                logging.WARNING,
                "The sampler of %s draws random numbers for each batch, so data hosts build no more batches ahead than "
                "the loader's own workers would: num_workers * prefetch_factor. Raise them, or draw the order in "
                "__iter__.",
                self.name,
            )

    def reports(self, loader: DataLoader[Any]) -> tuple[bool, bool]:
        """Return whether to report batches (only in training), and whether each batch is a step.

        Args:
            loader: The loader over which an iterator starts.
        """
        trainer = self.trainer
        if trainer is None or not trainer.training:
            return False, False
        combined = trainer.fit_loop._combined_loader  # None before the loop starts
        return True, combined is not None and combined.flattened[0] is loader

    def open(self, loader: DataLoader[Any], streams: Sequence[StreamWorker] = ()) -> list[HeldOpening]:
        """Have the data hosts start workers for the loader's parts in their current state, and wait for them.

        Args:
            loader: The loader.
            streams: The workers of a loader over an iterable dataset.

        Returns:
            An opening for each stream or, without streams, one for the dataset. The workers run as long as it exists.

        Raises:
            DataServiceError: No data host can start workers, or none did in time.
        """
        connection = self.connection
        is_quiet = self.trainer is not None and self.trainer.local_rank != 0
        connection.open(self.rank, self.world_size, is_quiet=is_quiet)
        source = WorkerSource.of(loader, self.name, self.trainer)
        pickled = self._pickled(source)
        opening = partial(Opening, source=pickled.digest, is_spawned=source.is_spawned)
        prefix = f"{pickled.digest}/{self.rank}/{next(_NUMBERS)}"
        openings = [opening(f"{prefix}/{stream.number}", stream=stream) for stream in streams]
        held = connection.feeder.open_source(pickled, *openings or [opening(pickled.digest)])
        for one in held:
            connection.feeder.wait_for_source(
                one.opening, f"open the dataset of {self.name}", connection.settings.startup_timeout_s
            )
        return held

    def _pickled(self, source: WorkerSource) -> PickledObject:
        began = monotonic()
        pickled = pickle_object(
            source,
            by_name=self.connection.is_of_job,
            named={f"{self.name}.{name}": part for name, part in source.parts().items()},
            advice=_TO_DATA_HOSTS,
        )
        seconds = monotonic() - began
        if seconds >= _SLOW_PICKLE_S and self.rank == 0:
            logger.info(
                "Pickling the dataset of %s (%.0f MB) took %.1f s. It is pickled whenever an iterator starts, so that "
                "data hosts see your changes to it. To avoid this, keep the iterator (persistent_workers=True) or keep "
                "the dataset on the data hosts (data_service.hooks=data).",
                self.name,
                pickled.num_bytes / 1e6,
                seconds,
            )
        return pickled

    @property
    def window_batches(self) -> int:
        """Maximum number of requests in flight or buffered."""
        return self.connection.settings.window_batches or self.connection.default_window()


def remote_loader(loader: Any, source: LoaderSource) -> Any:
    """Return a loader whose workers are on data hosts; only a ``DataLoader`` is changed.

    The result has the attributes and the class of the user's loader, with ``RemoteDataLoader`` between that class and
    ``DataLoader`` in the MRO, so that ``super()`` reaches it.

    Args:
        loader: The loader.
        source: The source of the new loader.
    """
    if isinstance(loader, RemoteDataLoader):
        return loader
    own = type(loader)
    why = _why_local(own)
    if why:
        # Do not warn about a list of batches or a tensor: it needs no loading.
        if source.rank == 0 and hasattr(own, "__iter__") and own.__module__ not in ("builtins", "torch"):
            _log_once(
                logging.WARNING,
                "%s returns a %s, which %s: its batches are loaded here, as without data hosts. Data hosts serve only "
                "a DataLoader.",
                source.name,
                f"{own.__module__}.{own.__qualname__}",
                why,
            )
        return loader
    if loader.num_workers == 0 and source.rank == 0:
        _log_once(
            logging.INFO,
            "Data hosts also build the batches of loaders with num_workers=0, from a copy of the dataset: the next "
            "iterator sees what training changes in it, but not what the dataset changes in itself.",
        )
    bases = (RemoteDataLoader,) if own is DataLoader else (own, RemoteDataLoader)
    # Each loader needs its own class to hold the source: Lightning recreates some loaders from class and arguments.
    remote: Any = object.__new__(named_as(own, *bases, _remote=source, users_class=own))
    remote.__dict__.update(loader.__dict__)
    return remote


def _why_local(own: type) -> str:
    """Return why loaders of a class cannot have their workers on data hosts; empty if they can."""
    if not issubclass(own, DataLoader):
        return "is not a DataLoader"
    for cls in own.__mro__[: own.__mro__.index(DataLoader)]:
        for name in ("__iter__", "_get_iterator"):
            method = vars(cls).get(name)
            if isinstance(method, FunctionType) and "super" not in method.__code__.co_names:
                return f"overrides {name}() without calling DataLoader's"
    return ""


@cache
def _log_once(level: int, text: str, *values: str) -> None:
    logger.log(level, text, *values)


def position_of(loader: Any) -> IteratorPosition | None:
    """Return the position of a loader's last iterator; None without an iterator, or without workers on data hosts."""
    iterator = loader._remote.iterator() if isinstance(loader, RemoteDataLoader) else None
    return None if iterator is None else iterator.position


def begin_at(loader: RemoteDataLoader, position: IteratorPosition) -> None:
    """Have a loader's next iterator continue where another run's stopped; the sampler must skip earlier batches itself.

    Args:
        loader: The loader.
        position: Position of the other iterator.
    """
    loader._remote.begins_at = position
    loader._iterator = None  # an iterator kept for persistent workers would restart with another seed
