"""Runs a case by a Trainer."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.strategies import DDPStrategy

from lightning_sm import DataServiceSettings, RemoteDataModule
from tests.differential.cases import Case, case
from tests.integration.data.numbers import quiet_trainer

# Where ranks disagree, one of them waits for the other.
RANKS_TIMEOUT_S = 20


class Data(LightningDataModule):
    """The loaders of the case whose number a file has.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def case(self) -> Case:
        """The case, with loaders that nobody has used: as most hooks, these make new ones in each call."""
        return case(int(self.path.read_text()))

    def train_dataloader(self) -> Any:
        return self.case.train.value

    def val_dataloader(self) -> Any:
        return self.case.evaluation.value

    def test_dataloader(self) -> Any:
        return self.case.evaluation.value

    def predict_dataloader(self) -> Any:
        return self.case.evaluation.value


class Model(LightningModule):
    """Notes its batches, by run, stage and epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[tuple[int, Any]]] = {}

    def note(self, stage: str, batch: Any, dataloader_idx: int = 0) -> None:
        """Note a batch."""
        key = f"{self.trainer.state.fn.value} {stage}"
        if key.startswith("fit"):
            key += f" {self.current_epoch}"
        self.seen.setdefault(key, []).append((dataloader_idx, plain(batch)))

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


@dataclass
class Seen:
    """What one rank was given.

    Attributes:
        batches: By run, stage and epoch: the index of the loader, and the batch.
        errors: By run.
    """

    batches: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def plain(value: Any) -> Any:
    """A batch as values that can be compared, with their types."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, dict):
        return {"dict": {str(key): plain(part) for key, part in value.items()}}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [plain(part) for part in value]}
    return value


def run(module: Any, number: int, folder: Path) -> Seen:
    """Run a case.

    Args:
        module: The DataModule.
        number: Number of the case.
        folder: Root of what the Trainer writes: nothing.
    """
    script = case(number)
    torch.manual_seed(number)
    settings: dict[str, Any] = {"devices": 1, "num_sanity_val_steps": 2, **script.trainer}
    if script.world_size > 1:
        timeout = timedelta(seconds=RANKS_TIMEOUT_S)
        settings |= {
            "devices": script.world_size,
            "strategy": DDPStrategy(process_group_backend="gloo", timeout=timeout),
        }
    model, trainer = Model(), quiet_trainer(folder, **settings)
    errors = {}
    for name in script.runs:
        try:
            getattr(trainer, name)(model, datamodule=module)
        except Exception as error:  # noqa: BLE001, PERF203  # both may fail; what differs is found later
            errors[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
    return Seen(model.seen, errors)


class Twice:
    """Runs cases by stock Lightning, and with a data host.

    Args:
        path: File from which the DataModules read the number of the case.
        address: The data host.
    """

    def __init__(self, path: Path, address: str) -> None:
        self._path = path
        self._module = RemoteDataModule(Data(path), [address], settings=DataServiceSettings(batch_timeout_s=60))
        self._module._hosts.connection.closes_on_teardown = (
            False  # as in a job; a feeder takes longer to start than a case to run
        )

    def stock(self, number: int) -> Seen:
        """Run a case by stock Lightning.

        Args:
            number: Number of the case, which the file has already.
        """
        return run(Data(self._path), number, self._path.parent)

    def ours(self, number: int) -> Seen:
        """Run a case with the data host.

        Args:
            number: Number of the case, which the file has already.
        """
        return run(self._module, number, self._path.parent)

    def close(self) -> None:
        """Disconnect from the data host."""
        self._module.close()
