"""Remote loaders for a Trainer or a Fabric, created where the strategy processes each loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.host_hooks import run_hooks_on_data_hosts
from lightning_sm.data.trainer.remote_loader import HOOKS, LoaderSource, remote_loader
from lightning_sm.timing.step_times import StepTimes


class DataHostLoaders(UnlistedCallback):
    """A callback that gives a Trainer's loaders workers on data hosts, and reports their work.

    Args:
        connection: The connection to the data hosts.
    """

    def __init__(self, connection: ServiceConnection) -> None:
        self.connection = connection

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap ``Strategy.process_dataloader``, which gets each loader after Lightning has replaced its sampler."""
        if not isinstance(trainer.strategy.process_dataloader, _ProcessLoader):
            trainer.strategy.process_dataloader = _ProcessLoader(trainer, self.connection, trainer)
        self.connection.reporter.begin_run()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Give the reporter the step clock of this training run."""
        times = next((callback for callback in trainer.callbacks if isinstance(callback, StepTimes)), None)
        if times is not None:
            self.connection.reporter.follow(times)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report on the epoch."""
        self.connection.reporter.end_epoch(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run, because Lightning does not call ``teardown`` after an exception."""
        self.connection.end_run()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Disconnect from the data hosts, unless they belong to a job, whose script may run another Trainer."""
        self.connection.end_run()


class _ProcessLoader:
    """A replacement for a strategy's ``process_dataloader`` that also gives loaders workers on data hosts.

    Args:
        owner: The Trainer or the Fabric with the strategy.
        connection: The connection to the data hosts.
        trainer: The Trainer, if any.
    """

    def __init__(self, owner: Any, connection: ServiceConnection, trainer: Any = None) -> None:
        self._owner, self._connection, self._trainer = owner, connection, trainer
        self._own = owner.strategy.process_dataloader

    def __call__(self, loader: object) -> object:
        owner, trainer = self._owner, self._trainer
        name = "a loader" if trainer is None else f"{HOOKS[trainer.state.stage.value]}_dataloader()"
        source = LoaderSource(self._connection, name, owner.global_rank, owner.world_size, trainer)
        return self._own(remote_loader(loader, source))


def fetch_in_fabric(fabric: Any, connection: ServiceConnection) -> None:
    """Have the loaders that a ``Fabric`` sets up use workers on data hosts.

    Args:
        fabric: The Fabric.
        connection: The connection to the data hosts.
    """
    fabric.strategy.process_dataloader = _ProcessLoader(fabric, connection)


def use_data_hosts(trainer: Any, connection: ServiceConnection, datamodules: Iterable[Any] = ()) -> None:
    """Have a Trainer's loaders use workers on data hosts.

    Args:
        trainer: The Trainer.
        connection: The connection to the data hosts.
        datamodules: DataModules whose hooks run on the data hosts, if the settings say so.
    """
    modules = list(datamodules)
    if modules and connection.runs_hooks(is_quiet=trainer.local_rank != 0):
        for datamodule in modules:
            run_hooks_on_data_hosts(datamodule, connection)
    if not any(isinstance(callback, DataHostLoaders) for callback in trainer.callbacks):
        has_clock = any(isinstance(callback, StepTimes) for callback in trainer.callbacks)
        trainer.callbacks[:0] = [DataHostLoaders(connection), *([] if has_clock else [StepTimes()])]
