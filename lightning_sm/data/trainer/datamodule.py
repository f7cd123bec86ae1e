"""RemoteDataModule: the user's DataModule on a trainer, with its loaders on the data hosts."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lightning_sm._lightning import CombinedLoader, LightningDataModule
from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.host.data_host import LOCAL_JOB, DataHost
from lightning_sm.data.plan.shards import default_num_shards
from lightning_sm.data.protocol.spec import TRAINER_FACTS, LoaderFacts
from lightning_sm.data.protocol.tls import read_tls
from lightning_sm.data.settings import Credentials, DataServiceSettings
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.passes import LoaderPlace, Position
from lightning_sm.data.trainer.position import Progress, position_of
from lightning_sm.data.trainer.reporter import Reporter
from lightning_sm.errors import DataServiceError, DataSettingsError

logger = logging.getLogger(__name__)

_LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")

_SMALLEST_WINDOW, _LARGEST_WINDOW = 4, 256

# Runs of the Trainer are told apart by a number drawn at random, as data hosts may outlive a training; it fits int64.
_RUN_BITS = 62

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
        # Lightning's own attributes, such as whether hyperparameters are logged, are those of the wrapped DataModule.
        self.__dict__ = {"_datamodule": datamodule}
        self._addresses = list(addresses)
        self._settings = settings
        self._seed = seed
        self._job = job
        self._run = 0
        self._stage: str | None = None
        self._client: FeederClient | None = None
        self._local: DataHost | None = None
        self._loaders: dict[str, list[RemoteLoader]] = {}
        self._rings: dict[tuple[str, int], RemoteLoader] = {}
        self._progress = Progress()
        self._reporter = Reporter(self._state)
        # Between two runs of the Trainer in one script, data hosts must not take the first for the end of the job.
        self.closes_on_teardown = True
        self._take_hooks()

    def _take_hooks(self) -> None:
        for name in _TRAINER_HOOKS:
            setattr(self, name, getattr(self._datamodule, name))

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
        """Make the class of this object anew; what belongs to this process stays here."""
        state = {"_datamodule": self._datamodule, "closes_on_teardown": self.closes_on_teardown}
        arguments = {"settings": self._settings, "seed": self._seed, "job": self._job}
        # The DataModule is no argument: it refers to the Trainer, and the Trainer to this object.
        return _rebuild, (type(self._datamodule), self._addresses, arguments), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the wrapped DataModule, once it exists.

        Args:
            state: What ``__reduce__`` returned last.
        """
        self.__dict__.update(state)
        self._take_hooks()

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
        trainer = self.trainer
        self._run = secrets.randbits(_RUN_BITS)
        if trainer is not None:
            self._run = trainer.strategy.broadcast(self._run)
            if self._progress not in trainer.callbacks:
                trainer.callbacks.insert(0, self._progress)
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
        train = self._loaders.get("train")
        if train and self._client is not None:
            self._reporter.end_epoch(train[0], self.trainer)
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
        self._rings.clear()
        if client is not None:
            client.close(outcome)
        if local is not None:
            local.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped DataModule."""
        return self._datamodule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the wrapped DataModule.

        Args:
            state_dict: What ``state_dict`` returned.
        """
        self._datamodule.load_state_dict(state_dict)

    @property
    def _feeder(self) -> FeederClient:
        if self._client is None:
            raise DataServiceError("The loaders are asked for before setup(): a Trainer calls it, or call it yourself.")
        return self._client

    def _state(self) -> dict[str, Any]:
        return self._feeder.state()

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
            "run": self._run,
            "stage": self._stage,
            "loaders": loaders,
            "trainer": {name: getattr(trainer, name, None) for name in TRAINER_FACTS},
        }
        return self._feeder.open(request["opening"], request, self._settings.startup_timeout_s)

    def _opening(self, loaders: str) -> str:
        """Name of an opening: the same on all ranks, another one for every run and every reload."""
        every = getattr(self.trainer, "reload_dataloaders_every_n_epochs", 0)
        epoch = self.trainer.current_epoch if every and loaders in ("train", "val") else 0
        return f"{self._run}/{self._stage}/{loaders}/{epoch}"

    def _ranks(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _remote_loaders(self, stage: str) -> Any:
        reply = self._open(stage)
        loaders = []
        for index, facts in enumerate(reply["loaders"]):
            loaders.append(self._remote_loader(stage, index, LoaderFacts.from_json(facts)))
        if stage == "train" and loaders:
            loaders[0].on_epoch = self._begin_epoch
            loaders[0].on_batch = lambda loader: self._reporter.batch(loader, self.trainer)
            self._progress.follow(loaders)
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

    def _remote_loader(self, stage: str, index: int, facts: LoaderFacts) -> RemoteLoader:
        loader = RemoteLoader(self._feeder, facts, self._place(stage, index, facts), self._position)
        # Else each reload of the loaders would leave a ring behind.
        loader.inherit(self._rings.get((stage, index)))
        self._rings[stage, index] = loader
        return loader

    def _place(self, stage: str, index: int, facts: LoaderFacts) -> LoaderPlace:
        settings = self._settings
        rank, world_size = self._ranks()
        if self.trainer is not None and not self.trainer._accelerator_connector.use_distributed_sampler:
            if not facts.is_split:
                rank, world_size = 0, 1  # every rank gets all that the sampler yields
            if not facts.is_split and self.trainer.world_size > 1 and self.trainer.is_global_zero:
                logger.warning(
                    "Trainer(use_distributed_sampler=False): all %d ranks get the same batches of %s. A data host "
                    "serves all ranks, and its self.trainer.global_rank is 0: to split the data over the ranks, use "
                    "DistributedSampler, or leave use_distributed_sampler on.",
                    self.trainer.world_size,
                    facts.name,
                )
        return LoaderPlace(
            opening=self._opening(stage),
            index=index,
            stage=stage,
            rank=rank,
            world_size=world_size,
            seed=self._base_seed(),
            window_batches=settings.window_batches or self._default_window(),
            window_bytes=settings.window_bytes,
            max_batch_bytes=settings.max_batch_bytes,
            timeout_s=settings.batch_timeout_s,
            compression=settings.compression or "",
            num_shards=settings.virtual_shards or default_num_shards(world_size),
            # Validation that began anew, or was cut, would give other metrics than its data has.
            batches_per_pass=settings.batches_per_epoch if stage == "train" else None,
        )

    def _base_seed(self) -> int:
        if self._progress.seed is not None:
            return self._progress.seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed

    def _begin_epoch(self, _: int) -> None:
        """Lightning announces each epoch to the loaders right before it looks at its progress."""
        loaders = self._loaders["train"]
        self._reporter.end_epoch(loaders[0], self.trainer)
        self._progress.resume(self.trainer)

    def _default_window(self) -> int:
        """Twice the workers that work for this rank, so that each has a batch ready and one in the making."""
        known: list[int] = [host["workers"] for host in self._feeder.state()["hosts"] if host["workers"]]
        workers = sum(known) * len(self._addresses) / max(1, len(known))
        return min(_LARGEST_WINDOW, max(_SMALLEST_WINDOW, math.ceil(2 * workers / self._ranks()[1])))

    def _position(self, loader: RemoteLoader) -> Position:
        return position_of(loader, self.trainer)


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


def _rebuild(own: type, addresses: list[str], arguments: dict[str, Any]) -> RemoteDataModule:
    return RemoteDataModule(object.__new__(own), addresses, **arguments)
