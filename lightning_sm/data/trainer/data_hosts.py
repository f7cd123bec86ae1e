"""The data hosts as a training process sees them: they run ``setup``, open loaders, and build batches for its rank."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from lightning_sm._lightning import CombinedLoader, IndexBatchSamplerWrapper, LightningDataModule
from lightning_sm.data.host.data_host import DataHost
from lightning_sm.data.ipc.feeder_messages import LoaderPlace, OpenLoaders
from lightning_sm.data.plan.shards import default_num_shards, max_slots_in_block
from lightning_sm.data.protocol.calls import HeartbeatRequest, Loaders, OpenRequest, SetUp
from lightning_sm.data.protocol.spec import TRAINER_VALUES, LoaderDescription
from lightning_sm.data.protocol.tls import read_tls
from lightning_sm.data.settings import Credentials, DataServiceSettings, default_window
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.position import Progress, position_of
from lightning_sm.data.trainer.reporter import Reporter
from lightning_sm.data.trainer.slots import SlotPool
from lightning_sm.errors import DataServiceError

logger = logging.getLogger(__name__)

# A random number identifies a run of the Trainer, because data hosts may outlive it. Requests carry an int64.
_TRAINER_RUN_BITS = 62

# Hooks of the DataModule, of the LightningModule and of the strategy that get batches before they are on the device.
_COPYING_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "batch_to_device")


class DataHosts:
    """The data hosts of one trainer rank.

    Args:
        datamodule: The user's DataModule, which knows the Trainer.
        addresses: Addresses of the data hosts, ``host:port``.
        settings: Window, timeouts, credentials.
        seed: Base of shuffling and of all random states; None: that of ``seed_everything``, else 0.
        job: Name of the job.

    Attributes:
        datamodule: The user's DataModule.
        state: The state of the DataModule for the data hosts, as JSON; empty: it has none.
        progress: Saves and restores the position in the data.
        reporter: Reports what the rank and the data hosts measure.
    """

    def __init__(
        self,
        datamodule: LightningDataModule,
        addresses: Sequence[str],
        settings: DataServiceSettings,
        seed: int | None,
        job: str,
    ) -> None:
        self.addresses = list(addresses)
        self.settings = settings
        self.seed = seed
        self.job = job
        self.state = ""
        self.progress = Progress()
        self.reporter = Reporter(lambda: self.feeder)
        self.datamodule = datamodule
        self._trainer_run = 0
        self._run_seed = 0
        self._stage = ""
        self._client: FeederClient | None = None
        self._local: DataHost | None = None
        # By stage: the name of the request for its loaders, their structure, and the loaders.
        self._opened: dict[str, tuple[str, Any, list[RemoteLoader]]] = {}
        self._pools: dict[tuple[str, int], SlotPool] = {}

    @property
    def feeder(self) -> FeederClient:
        """The connection to the feeder process.

        Raises:
            DataServiceError: It has not started.
        """
        if self._client is None:
            raise DataServiceError(
                "RemoteDataModule was used before setup(). A Trainer calls setup(); without one, call it yourself."
            )
        return self._client

    def set_up(self, stage: str) -> SetUp:
        """Connect, and wait until the data hosts have run the user's ``setup``; return what it has set.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            DataServiceError: The data hosts are unreachable, they serve different data, or the user's code failed
                there.
        """
        self._trainer_run = secrets.randbits(_TRAINER_RUN_BITS)
        self._run_seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed
        if self._trainer is not None:
            # The seed as well: a script may seed each rank differently, but all must compute the same plan.
            self._trainer_run, self._run_seed = self._trainer.strategy.broadcast((self._trainer_run, self._run_seed))
        self._stage = stage
        self.reporter.begin_run()
        self._opened.clear()
        if self._client is None:
            self._client = self._start_feeder()
        return cast("SetUp", self._request_loaders(""))

    def loaders(self, stage: str) -> Any:
        """Return the loaders of a stage, in the structure in which the user's hook returned them on the data hosts.

        Args:
            stage: "train", "val", "test" or "predict".

        Raises:
            DataServiceError: As in ``set_up``.
        """
        name = self._request_name(stage)
        if stage not in self._opened or self._opened[stage][0] != name:
            self._opened[stage] = name, *self._open_loaders(stage)
        # The user may call the hook, too. Loaders are the same then, but each CombinedLoader has one iterator.
        _, structure, loaders = self._opened[stage]
        return _assemble(structure, loaders)

    def end_run(self) -> None:
        """Report the last epoch of a run of the Trainer, and drop its loaders."""
        if self._client is not None:
            self.reporter.end_epoch(self._trainer)
        self._opened.clear()

    def close(self, outcome: str, *, is_success: bool) -> None:
        """Disconnect this rank, and stop its feeder process.

        Args:
            outcome: How the training ended, for the logs of the data hosts.
            is_success: Whether it had all the batches that it needed.
        """
        self._opened.clear()
        if self._client is not None:
            self._client.close(outcome, is_success=is_success)
            self._client = None
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._local is not None:
            self._local.close()
            self._local = None

    @property
    def _trainer(self) -> Any:
        return self.datamodule.trainer

    def _start_feeder(self) -> FeederClient:
        rank, world_size = self._ranks()
        addresses = list(self.addresses)
        if self.settings.local_workers:
            addresses.append(self._start_local_workers(world_size))
        host = socket.gethostname()
        client = HeartbeatRequest(f"rank {rank} on {host}", world_size, wants_figures=rank == 0, host=host)
        credentials = Credentials.of(self.settings, self.job)
        read_tls(credentials)  # report an unreadable file here instead of in the feeder process
        is_quiet = self._trainer is not None and self._trainer.local_rank != 0
        feeder = FeederClient(addresses, credentials, client, self.settings.hedge_factor, is_quiet=is_quiet)
        weakref.finalize(self, feeder.close, "the process ended", is_success=True)
        return feeder

    def _start_local_workers(self, world_size: int) -> str:
        """Start the workers of this trainer host, in its first rank, and return their address for all its ranks."""
        trainer = self._trainer
        local_rank, node_rank = (0, 0) if trainer is None else (trainer.local_rank, trainer.node_rank)
        # An abstract socket leaves no file behind. Its name is the same in all ranks of the host, and no other job's.
        own = os.environ.get("MASTER_PORT", "") if world_size > 1 else str(os.getpid())
        address = f"unix-abstract:lightning_sm/{self.job}/{own}/{node_rank}"
        if local_rank == 0:
            host = DataHost(
                self.datamodule,
                address,
                self.settings.local_workers,
                settings=self.settings,
                job=self.job,
                name=f"{socket.gethostname()} (local workers)",
            )
            host.start()  # training begins with the other data hosts; this one joins them when it listens
            self._local = host
            weakref.finalize(self, host.close)
        return address

    def _request_loaders(self, loaders: str) -> SetUp | Loaders:
        """Let the data hosts open their loaders of a stage, or only run ``setup`` if ``loaders`` is empty."""
        trainer = self._trainer
        request = OpenRequest(
            opening=self._request_name(loaders),
            trainer_run=self._trainer_run,
            stage=self._stage,
            loaders=loaders,
            epoch=self._reload_epoch(loaders),
            # Not the seed of a checkpoint, which is loaded after setup().
            seed=self._run_seed,
            prepares=True,
            state=self.state,
            trainer={name: getattr(trainer, name, None) for name in TRAINER_VALUES},
        )
        message = OpenLoaders(request, bool(self.datamodule.prepare_data_per_node))
        return self.feeder.open_loaders(message, self.settings.startup_timeout_s)

    def _request_name(self, loaders: str) -> str:
        """Return the name of a request for loaders: equal on all ranks, new for every run and every reload."""
        return f"{self._trainer_run}/{self._stage}/{loaders}/{self._reload_epoch(loaders)}"

    def _reload_epoch(self, loaders: str) -> int:
        """Return the epoch for which loaders are opened; 0 if they are for all epochs."""
        every = getattr(self._trainer, "reload_dataloaders_every_n_epochs", 0)
        return self._trainer.current_epoch if every and loaders in ("train", "val") else 0

    def _ranks(self) -> tuple[int, int]:
        """Return rank and world size."""
        return (0, 1) if self._trainer is None else (self._trainer.global_rank, self._trainer.world_size)

    def _open_loaders(self, stage: str) -> tuple[Any, list[RemoteLoader]]:
        """Open the loaders of a stage; return the structure in which the user's hook returned them, and the loaders."""
        opened = cast("Loaders", self._request_loaders(stage))
        loaders: list[RemoteLoader] = []
        for index, original in enumerate(opened.loaders):
            description = original
            if (
                self._is_overfitting
                and description.order in ("shuffled", "sampler")
                and description.dataset_length is not None
            ):
                # As Lightning does with a DataLoader: the order of the dataset, in all epochs.
                description = replace(description, order="sequential", num_samples=description.dataset_length)
            place = self._place(stage, index, description)
            slots = self._slots(stage, index, description, place)
            _warn_of_unused_length(description, place)
            if description.order == "shards" and place.rank == 0 and stage == "train":
                logger.info(
                    "%s: %d virtual shards (data_service.virtual_shards). At most that many workers can read them at a "
                    "time, and each shard may end with a smaller batch.",
                    description.name,
                    place.num_shards,
                )
            if self._trainer is not None and self._trainer.is_global_zero and not self._is_overfitting:
                _warn_of_kept_order(description, place)
            loader = RemoteLoader(
                self.feeder,
                description,
                place,
                slots,
                lambda loader, iterator: position_of(loader, iterator, self._trainer),
            )
            if stage == "predict" and description.has_indices:
                loader.batch_sampler = _SeenIndices()
                loader.on_indices = loader.batch_sampler.seen_batch_indices.append
            loaders.append(loader)
        if stage == "train" and loaders:
            loaders[0].on_epoch = self._begin_epoch
            if self._trainer is not None:
                for loader in loaders:
                    loader.on_batch = partial(self.reporter.batch, self._trainer, is_step=loader is loaders[0])
            self.progress.follow(loaders)
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
        return self._trainer is not None and self._stage == "fit" and self._trainer.overfit_batches > 0

    def _slots(self, stage: str, index: int, description: LoaderDescription, place: LoaderPlace) -> SlotPool:
        """Return the memory of the loader that had this place before, if it fits, else new memory."""
        slots = SlotPool(
            self.feeder,
            description.name,
            place.window_batches,
            place.max_batch_bytes,
            is_pinned=not self._copies_batches(),
            num_in_turn=max_slots_in_block(place.num_shards, place.world_size) if description.order == "shards" else 1,
        )
        old = self._pools.get((stage, index))
        if old is not None:
            if (old.num_slots, old.max_batch_bytes) == (slots.num_slots, slots.max_batch_bytes):
                return old
            old.close()
        self._pools[stage, index] = slots
        return slots

    def _copies_batches(self) -> bool:
        """Return whether the user's own code copies batches to GPUs, on unknown streams."""
        trainer = self._trainer
        objects = (self.datamodule, getattr(trainer, "lightning_module", None), getattr(trainer, "strategy", None))
        return any(_overrides(each, hook) for each in objects for hook in _COPYING_HOOKS)

    def _place(self, stage: str, index: int, description: LoaderDescription) -> LoaderPlace:
        settings = self.settings
        rank, world_size = self._data_ranks(description)
        origin = self.progress.origin
        num_shards = settings.virtual_shards or (None if origin is None else origin.num_shards(world_size))
        return LoaderPlace(
            request_name=self._request_name(stage),
            index=index,
            stage=stage,
            rank=rank,
            world_size=world_size,
            seed=self._run_seed if origin is None else origin.seed,
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

    def _data_ranks(self, description: LoaderDescription) -> tuple[int, int]:
        """Return this rank, and the number of ranks, among those that split the data."""
        trainer = self._trainer
        # The strategy knows which ranks train on the same batches: those of a tensor parallel group, for example.
        ranks = None if trainer is None else trainer.distributed_sampler_kwargs
        if ranks is None:
            return 0, 1
        # use_distributed_sampler does not concern iterable datasets, which split themselves by rank: on a data host,
        # they cannot.
        splits_itself = description.is_split or description.order == "shards"
        if not trainer._accelerator_connector.use_distributed_sampler and not splits_itself:
            if trainer.world_size > 1 and trainer.is_global_zero:
                logger.warning(
                    "Trainer(use_distributed_sampler=False): all %d ranks get the same batches of %s. A data host "
                    "serves all ranks, and self.trainer.global_rank is 0 there. To split the data over the ranks, use "
                    "DistributedSampler, or leave use_distributed_sampler on.",
                    trainer.world_size,
                    description.name,
                )
            return 0, 1  # every rank gets everything that the sampler yields
        return int(ranks["rank"]), int(ranks["num_replicas"])

    def _begin_epoch(self, _: int) -> None:
        """Report the last epoch and resume: Lightning announces an epoch to loaders before it reads its progress."""
        self.reporter.end_epoch(self._trainer)
        self.progress.resume(self._trainer)

    def _default_window(self) -> int:
        """Return the window for the workers that the data hosts have, as far as they are known."""
        hosts = self.feeder.snapshot().hosts[: len(self.addresses)]  # the local workers come last, and late
        known = [host.workers for host in hosts if host.workers]
        workers = sum(known) * len(self.addresses) // max(1, len(known))
        workers += self.settings.local_workers * (1 if self._trainer is None else self._trainer.num_nodes)
        return default_window(workers, self._ranks()[1])


class _SeenIndices(IndexBatchSamplerWrapper):
    """The indices of each batch, where Lightning's prediction loop looks for them, for ``BasePredictionWriter``."""

    def __init__(self) -> None:  # Lightning's own takes over the attributes of a batch sampler
        self.seen_batch_indices: list[list[int]] = []


def _warn_of_unused_length(description: LoaderDescription, place: LoaderPlace) -> None:
    """Warn that a loader has no length, although locally it has one."""
    if description.order != "shards" or description.dataset_length is None or place.batches_per_pass is not None:
        return
    if place.stage == "train" and place.world_size == 1:
        num_batches = -(-description.dataset_length // (description.batch_size or 1))
        logger.warning(
            "%s has no length here, although len() of its dataset is %d: each of its %d shards may end with a smaller "
            "batch. For schedulers that need trainer.estimated_stepping_batches, and for progress bars, set "
            "data_service.batches_per_epoch=%d.",
            description.name,
            description.dataset_length,
            place.num_shards,
            num_batches,
        )


def _warn_of_kept_order(description: LoaderDescription, place: LoaderPlace) -> None:
    """Warn if Lightning would shuffle the loader without data hosts."""
    if (
        place.stage == "train"
        and description.order == "sequential"
        and place.world_size > 1
        and not description.is_split
    ):
        logger.warning(
            "%s does not shuffle, and its %d ranks train in its order. Without data hosts, Lightning shuffles such a "
            "loader on several ranks. To shuffle here too, set shuffle=True.",
            description.name,
            place.world_size,
        )


def _overrides(own: Any, hook: str) -> bool:
    """Return whether an object of Lightning has a hook of the user's: neither Lightning's own nor ours."""
    method = getattr(type(own), hook, None)
    known = ("lightning", "pytorch_lightning", "lightning_sm")
    return method is not None and method.__module__.partition(".")[0] not in known


def _assemble(structure: Any, loaders: Sequence[RemoteLoader]) -> Any:
    """Put the loaders into the structure that the user's hook returned on the data hosts."""
    if isinstance(structure, int):
        return loaders[structure]
    if "dict" in structure:
        return {key: _assemble(part, loaders) for key, part in structure["dict"]}
    if "combined" in structure:
        return CombinedLoader(_assemble(structure["of"], loaders), structure["combined"])
    kind, parts = next(iter(structure.items()))
    assembled = [_assemble(part, loaders) for part in parts]
    return tuple(assembled) if kind == "tuple" else assembled
