"""Run cases with stock Lightning's Trainer, or with data hosts."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.strategies import DDPStrategy

from lightning_sm import DataServiceSettings
from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.remote_trainer import use_data_hosts
from tests.differential.cases import Act, Case, Hooks, case
from tests.differential.draws import Draw, draws_of, without_draws
from tests.integration.data.numbers import quiet_trainer

# If ranks disagree, one of them waits for the other; this limits the wait.
RANKS_TIMEOUT_S = 20


class Pass(NamedTuple):
    """A pass over the data.

    Attributes:
        act: Index of the Trainer call.
        stage: train, sanity, val, test or predict.
        epoch: Epoch of the Trainer.
    """

    act: int
    stage: str
    epoch: int


class Noted(NamedTuple):
    """A recorded batch.

    Attributes:
        dataloader_idx: Index of the batch's loader.
        batch: Values of the batch, without random numbers.
        draws: Random numbers in the batch.
        validation: Number of the validation run, because an epoch may have several.
    """

    dataloader_idx: int
    batch: Any
    draws: list[Draw]
    validation: int = 0

    @classmethod
    def of(cls, batch: Any, dataloader_idx: int = 0, validation: int = 0) -> Noted:
        """Record a batch.

        Args:
            batch: Batch that a step received.
            dataloader_idx: Index of the batch's loader.
            validation: Number of the validation run.
        """
        return cls(dataloader_idx, plain(batch), draws_of(batch), validation)


def script(number: int) -> Case:
    """Make a case whose loaders have a worker each, so that no dataset draws random numbers in this process.

    Args:
        number: Number of the case.
    """
    return case(number, num_workers=1)


class HasHooks:
    """Hooks that make new loaders in each call, as most users' hooks do.

    Attributes:
        number: Number of the case.
        hooks: Index of the hooks in the case.
    """

    number: int
    hooks: int

    @property
    def _loaders(self) -> Hooks:
        return script(self.number).hooks[self.hooks]

    def train_dataloader(self) -> Any:
        return self._loaders.train.value

    def val_dataloader(self) -> Any:
        return self._loaders.evaluation.value

    def test_dataloader(self) -> Any:
        return self._loaders.evaluation.value

    def predict_dataloader(self) -> Any:
        return self._loaders.evaluation.value


class Data(HasHooks, LightningDataModule):
    """The DataModule of a case.

    Args:
        number: Number of the case.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.hooks = number, 0


class OtherData(Data):
    """A second DataModule class, with other data."""


class Model(LightningModule):
    """A model that records its batches.

    Args:
        act: Index of the Trainer call that uses the model.
    """

    def __init__(self, act: int) -> None:
        super().__init__()
        self.act = act
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[Pass, list[Noted]] = {}
        self.num_validations = 0

    def note(self, stage: str, batch: Any, dataloader_idx: int = 0) -> None:
        """Record a batch."""
        validation = self.num_validations if stage in ("val", "sanity") else 0
        key = Pass(self.act, stage, self.current_epoch)
        self.seen.setdefault(key, []).append(Noted.of(batch, dataloader_idx, validation))

    def on_validation_start(self) -> None:
        self.num_validations += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train", batch)
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("sanity" if self.trainer.sanity_checking else "val", batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("test", batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("predict", batch, dataloader_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class ModelWithHooks(HasHooks, Model):
    """A model that has the hooks of the loaders.

    Args:
        act: Index of the Trainer call that uses the model.
        number: Number of the case.
        hooks: Index of the hooks in the case.
    """

    def __init__(self, act: int, number: int, hooks: int) -> None:
        super().__init__(act)
        self.number, self.hooks = number, hooks


@dataclass
class Seen:
    """The batches and errors of one rank.

    Attributes:
        batches: Recorded batches, by pass.
        errors: Error messages, by Trainer call.
    """

    batches: dict[Pass, list[Noted]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def plain(value: Any) -> Any:
    """Convert a batch to comparable values, with their types but without random numbers."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, dict):
        return {"dict": {str(key): plain(part) for key, part in without_draws(value).items()}}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [plain(part) for part in value]}
    return value


class Script:
    """One run of a case.

    Args:
        number: Number of the case.
        folder: Root folder of the Trainers, which write nothing to it.
        connection: Connection to data hosts; None for stock Lightning.
    """

    def __init__(self, number: int, folder: str, connection: ServiceConnection | None = None) -> None:
        self._case: Case = script(number)
        self._folder = folder
        self._connection = connection
        self._modules = {"datamodule": Data(number), "other datamodule": OtherData(number)}
        self._trainer: Any = None

    def run(self) -> Seen:
        """Run the case, and return its batches and errors."""
        torch.manual_seed(self._case.number)
        seen = Seen()
        for number, act in enumerate(self._case.acts):
            if act.trainer == "new":
                self._trainer = self._new_trainer()
            elif number - 1 in seen.errors:
                seen.errors[number] = seen.errors[number - 1]
                continue
            elif act.trainer == "continued":
                self._trainer.fit_loop.max_epochs += 1
            has_hooks = act.holder == "model"
            model = ModelWithHooks(number, self._case.number, act.hooks) if has_hooks else Model(number)
            try:
                self._call(act, {"model": model, **self._loaders(act)})
            except Exception as error:  # noqa: BLE001  # recorded, because both runs may fail; compared later
                seen.errors[number] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
            seen.batches |= model.seen
        return seen

    def _new_trainer(self) -> Any:
        settings: dict[str, Any] = {"devices": 1, "num_sanity_val_steps": 2, **self._case.trainer}
        if self._case.world_size > 1:
            timeout = timedelta(seconds=RANKS_TIMEOUT_S)
            settings |= {
                "devices": self._case.world_size,
                "strategy": DDPStrategy(process_group_backend="gloo", timeout=timeout),
            }
        return quiet_trainer(Path(self._folder), **settings)

    def _call(self, act: Act, arguments: dict[str, Any]) -> None:
        if self._connection is not None:  # as SageMakerTrainer does in a job
            use_data_hosts(self._trainer, self._connection, filter(None, [arguments.get("datamodule")]))
        getattr(self._trainer, act.method)(**arguments)

    def _loaders(self, act: Act) -> dict[str, Any]:
        """Return the arguments that pass the loaders to a method of the Trainer."""
        if act.holder in self._modules:
            module = self._modules[act.holder]
            module.hooks = act.hooks
            return {"datamodule": module}
        if act.holder == "model":
            return {}
        hooks = script(self._case.number).hooks[act.hooks]
        if act.method == "fit":
            return {"train_dataloaders": hooks.train.value, "val_dataloaders": hooks.evaluation.value}
        return {"dataloaders": hooks.evaluation.value}


class Runner:
    """Runs cases with stock Lightning, and with data hosts.

    Args:
        hosts: Addresses of data hosts, by the name of the set of hosts.
        hooks: Where the hooks of DataModules run: "trainers" or "data".
    """

    def __init__(self, hosts: dict[str, Sequence[str]], hooks: Any = "trainers") -> None:
        self._folder = tempfile.TemporaryDirectory()
        settings = DataServiceSettings(batch_timeout_s=60, hooks=hooks)
        self._connections = {name: ServiceConnection(own, settings, LOCAL_JOB) for name, own in hosts.items()}
        for connection in self._connections.values():
            # Keep the feeder between cases, as in a job, because it takes longer to start than a case to run.
            connection.closes_on_teardown = False

    def run(self, number: int, hosts: str | None = None) -> Seen:
        """Run a case.

        Args:
            number: Number of the case.
            hosts: Name of the set of data hosts; None for stock Lightning.
        """
        if hosts is None:
            return Script(number, self._folder.name).run()
        return Script(number, self._folder.name, self._connections[hosts]).run()

    def close(self) -> None:
        """Disconnect from the data hosts."""
        for connection in self._connections.values():
            connection.close()
        self._folder.cleanup()
