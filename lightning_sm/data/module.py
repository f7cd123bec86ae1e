"""RemoteDataModule: the user's DataModule on a trainer, with its loaders on the data hosts."""

from __future__ import annotations

import logging
import math
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lightning_sm._lightning import CombinedLoader, LightningDataModule
from lightning_sm.data.client import FeederClient
from lightning_sm.data.compression import codec_of
from lightning_sm.data.host import LOCAL_JOB, DataHost
from lightning_sm.data.loader import LoaderPlace, Position, RemoteLoader
from lightning_sm.data.metrics import LoaderStats, host_line, verdict, with_busy_fraction
from lightning_sm.data.resume import LoaderPosition, SavedPosition
from lightning_sm.data.settings import Credentials, DataServiceSettings
from lightning_sm.data.spec import LoaderFacts
from lightning_sm.data.tls import read_tls
from lightning_sm.data.trainer_facts import TRAINER_FACTS
from lightning_sm.errors import DataServiceError, DataSettingsError

logger = logging.getLogger(__name__)

_LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")

# Beside the user's own entries in the state of the DataModule.
_POSITION_KEY = "lightning_sm.data"

_SMALLEST_WINDOW, _LARGEST_WINDOW = 4, 256

# Hooks of the user that belong to the trainers. Lightning asks whether they are overridden, and finds the user's own.
_TRAINER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class RemoteDataModule(LightningDataModule):
    """Fetches the batches of a DataModule from data hosts.

    On the data hosts run ``prepare_data``, ``setup``, ``*_dataloader`` and ``teardown``; here run
    ``on_before_batch_transfer``, ``transfer_batch_to_device``, ``on_after_batch_transfer``, ``state_dict`` and
    ``load_state_dict``. Attributes of the wrapped DataModule shine through, and so do the plain values that its
    ``setup`` left on the data hosts.

    Args:
        datamodule: The user's DataModule; this machine need not see its data.
        addresses: The data hosts, ``host:port`` each.
        settings: Window, timeouts, credentials.
        seed: Base of shuffling and of all random states. Default: that of ``seed_everything``, else 0.
        job: Name of the job; data hosts must use the same.
    """

    def __new__(cls, datamodule: LightningDataModule, *_: Any, **__: Any) -> RemoteDataModule:
        """Make an instance whose class has exactly the hooks that the user's DataModule overrides."""
        own = type(datamodule)
        hooks = {
            name: _loader_hook(name)
            for name in _LOADER_HOOKS
            if getattr(own, name, None) is not getattr(LightningDataModule, name)
        }
        # Checkpoints hold the state of a DataModule under the name of its class: with and without data hosts alike.
        # A private module keeps the class out of jsonargparse's search for DataModules by name.
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
            codec_of(settings.compression)  # a missing library must not come out with the first batch
        self._datamodule = datamodule
        super().__init__()
        self._addresses = list(addresses)
        self._settings = settings
        self._seed = seed
        self._job = job
        self._num_runs = 0
        self._stage: str | None = None
        self._client: FeederClient | None = None
        self._local: DataHost | None = None
        self._saved: SavedPosition | None = None
        self._reported: dict[str, dict[str, Any]] = {}
        self._loaders: dict[str, list[RemoteLoader]] = {}
        # Between two runs of the Trainer in one script, data hosts must not take the first for the end of the job.
        self.closes_on_teardown = True
        for name in _TRAINER_HOOKS:
            setattr(self, name, getattr(datamodule, name))

    def __getattr__(self, name: str) -> Any:
        """Look for what is not here on the wrapped DataModule."""
        if name.startswith("__") or name == "_datamodule":
            raise AttributeError(name)
        try:
            return getattr(self._datamodule, name)
        except AttributeError as error:
            raise AttributeError(
                f"{type(self._datamodule).__name__} has no attribute {name!r} on a trainer. prepare_data() and setup() "
                "run on the data hosts only; numbers, strings, lists and dicts of these that setup() sets there are "
                "copied, other values are not."
            ) from error

    def __reduce__(self) -> Any:
        """Pickle the wrapped DataModule: the class of this object is made anew."""
        arguments = {"settings": self._settings, "seed": self._seed, "job": self._job}
        return _rebuild, (self._datamodule, self._addresses, arguments)

    @property
    def trainer(self) -> Any:
        """The Trainer, once Lightning has attached it; the wrapped DataModule sees it, too."""
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
        """Hyperparameters of the wrapped DataModule, as they were saved."""
        return self._datamodule.hparams_initial

    def setup(self, stage: str) -> None:
        """Connect to the data hosts, and wait until the first has run the user's ``setup``.

        Args:
            stage: "fit", "validate", "test" or "predict".

        Raises:
            DataServiceError: The data hosts cannot be reached, disagree, or the user's code failed there.
        """
        self._num_runs += 1
        self._stage = stage
        self._loaders.clear()
        if self._client is None:
            self._client = self._start_feeder()
        for name, value in self._open("")["attributes"].items():
            setattr(self._datamodule, name, value)

    def teardown(self, stage: str) -> None:
        """Let go of the data hosts, which run the user's ``teardown`` when nobody needs them any more.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        self._loaders.clear()
        if self.closes_on_teardown:
            self.close("finished")

    def on_exception(self, exception: BaseException) -> None:
        """Let go of the data hosts: after an exception Lightning does not call ``teardown``.

        Args:
            exception: What ended the training.
        """
        try:
            self._datamodule.on_exception(exception)
        finally:
            self.close(f"{type(exception).__name__}: {exception}")

    def close(self, outcome: str = "finished") -> None:
        """Tell the data hosts that this rank needs them no longer, and end its feeder.

        Args:
            outcome: How the training ended, for their logs.
        """
        client, self._client = self._client, None
        local, self._local = self._local, None
        if client is not None:
            client.close(outcome)
        if local is not None:
            local.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped DataModule, and the position of the training in the data.

        Lightning drops the state of loaders when ``estimated_stepping_batches`` is read (issue 20550), but never
        that of a DataModule.
        """
        state = dict(self._datamodule.state_dict())
        loaders = self._loaders.get("train")
        if loaders and self.trainer is not None:
            fit_loop = self.trainer.fit_loop
            position = SavedPosition(
                seed=loaders[0].place.seed,
                epoch=fit_loop.epoch_progress.current.processed,
                batches=fit_loop.epoch_loop.batch_progress.current.ready,
                loaders=_positions(loaders),
            )
            state[_POSITION_KEY] = position.to_json()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the wrapped DataModule, and the position of the training in the data.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            ResumeError: The position was written by a version that this one does not know.
        """
        state = dict(state_dict)
        position = state.pop(_POSITION_KEY, None)
        self._saved = None if position is None else SavedPosition.from_json(position)
        if self._saved is not None:
            # Another seed would make another order of the rest of the epoch.
            self._seed = self._saved.seed
        self._datamodule.load_state_dict(state)

    @property
    def _feeder(self) -> FeederClient:
        if self._client is None:
            raise DataServiceError("The loaders are asked for before setup(): a Trainer calls it, or call it yourself.")
        return self._client

    def _start_feeder(self) -> FeederClient:
        rank, world_size = self._ranks()
        addresses = [*self._addresses, *self._local_host()]
        client = {"client": f"rank {rank} on {socket.gethostname()}", "world_size": world_size}
        credentials = Credentials.of(self._settings, self._job)
        read_tls(credentials)
        feeder = FeederClient(addresses, credentials, client, self._settings.hedge_factor)
        weakref.finalize(self, feeder.close, "the process ended")
        return feeder

    def _local_host(self) -> list[str]:
        """Start the workers of this trainer host, in its first rank, and return where all of its ranks reach them."""
        if not self._settings.local_workers:
            return []
        trainer = self.trainer
        local_rank, node_rank = (0, 0) if trainer is None else (trainer.local_rank, trainer.node_rank)
        # Abstract, so that no file is left behind; of the same name in all ranks of the host, and in no other job's.
        own = os.environ.get("MASTER_PORT", "") if self._ranks()[1] > 1 else str(os.getpid())
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
            self._local = host.__enter__()
            weakref.finalize(self, host.close)
        return [address]

    def _open(self, loaders: str) -> dict[str, Any]:
        trainer = self.trainer
        request: dict[str, Any] = {
            "opening": self._opening(loaders),
            "run": self._num_runs,
            "stage": self._stage,
            "loaders": loaders,
            "trainer": {name: getattr(trainer, name, None) for name in TRAINER_FACTS},
        }
        return self._feeder.open(request["opening"], request, self._settings.startup_timeout_s)

    def _opening(self, loaders: str) -> str:
        """Name of an opening: the same on all ranks, another one for every run and every reload."""
        every = getattr(self.trainer, "reload_dataloaders_every_n_epochs", 0)
        epoch = self.trainer.current_epoch if every and loaders in ("train", "val") else 0
        return f"{self._num_runs}/{self._stage}/{loaders}/{epoch}"

    def _ranks(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _remote_loaders(self, stage: str) -> Any:
        reply = self._open(stage)
        loaders = []
        for index, facts in enumerate(reply["loaders"]):
            loader = RemoteLoader(self._feeder, LoaderFacts.from_json(facts), self._place(stage, index), self._position)
            loaders.append(loader)
        if stage == "train" and loaders:
            loaders[0].on_epoch = self._fit_progress
            loaders[0].on_batch = self._report
        self._loaders[stage] = loaders
        if loaders and (self.trainer is None or self.trainer.local_rank == 0):
            logger.info(
                "%s_dataloader(): a rank holds at most %d batches for each of %d loader(s), of which %d are a window "
                "that shrinks to %.0f MB when batches are large.",
                stage,
                loaders[0].num_slots,
                len(loaders),
                loaders[0].place.window_batches,
                loaders[0].place.window_bytes / 1e6,
            )
        return _assembled(reply["structure"], loaders)

    def _place(self, stage: str, index: int) -> LoaderPlace:
        settings = self._settings
        rank, world_size = self._ranks()
        if self.trainer is not None and not self.trainer._accelerator_connector.use_distributed_sampler:
            rank, world_size = 0, 1  # the user splits the data: every rank gets all that the sampler yields
        return LoaderPlace(
            opening=self._opening(stage),
            index=index,
            stage=stage,
            rank=rank,
            world_size=world_size,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed,
            window_batches=settings.window_batches or self._default_window(),
            window_bytes=settings.window_bytes,
            max_batch_bytes=settings.max_batch_bytes,
            timeout_s=settings.batch_timeout_s,
            compression=settings.compression or "",
        )

    def _fit_progress(self, _: int) -> None:
        """Translate the Trainer's batch count when a run of another shape is resumed in the middle of an epoch.

        Lightning announces each epoch to the loaders right before it looks at its progress.
        """
        saved, self._saved = self._saved, None
        if saved is None or not self.trainer.fit_loop.restarting:
            return
        batches, num_repeated = saved.batches_for(_positions(self._loaders["train"]))
        if batches == saved.batches:
            return
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        logger.warning(
            "The checkpoint was saved after batch %d of epoch %d, which is batch %d for %d ranks; %d samples repeat.",
            saved.batches,
            saved.epoch,
            batches,
            self._ranks()[1],
            num_repeated,
        )
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, max(0, getattr(progress, name) - saved.batches + batches))

    def _report(self, loader: RemoteLoader) -> None:
        """Log metrics now and then, and lines at the end of an epoch; called for every training batch."""
        trainer = self.trainer
        if trainer is None:
            return
        is_last = trainer.fit_loop.epoch_loop.batch_progress.current.ready + 1 >= trainer.num_training_batches
        is_due = trainer.loggers and loader.stats.num_batches % trainer.log_every_n_steps == 0
        if not (is_last or is_due):
            return
        state = self._feeder.state()
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for log in trainer.loggers:
            log.log_metrics(loader.stats.metrics(state), step=step)
        if is_last:
            self._report_epoch(loader.stats, state["hosts"])
            loader.stats.reset()

    def _report_epoch(self, stats: LoaderStats, hosts: list[dict[str, Any]]) -> None:
        trainer = self.trainer
        epoch = trainer.fit_loop.epoch_progress.current.processed
        if trainer.local_rank == 0:
            logger.info("%s", stats.line(f"epoch {epoch}, data of rank {trainer.global_rank}"))
        if trainer.is_global_zero:
            reports = with_busy_fraction(hosts, self._reported)
            self._reported = {host["name"]: host for host in hosts}
            for report in reports:
                logger.info("%s", host_line(report))
            advice = verdict(stats.input_bound, reports)
            if advice is not None:
                logger.info("%s", advice)

    def _default_window(self) -> int:
        """Twice the workers that work for this rank, so that each has a batch ready and one in the making."""
        known: list[int] = [host["workers"] for host in self._feeder.state()["hosts"] if host["workers"]]
        workers = sum(known) * len(self._addresses) / max(1, len(known))
        return min(_LARGEST_WINDOW, max(_SMALLEST_WINDOW, math.ceil(2 * workers / self._ranks()[1])))

    def _position(self, loader: RemoteLoader) -> Position:
        """Where the Trainer stands, asked at the first batch of a pass: before, it may not have restored its state."""
        trainer = self.trainer
        if trainer is None:
            return Position(max(loader.epoch, 0))
        fit_loop, stage = trainer.fit_loop, loader.place.stage
        epoch = fit_loop.epoch_progress.current.processed
        is_sequential = trainer.overfit_batches > 0
        if stage != "train":
            return Position(epoch, 0, 0, self._evaluation_limit(loader), is_sequential)
        taken = fit_loop.epoch_loop.batch_progress.current.ready
        # In a CombinedLoader that cycles, a short loader begins again before the epoch is over.
        pass_index, first_step = divmod(taken, max(1, len(loader)))
        limit = trainer.num_training_batches
        stop_step = None if limit == float("inf") else first_step + int(limit) - taken
        return Position(epoch, pass_index, first_step, stop_step, is_sequential)

    def _evaluation_limit(self, loader: RemoteLoader) -> int | None:
        trainer, stage = self.trainer, loader.place.stage
        limits = getattr(trainer, "num_sanity_val_batches" if trainer.sanity_checking else f"num_{stage}_batches")
        limit = limits[loader.place.index] if loader.place.index < len(limits) else float("inf")
        return None if limit == float("inf") else int(limit)


def _loader_hook(name: str) -> Callable[[RemoteDataModule], Any]:
    def hook(self: RemoteDataModule) -> Any:
        return self._remote_loaders(name.removesuffix("_dataloader"))

    hook.__name__ = name
    hook.__doc__ = f"Return the loaders that ``{name}`` of the user returns on the data hosts, fetched from there."
    return hook


def _assembled(structure: Any, loaders: Sequence[RemoteLoader]) -> Any:
    """Put loaders where the user's stood."""
    if isinstance(structure, int):
        return loaders[structure]
    if "dict" in structure:
        return {key: _assembled(part, loaders) for key, part in structure["dict"]}
    if "combined" in structure:
        return CombinedLoader(_assembled(structure["of"], loaders), structure["combined"])
    kind, parts = next(iter(structure.items()))
    assembled = [_assembled(part, loaders) for part in parts]
    return tuple(assembled) if kind == "tuple" else assembled


def _positions(loaders: Sequence[RemoteLoader]) -> tuple[LoaderPosition, ...]:
    return tuple(LoaderPosition.of(loader.facts, loader.place.world_size) for loader in loaders)


def _rebuild(datamodule: LightningDataModule, addresses: list[str], arguments: dict[str, Any]) -> RemoteDataModule:
    return RemoteDataModule(datamodule, addresses, **arguments)
