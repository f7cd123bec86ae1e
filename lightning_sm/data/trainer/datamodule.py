"""RemoteDataModule: stands in for the user's DataModule on a trainer, and fetches its batches from the data hosts."""

from __future__ import annotations

import inspect
import json
import logging
import os
import reprlib
import secrets
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from lightning_sm._lightning import (
    BatchSizeFinder,
    CombinedLoader,
    IndexBatchSamplerWrapper,
    LightningDataModule,
    rank_zero_only,
)
from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.host.data_host import LOCAL_JOB, DataHost
from lightning_sm.data.ipc.feeder_messages import LoaderPlace, OpenLoaders
from lightning_sm.data.plan.order import ORDER_VERSION
from lightning_sm.data.plan.shards import default_num_shards, max_slots_in_block
from lightning_sm.data.protocol.calls import HeartbeatRequest, Loaders, OpenRequest, SetUp
from lightning_sm.data.protocol.failures import first_line
from lightning_sm.data.protocol.plain_values import plain_value
from lightning_sm.data.protocol.spec import TRAINER_FACTS, LoaderFacts
from lightning_sm.data.protocol.tls import read_tls
from lightning_sm.data.settings import Credentials, DataServiceSettings, default_window
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.position import Progress, position_of
from lightning_sm.data.trainer.reporter import Reporter
from lightning_sm.data.trainer.slots import SlotPool
from lightning_sm.errors import DataServiceError, DataSettingsError, WireError

logger = logging.getLogger(__name__)
_warn_once = rank_zero_only(logger.warning)

_LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")

# A random number identifies a run of the Trainer, because data hosts may outlive it. Requests carry an int64.
_RUN_BITS = 62

# The user's hooks that run on the trainers. Lightning checks whether they are overridden, so it must find these.
_TRAINER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

# What a data host may replace on the class of the DataModule: defaults such as ``num_classes = None``, never a hook.
_PLAIN = (type(None), bool, int, float, str, list, tuple, set, dict)
_COPIED = "numbers, strings, and lists, tuples, sets and dicts of these, up to 64 KB"

# Hooks of the DataModule, of the LightningModule and of the strategy that get batches before they are on the device.
_COPYING_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "batch_to_device")


class RemoteDataModule(LightningDataModule):
    """Fetches the batches of a DataModule from data hosts.

    ``prepare_data``, ``setup``, ``*_dataloader`` and ``teardown`` run on the data hosts. ``on_before_batch_transfer``,
    ``transfer_batch_to_device``, ``on_after_batch_transfer``, ``state_dict`` and ``load_state_dict`` run here. Other
    attributes are those of the wrapped DataModule, including the plain values (numbers, strings, and lists, tuples,
    sets and dicts of these, up to 64 KB) that its ``setup`` set or changed on the data hosts.

    Args:
        datamodule: The user's DataModule. Its data need not be accessible from this machine.
        addresses: Addresses of the data hosts, ``host:port``.
        settings: Window, timeouts, credentials.
        seed: Base of shuffling and of all random states. Default: that of ``seed_everything``, else 0.
        job: Name of the job; the data hosts must use the same.

    Raises:
        DataSettingsError: There is no address, or the library for ``settings.compression`` is not installed.
    """

    # False in a job: a script may run the Trainer several times before training has finished.
    closes_on_teardown = True

    def __new__(cls, datamodule: LightningDataModule, *_: Any, **__: Any) -> RemoteDataModule:
        """Create an instance whose class has exactly the hooks that the user's DataModule overrides."""
        own = type(datamodule)
        hooks = {
            name: _loader_hook(name)
            for name in _LOADER_HOOKS
            if getattr(own, name, None) is not getattr(LightningDataModule, name)
        }
        # Checkpoints store the state of a DataModule under its class name, which must not depend on data hosts. The
        # private module hides the class from jsonargparse, which searches DataModules by name.
        names = {"__qualname__": own.__qualname__, "__module__": f"{__name__}._wrapped", "__doc__": own.__doc__}
        return super().__new__(type(own.__name__, (cls,), {**hooks, **names}))

    def __init__(
        self,
        datamodule: LightningDataModule,
        addresses: Sequence[str],
        *,
        settings: DataServiceSettings | None = None,
        seed: int | None = None,
        job: str = LOCAL_JOB,
    ) -> None:
        if not addresses:
            raise DataSettingsError("RemoteDataModule needs the address of at least one data host: addresses=[...].")
        settings = settings or DataServiceSettings()
        if settings.compression is not None:
            codec_of(settings.compression)  # report a missing library here instead of with the first batch
        # Lightning's own __init__ only sets attributes, and the wrapped DataModule has those already.
        self._datamodule = datamodule
        self._addresses = list(addresses)
        self._settings = settings
        self._seed = seed
        self._job = job
        self._run = 0
        self._run_seed = 0
        self._state_for_hosts = ""
        self._stage: str | None = None
        self._client: FeederClient | None = None
        self._local: DataHost | None = None
        # By stage: the name of the request for its loaders, their structure, and the loaders.
        self._opened: dict[str, tuple[str, Any, list[RemoteLoader]]] = {}
        self._pools: dict[tuple[str, int], SlotPool] = {}
        # What setup() has set on the data hosts, and is not copied.
        self._missing: frozenset[str] = frozenset()
        self._progress = Progress()
        self._reporter = Reporter(lambda: self._feeder)
        self._take_hooks()

    def _take_hooks(self) -> None:
        for name in _TRAINER_HOOKS:
            setattr(self, name, getattr(self._datamodule, name))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped DataModule."""
        if name.startswith("__") or name == "_datamodule":
            raise AttributeError(name)
        try:
            value = getattr(self._datamodule, name)
        except AttributeError as error:
            raise self._no_attribute(name) from error
        if value is None and name in self._missing:  # a default of the class
            raise self._no_attribute(name)
        return value

    def _no_attribute(self, name: str) -> AttributeError:
        return AttributeError(
            f"{type(self._datamodule).__name__} has no attribute {name!r} on a trainer. prepare_data() and setup() run "
            f"on the data hosts only. What setup() sets there is copied to the trainers if it is plain ({_COPIED})."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped DataModule, whose hooks and ``state_dict`` read it, unless it is our own."""
        if name.startswith("_") or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._datamodule, name, value)

    def __reduce__(self) -> Any:
        """Pickle what does not belong to this process; unpickling creates the class again."""
        state = {"_datamodule": self._datamodule, "closes_on_teardown": self.closes_on_teardown}
        arguments = {"settings": self._settings, "seed": self._seed, "job": self._job}
        # The DataModule is in the state, not an argument: it refers to the Trainer, and the Trainer to this object.
        return _rebuild, (type(self._datamodule), self._addresses, arguments), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the wrapped DataModule, which refers back to this object.

        Args:
            state: The state that ``__reduce__`` returned.
        """
        self.__dict__.update(state)
        self._take_hooks()

    @property
    def trainer(self) -> Any:
        """The Trainer, once Lightning has attached it, also as the wrapped DataModule sees it."""
        return self._datamodule.trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._datamodule.trainer = trainer

    @property
    def hparams(self) -> Any:
        """Hyperparameters of the wrapped DataModule."""
        return self._datamodule.hparams

    @property
    def hparams_initial(self) -> Any:
        """Hyperparameters of the wrapped DataModule, as ``save_hyperparameters`` recorded them."""
        return self._datamodule.hparams_initial

    def setup(self, stage: str = "fit") -> None:
        """Connect to the data hosts, and wait until the first one has run the user's ``setup``.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            DataServiceError: The data hosts are unreachable, they serve different data, or the user's code failed
                there.
        """
        trainer = self.trainer
        self._run = secrets.randbits(_RUN_BITS)
        self._run_seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed
        if trainer is not None:
            # The seed as well: a script may seed each rank differently, but all must compute the same plan.
            self._run, self._run_seed = trainer.strategy.broadcast((self._run, self._run_seed))
            if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
                raise DataSettingsError(
                    "BatchSizeFinder sets the batch size on the trainer, but the data hosts make the batches, with "
                    f"that of their {type(self._datamodule).__name__}. Find the batch size in a run without data "
                    "hosts, and pass it as an argument."
                )
            if self._progress not in trainer.callbacks:
                trainer.callbacks[:0] = [self._progress, self._reporter]
        self._stage = stage
        self._reporter.begin_run()
        self._opened.clear()
        if self._client is None:
            self._client = self._start_feeder()
        left = cast("SetUp", self._request_loaders(""))
        self._take_attributes(left.attributes)
        self._leave_out(left.missing)

    def _leave_out(self, names: Sequence[str]) -> None:
        """Note what ``setup`` has set on the data hosts and is not copied: it must not look as if it had not run."""
        for name in names:
            if vars(self._datamodule).get(name, self) is None:
                delattr(self._datamodule, name)
        self._missing = frozenset(names)
        stale = [name for name in names if inspect.getattr_static(self._datamodule, name, None) is not None]
        if stale and (self.trainer is None or self.trainer.is_global_zero):
            logger.warning(
                "setup() has replaced %s of %s on the data hosts by values that are not copied to the trainers (%s). "
                "Here they keep the values that they had before.",
                ", ".join(stale),
                type(self._datamodule).__name__,
                _COPIED,
            )

    def _take_attributes(self, attributes: dict[str, Any]) -> None:
        """Set the plain values that the user's ``setup`` has set on the data hosts."""
        for name, encoded in attributes.items():
            value = plain_value(encoded)
            own = inspect.getattr_static(type(self._datamodule), name, None)
            if not isinstance(own, _PLAIN):
                raise WireError(
                    f"A data host says that setup() set {name}={reprlib.repr(value)}, but in the class "
                    f"{type(self._datamodule).__name__} on this trainer {name} is a {type(own).__name__}. Only names "
                    "that the class does not have, or has as plain values, are copied to trainers. "
                    "If it is your setup(), give the value another name."
                )
            setattr(self._datamodule, name, value)

    def teardown(self, stage: str) -> None:
        """Disconnect from the data hosts, which run the user's ``teardown`` when no trainer needs them.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        if self._client is not None:
            self._reporter.end_epoch(self.trainer)
        self._opened.clear()
        if self.closes_on_teardown:
            self.close("finished")

    def on_exception(self, exception: BaseException) -> None:
        """Disconnect from the data hosts: after an exception Lightning does not call ``teardown``.

        Args:
            exception: The exception that ended the training.
        """
        try:
            self._datamodule.on_exception(exception)
        finally:
            self.close(f"{type(exception).__name__}: {first_line(str(exception))}")

    def close(self, outcome: str = "finished") -> None:
        """Disconnect this rank from the data hosts, and stop its feeder process.

        Args:
            outcome: How the training ended, for the logs of the data hosts.
        """
        self._opened.clear()
        if self._client is not None:
            self._client.close(outcome)
            self._client = None
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._local is not None:
            self._local.close()
            self._local = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped DataModule."""
        return self._datamodule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the wrapped DataModule.

        Args:
            state_dict: A state that ``state_dict`` returned.
        """
        self._datamodule.load_state_dict(state_dict)
        # Its loaders may depend on it: the stage of a curriculum, for example.
        try:
            self._state_for_hosts = json.dumps(state_dict)
        except (TypeError, ValueError) as error:
            _warn_once(
                "The state of %s cannot be sent to the data hosts (%s). Their loaders do not see it. Keep numbers, "
                "strings, lists and dicts in it.",
                type(self._datamodule).__name__,
                error,
            )

    @property
    def _feeder(self) -> FeederClient:
        if self._client is None:
            raise DataServiceError(
                "RemoteDataModule was used before setup(). A Trainer calls setup(); without one, call it yourself."
            )
        return self._client

    def _start_feeder(self) -> FeederClient:
        rank, world_size = self._ranks()
        addresses = list(self._addresses)
        if self._settings.local_workers:
            addresses.append(self._start_local_workers(world_size))
        name = f"rank {rank} on {socket.gethostname()}"
        client = HeartbeatRequest(name, world_size, wants_figures=rank == 0)
        credentials = Credentials.of(self._settings, self._job)
        read_tls(credentials)  # report an unreadable file here instead of in the feeder process
        is_quiet = self.trainer is not None and self.trainer.local_rank != 0
        feeder = FeederClient(addresses, credentials, client, self._settings.hedge_factor, is_quiet=is_quiet)
        weakref.finalize(self, feeder.close, "the process ended")
        return feeder

    def _start_local_workers(self, world_size: int) -> str:
        """Start the workers of this trainer host, in its first rank, and return their address for all its ranks."""
        trainer = self.trainer
        local_rank, node_rank = (0, 0) if trainer is None else (trainer.local_rank, trainer.node_rank)
        # An abstract socket leaves no file behind. Its name is the same in all ranks of the host, and no other job's.
        own = os.environ.get("MASTER_PORT", "") if world_size > 1 else str(os.getpid())
        address = f"unix-abstract:lightning_sm/{self._job}/{own}/{node_rank}"
        if local_rank == 0:
            host = DataHost(
                self._datamodule,
                address,
                self._settings.local_workers,
                settings=self._settings,
                job=self._job,
                name=f"{socket.gethostname()} (local workers)",
            )
            host.start()  # training begins with the other data hosts; this one joins them when it listens
            self._local = host
            weakref.finalize(self, host.close)
        return address

    def _request_loaders(self, loaders: str) -> SetUp | Loaders:
        """Let the data hosts open their loaders of a stage, or only run ``setup`` if ``loaders`` is empty."""
        trainer = self.trainer
        request = OpenRequest(
            opening=self._request_name(loaders),
            run=self._run,
            stage=self._stage or "",
            loaders=loaders,
            epoch=self._reload_epoch(loaders),
            # Not that of a checkpoint, which is loaded after setup().
            seed=self._run_seed,
            prepares=True,
            state=self._state_for_hosts,
            trainer={name: getattr(trainer, name, None) for name in TRAINER_FACTS},
        )
        message = OpenLoaders(request, bool(self._datamodule.prepare_data_per_node))
        return self._feeder.open_loaders(message, self._settings.startup_timeout_s)

    def _request_name(self, loaders: str) -> str:
        """Name of a request for loaders: the same on all ranks, and different for every run and every reload."""
        return f"{self._run}/{self._stage}/{loaders}/{self._reload_epoch(loaders)}"

    def _reload_epoch(self, loaders: str) -> int:
        """The epoch for which loaders are opened; 0 if they are for all."""
        every = getattr(self.trainer, "reload_dataloaders_every_n_epochs", 0)
        return self.trainer.current_epoch if every and loaders in ("train", "val") else 0

    def _ranks(self) -> tuple[int, int]:
        """Rank and world size."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _remote_loaders(self, stage: str) -> Any:
        name = self._request_name(stage)
        if stage not in self._opened or self._opened[stage][0] != name:
            self._opened[stage] = name, *self._open_loaders(stage)
        # The user may call the hook, too. Loaders are the same then, but each CombinedLoader has one iterator.
        _, structure, loaders = self._opened[stage]
        return _assembled(structure, loaders)

    def _open_loaders(self, stage: str) -> tuple[Any, list[RemoteLoader]]:
        """Open the loaders of a stage; return the structure in which the user's hook returned them, and the loaders."""
        opened = cast("Loaders", self._request_loaders(stage))
        loaders: list[RemoteLoader] = []
        for index, described in enumerate(opened.loaders):
            facts = described
            if self._is_overfitting and facts.order in ("shuffled", "sampler") and facts.dataset_length is not None:
                # As Lightning does it with a DataLoader: the order of the dataset, in all epochs.
                facts = replace(facts, order="sequential", num_samples=facts.dataset_length)
            place = self._place(stage, index, facts)
            slots = self._slots(stage, index, facts, place)
            _warn_of_unused_length(facts, place)
            if facts.order == "shards" and place.rank == 0 and stage == "train":
                logger.info(
                    "%s: %d virtual shards (data_service.virtual_shards). At most so many workers can read them at a "
                    "time, and each may end with a smaller batch.",
                    facts.name,
                    place.num_shards,
                )
            if self.trainer is not None and self.trainer.is_global_zero and not self._is_overfitting:
                _warn_of_kept_order(facts, place)
            loader = RemoteLoader(
                self._feeder, facts, place, slots, lambda loader, iterator: position_of(loader, iterator, self.trainer)
            )
            if stage == "predict" and facts.has_indices:
                loader.batch_sampler = _SeenIndices()
                loader.on_indices = loader.batch_sampler.seen_batch_indices.append
            loaders.append(loader)
        if stage == "train" and loaders:
            loaders[0].on_epoch = self._begin_epoch
            if self.trainer is not None:
                for loader in loaders:
                    loader.on_batch = partial(self._reporter.batch, self.trainer, is_step=loader is loaders[0])
            self._progress.follow(loaders)
        if loaders:
            logger.debug(
                "%s_dataloader(): for each of %d loaders, this rank requests up to %d batches (%.0f MB) ahead, and has "
                "memory for %d.",
                stage,
                len(loaders),
                loaders[0].place.window_batches,
                loaders[0].place.window_bytes / 1e6,
                loaders[0].slots.num_slots,
            )
        return opened.structure, loaders

    @property
    def _is_overfitting(self) -> bool:
        return self.trainer is not None and self._stage == "fit" and self.trainer.overfit_batches > 0

    def _slots(self, stage: str, index: int, facts: LoaderFacts, place: LoaderPlace) -> SlotPool:
        """Return the memory of the loader that had this place before, if it fits, else new memory."""
        slots = SlotPool(
            self._feeder,
            facts.name,
            place.window_batches,
            place.max_batch_bytes,
            is_pinned=not self._copies_batches(),
            num_in_turn=max_slots_in_block(place.num_shards, place.world_size) if facts.order == "shards" else 1,
        )
        old = self._pools.get((stage, index))
        if old is not None:
            if (old.num_slots, old.max_batch_bytes) == (slots.num_slots, slots.max_batch_bytes):
                return old
            old.close()
        self._pools[stage, index] = slots
        return slots

    def _copies_batches(self) -> bool:
        """Whether the user's own code copies batches to GPUs, on streams that we do not know."""
        trainer = self.trainer
        objects = (self._datamodule, getattr(trainer, "lightning_module", None), getattr(trainer, "strategy", None))
        return any(_overrides(each, hook) for each in objects for hook in _COPYING_HOOKS)

    def _place(self, stage: str, index: int, facts: LoaderFacts) -> LoaderPlace:
        settings = self._settings
        rank, world_size = self._data_ranks(facts)
        origin = self._progress.origin
        num_shards = settings.virtual_shards or (None if origin is None else origin.num_shards(world_size))
        return LoaderPlace(
            request_name=self._request_name(stage),
            index=index,
            stage=stage,
            rank=rank,
            world_size=world_size,
            seed=self._run_seed if origin is None else origin.seed,
            order_version=ORDER_VERSION if origin is None else origin.order_version,
            window_batches=settings.window_batches or self._default_window(),
            is_window_fixed=settings.window_batches is not None,
            window_bytes=settings.window_bytes,
            max_batch_bytes=settings.max_batch_bytes,
            timeout_s=settings.batch_timeout_s,
            compression=settings.compression or "",
            num_shards=num_shards or default_num_shards(world_size),
            # A validation whose shards restart, or that ends early, would give wrong metrics.
            batches_per_pass=settings.batches_per_epoch if stage == "train" else None,
        )

    def _data_ranks(self, facts: LoaderFacts) -> tuple[int, int]:
        """This rank, and the number of ranks, among those that split the data."""
        trainer = self.trainer
        # The strategy knows which ranks train on the same batches: those of a tensor parallel group, for example.
        ranks = None if trainer is None else trainer.distributed_sampler_kwargs
        if ranks is None:
            return 0, 1
        # It does not concern iterable datasets, which split themselves by rank; on a data host they cannot.
        splits_itself = facts.is_split or facts.order == "shards"
        if not trainer._accelerator_connector.use_distributed_sampler and not splits_itself:
            if trainer.world_size > 1 and trainer.is_global_zero:
                logger.warning(
                    "Trainer(use_distributed_sampler=False): all %d ranks get the same batches of %s. A data host "
                    "serves all ranks, and self.trainer.global_rank is 0 there. To split the data over the ranks, use "
                    "DistributedSampler, or leave use_distributed_sampler on.",
                    trainer.world_size,
                    facts.name,
                )
            return 0, 1  # every rank gets everything that the sampler yields
        return int(ranks["rank"]), int(ranks["num_replicas"])

    def _begin_epoch(self, _: int) -> None:
        """Report the last epoch and resume: Lightning announces an epoch to loaders before it reads its progress."""
        self._reporter.end_epoch(self.trainer)
        self._progress.resume(self.trainer)

    def _default_window(self) -> int:
        """Return the window for the workers that the data hosts have, as far as they are known."""
        hosts = self._feeder.state().hosts[: len(self._addresses)]  # the local workers come last, and late
        known = [host.workers for host in hosts if host.workers]
        workers = sum(known) * len(self._addresses) // max(1, len(known))
        workers += self._settings.local_workers * (1 if self.trainer is None else self.trainer.num_nodes)
        return default_window(workers, self._ranks()[1])


class _SeenIndices(IndexBatchSamplerWrapper):
    """Where Lightning's prediction loop looks for the indices of each batch, for ``BasePredictionWriter``."""

    def __init__(self) -> None:  # Lightning's own takes over the attributes of a batch sampler
        self.seen_batch_indices: list[list[int]] = []


def _warn_of_unused_length(facts: LoaderFacts, place: LoaderPlace) -> None:
    """Say why a loader has no length, although locally it has one."""
    if facts.order != "shards" or facts.dataset_length is None or place.batches_per_pass is not None:
        return
    if place.stage == "train" and place.world_size == 1:
        num_batches = -(-facts.dataset_length // (facts.batch_size or 1))
        logger.warning(
            "%s has no length here, although len() of its dataset is %d: each of its %d shards may end with a smaller "
            "batch. For schedulers that need trainer.estimated_stepping_batches, and for progress bars, set "
            "data_service.batches_per_epoch=%d.",
            facts.name,
            facts.dataset_length,
            place.num_shards,
            num_batches,
        )


def _warn_of_kept_order(facts: LoaderFacts, place: LoaderPlace) -> None:
    """Say where the order is another one than without data hosts."""
    if place.stage == "train" and facts.order == "sequential" and place.world_size > 1 and not facts.is_split:
        logger.warning(
            "%s does not shuffle, and its %d ranks train in its order. Without data hosts, Lightning shuffles such a "
            "loader on several ranks. To train as there, set shuffle=True.",
            facts.name,
            place.world_size,
        )


def _overrides(own: Any, hook: str) -> bool:
    """Whether an object of Lightning has a hook that is neither Lightning's own nor ours, which calls it."""
    method = getattr(type(own), hook, None)
    known = ("lightning", "pytorch_lightning", "lightning_sm")
    return method is not None and method.__module__.partition(".")[0] not in known


def _loader_hook(name: str) -> Callable[[RemoteDataModule], Any]:
    def hook(self: RemoteDataModule) -> Any:
        return self._remote_loaders(name.removesuffix("_dataloader"))

    hook.__name__ = name
    hook.__doc__ = f"Return loaders for the batches of the user's ``{name}`` on the data hosts."
    return hook


def _assembled(structure: Any, loaders: Sequence[RemoteLoader]) -> Any:
    """Put the loaders into the structure that the user's hook returned on the data hosts."""
    if isinstance(structure, int):
        return loaders[structure]
    if "dict" in structure:
        return {key: _assembled(part, loaders) for key, part in structure["dict"]}
    if "combined" in structure:
        return CombinedLoader(_assembled(structure["of"], loaders), structure["combined"])
    kind, parts = next(iter(structure.items()))
    assembled = [_assembled(part, loaders) for part in parts]
    return tuple(assembled) if kind == "tuple" else assembled


def _rebuild(own: type, addresses: list[str], arguments: dict[str, Any]) -> RemoteDataModule:
    return RemoteDataModule(object.__new__(own), addresses, **arguments)
