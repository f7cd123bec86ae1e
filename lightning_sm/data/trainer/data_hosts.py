"""The data hosts as a training process sees them: they run ``setup``, open loaders, and build batches for its rank."""

from __future__ import annotations

import logging
import os
import secrets
from functools import partial
from typing import Any, cast

from msgspec.structs import replace

from lightning_sm._lightning import CombinedLoader, IndexBatchSamplerWrapper, LightningDataModule
from lightning_sm.data.host.pickler import pickle_object
from lightning_sm.data.ipc.feeder_messages import LoaderPlace, OpenLoaders
from lightning_sm.data.plan.shards import default_num_shards
from lightning_sm.data.protocol.calls import Loaders, OpenRequest, SetUp, put_together
from lightning_sm.data.protocol.spec import TRAINER_VALUES, LoaderDescription, LoaderKind
from lightning_sm.data.trainer.bare_loaders import BareLoaders
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.last_step import LastStep
from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.position import Progress, position_of, reach, step_limit
from lightning_sm.data.trainer.script_state import state_at_first_run
from lightning_sm.data.trainer.travel import TravellingModule
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# A random number identifies a run of the Trainer, because data hosts may outlive it. Requests carry an int64.
_TRAINER_RUN_BITS = 62

# Hooks of the DataModule, of the LightningModule and of the strategy that get batches before they are on the device.
_COPYING_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "batch_to_device")


class DataHosts:
    """The data hosts of one trainer rank, as the source of a DataModule's loaders.

    Args:
        datamodule: The user's DataModule, which knows the Trainer.
        connection: The connection to the data hosts.
        seed: Base of shuffling and of all random states; None: that of ``seed_everything``, else 0.

    Attributes:
        module: The user's DataModule, as it travels to the data hosts.
        progress: Saves and restores the position in the data.
        last_step: Decides what to do where ranks have different numbers of samples.
    """

    def __init__(self, datamodule: LightningDataModule, connection: ServiceConnection, seed: int | None) -> None:
        self.module = TravellingModule.of(datamodule)
        self.connection = connection
        self.seed = seed
        self.progress = Progress()
        self.last_step = LastStep(connection.settings.tail)
        self._trainer_run = 0
        self._run_seed = 0
        self._stage = ""
        # By stage: the name of the request for its loaders, their structure, and the loaders.
        self._opened: dict[str, tuple[str, Any, list[RemoteLoader]]] = {}
        # The DataModule's plain attributes when the loaders for training were made, and those named in a warning.
        self._served: dict[str, str] = {}
        self._warned: set[str] = set()

    def set_up(self, stage: str) -> None:
        """Connect, and wait until the data hosts have run the user's ``setup``.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            DataServiceError: The data hosts are unreachable, they serve different data, or the user's code failed
                there.
        """
        self.module.begin_run(stage)
        self._stage = stage
        self._trainer_run = secrets.randbits(_TRAINER_RUN_BITS)
        self._run_seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed
        if self._trainer is not None:
            # The seed as well: a script may seed each rank differently, but all must compute the same plan.
            self._trainer_run, self._run_seed = self._trainer.strategy.broadcast((self._trainer_run, self._run_seed))
        self.connection.reporter.begin_run()
        self.progress.begin_run()
        self._opened.clear()
        self.connection.open(self._trainer)
        self.module.take(cast("SetUp", self._request_loaders("")))

    def loaders(self, stage: LoaderKind) -> Any:
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
        return put_together(structure, loaders.__getitem__, CombinedLoader)

    def end_run(self) -> None:
        """Report the last epoch of a run of the Trainer, and drop its loaders."""
        if self.connection.is_open:
            self.connection.reporter.end_epoch(self._trainer)
        self._opened.clear()

    @property
    def _trainer(self) -> Any:
        return self.module.datamodule.trainer

    def _request_loaders(self, loaders: LoaderKind) -> SetUp | Loaders:
        """Let the data hosts open their loaders of a stage, or only run ``setup`` if ``loaders`` is empty."""
        if loaders and isinstance(self.module.datamodule, BareLoaders):
            self.module.datamodule.make(loaders)
        message = self._open_message(loaders)
        return self.connection.feeder.open_loaders(message, self.connection.settings.startup_timeout_s)

    def _open_message(self, loaders: LoaderKind) -> OpenLoaders:
        request = OpenRequest(
            opening=self._request_name(loaders),
            trainer_run=self._trainer_run,
            stage=self._stage,
            loaders=loaders,
            epoch=self._reload_epoch(loaders),
            # Not the seed of a checkpoint, which is loaded after setup().
            seed=self._run_seed,
            prepares=True,
            trainer={name: getattr(self._trainer, name, None) for name in TRAINER_VALUES},
        )
        message = OpenLoaders(request, bool(self.module.datamodule.prepare_data_per_node))
        # Data hosts get the DataModule from rank 0 alone.
        is_rank_zero = self._trainer is None or self._trainer.global_rank == 0
        return self._with_datamodule(message) if is_rank_zero else message

    def _with_datamodule(self, message: OpenLoaders) -> OpenLoaders:
        """Give the feeder the DataModule as it is now, and add what the request says of it.

        Raises:
            DataSettingsError: An attribute cannot be pickled, or the script has changed a global that the code reads.
        """
        module, connection = self.module, self.connection
        if connection.is_of_job:
            state_at_first_run().check(module.datamodule)
        datamodule = module.pickled(by_name=connection.is_of_job)
        connection.feeder.share_snapshot(datamodule)
        state = "" if module.state is None else self._share_state(module.state)
        local = ""
        if connection.is_of_job and connection.settings.local_workers:
            pickled = module.pickled(by_name=False)
            connection.feeder.share_snapshot(pickled)
            local = pickled.digest
        request = replace(
            message.request,
            datamodule=datamodule.digest,
            values=module.values(),
            kept=module.kept(),
            earlier=list(module.earlier),
            state=state,
        )
        return replace(message, request=request, local_datamodule=local)

    def _share_state(self, state: dict[str, Any]) -> str:
        pickled = pickle_object(state, by_name=False)
        self.connection.feeder.share_snapshot(pickled)
        return pickled.digest

    def _request_name(self, loaders: str) -> str:
        """Return the name of a request for loaders: equal on all ranks, new for every run and every reload."""
        return f"{self._trainer_run}/{self._stage}/{loaders}/{self._reload_epoch(loaders)}"

    def _reload_epoch(self, loaders: str) -> int:
        """Return the epoch of the Trainer's last reload; 0 if loaders are for all epochs.

        Not the current epoch: a user's call of the hook in between gets the Trainer's own loaders, which stay open.
        """
        trainer = self._trainer
        every = getattr(trainer, "reload_dataloaders_every_n_epochs", 0)
        if not every or loaders not in ("train", "val"):
            return 0
        epoch = int(trainer.current_epoch)
        if self._stage != "fit":
            return epoch
        if loaders == "train":
            loop = trainer.fit_loop
            last = loop._last_train_dl_reload_epoch
        else:
            loop = trainer.fit_loop.epoch_loop.val_loop
            last = loop._last_val_dl_reload_epoch
        is_due = loop._combined_loader is None or epoch - last >= every
        return epoch if is_due else int(last)

    def _open_loaders(self, stage: LoaderKind) -> tuple[Any, list[RemoteLoader]]:
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
            slots = self.connection.slots(description, place, is_pinned=not self._copies_batches())
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
                self.connection.feeder,
                description,
                place,
                slots,
                lambda loader, iterator: position_of(loader, iterator, self._trainer),
            )
            loader.last_step = self.last_step
            loader.limit = partial(step_limit, loader, self._trainer)
            loader.reach = partial(reach, loader, self._trainer)
            if stage == "predict" and description.has_indices:
                loader.batch_sampler = _SeenIndices()
                loader.on_indices = loader.batch_sampler.seen_batch_indices.append
            loaders.append(loader)
        if stage == "train" and loaders:
            self._served = self.module.plain()
            loaders[0].on_epoch = self._begin_epoch
            if self._trainer is not None:
                for loader in loaders:
                    loader.on_wait = self.connection.reporter.begin_wait
                    loader.on_batch = partial(
                        self.connection.reporter.batch, self._trainer, is_step=loader is loaders[0]
                    )
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

    def _copies_batches(self) -> bool:
        """Return whether the user's own code copies batches to GPUs, on unknown streams."""
        trainer = self._trainer
        objects = (
            self.module.datamodule,
            getattr(trainer, "lightning_module", None),
            getattr(trainer, "strategy", None),
        )
        return any(_overrides(each, hook) for each in objects for hook in _COPYING_HOOKS)

    def _place(self, stage: str, index: int, description: LoaderDescription) -> LoaderPlace:
        settings = self.connection.settings
        rank, world_size = self._data_ranks(stage, description)
        origin = self.progress.origin
        num_shards = settings.virtual_shards or (None if origin is None else origin.num_shards(world_size))
        return LoaderPlace(
            request_name=self._request_name(stage),
            index=index,
            stage=stage,
            rank=rank,
            world_size=world_size,
            seed=self._run_seed if origin is None else origin.seed,
            window_batches=settings.window_batches
            or self.connection.default_window(1 if self._trainer is None else self._trainer.num_nodes),
            is_window_fixed=settings.window_batches is not None,
            window_bytes=settings.window_bytes,
            max_batch_bytes=settings.max_batch_bytes,
            timeout_s=settings.batch_timeout_s,
            compression=settings.compression or "",
            num_shards=num_shards or default_num_shards(world_size),
            # A validation whose shards restart, or that ends early, would give wrong metrics.
            batches_per_pass=settings.batches_per_epoch if stage == "train" else None,
        )

    def _data_ranks(self, stage: str, description: LoaderDescription) -> tuple[int, int]:
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
            if trainer.world_size > 1 and stage == "train" and description.own_sampler:
                raise DataSettingsError(
                    f"{description.name} has a {description.own_sampler}, and Trainer(use_distributed_sampler=False) "
                    f"leaves the split over {trainer.world_size} ranks to it. But on a data host, which serves all "
                    "ranks, it finds a world of one, so that all ranks would train on the same batches. Leave "
                    "use_distributed_sampler out: the data service then splits what the sampler yields. Or derive the "
                    "sampler from DistributedSampler, or give it the attributes rank and num_replicas, if it splits."
                )
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
        self.connection.reporter.end_epoch(self._trainer)
        self._warn_of_changes()
        self.progress.resume(self._trainer)

    def _warn_of_changes(self) -> None:
        """Warn of attributes that were changed since the loaders were made: data hosts have the earlier ones."""
        if self._trainer is None or not self._trainer.is_global_zero:
            return
        now = self.module.plain()
        for name, text in self._served.items():
            if now.get(name, text) != text and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "The attribute %s of %s has changed since train_dataloader() was called. Data hosts get it when "
                    "loaders are made again. If the dataset or the collate function reads it, set "
                    "Trainer(reload_dataloaders_every_n_epochs=1), or let them read self.trainer.current_epoch.",
                    name,
                    type(self.module.datamodule).__name__,
                )


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
