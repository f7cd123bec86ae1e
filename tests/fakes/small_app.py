"""A model and data modules that train in milliseconds, as users write them, and what SageMaker would start them in."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerCLI
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.training import loggers
from lightning_sm.training.checkpoints import fits
from lightning_sm.training.process import PreparedProcess
from tests.fakes.job_folder import resource_config, write_job

ONE_HOST = {"trainer": ["algo-1"]}
TWO_HOSTS = {"trainer": ["algo-2", "algo-1"]}


class SmallModel(LightningModule):
    """One layer.

    Args:
        num_classes: Number of classes.
        weights: Folder of weights to start from.
        scores: Value of val_score in each epoch, instead of a measured one.
    """

    def __init__(self, num_classes: int = 3, weights: str | None = None, scores: list[float] | None = None) -> None:
        super().__init__()
        self.weights = weights
        self.scores = scores or [1e-5]
        self.layer = torch.nn.Linear(2, num_classes)

    def _loss(self, batch: Any) -> torch.Tensor:
        points, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(points), labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Log the mean loss of the epoch."""
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log a score that is known in advance."""
        self.log("val_score", self.scores[min(self.current_epoch, len(self.scores) - 1)], sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("test_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SmallData(LightningDataModule):
    """Eight points of three classes.

    Args:
        data_dir: Folder of the data.
        val_dir: Folder of the validation data.
        batch_size: Samples per batch.
    """

    def __init__(self, data_dir: str = "nowhere", val_dir: str | None = None, batch_size: int = 4) -> None:
        super().__init__()
        self.data_dir, self.val_dir, self.batch_size = data_dir, val_dir, batch_size
        self.num_classes = 3

    def _loader(self) -> DataLoader[Any]:
        points, labels = torch.arange(16.0).reshape(8, 2) / 16, torch.arange(8) % 3
        return DataLoader(TensorDataset(points, labels), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = _loader


class RootData(SmallData):
    """As torchvision names its folder, and without a default.

    Args:
        root: Folder of the data.
        size: A number.
    """

    def __init__(self, root: str, size: int = 1) -> None:
        super().__init__(root)
        self.root, self.size = root, size


class PairData(SmallData):
    """Two folders, neither of which is the main one.

    Args:
        images_dir: Folder of the images.
        labels_dir: Folder of the labels.
        mask_dir: Folder of the masks, if there are any.
    """

    def __init__(self, images_dir: str, labels_dir: str, mask_dir: str | None = None) -> None:
        super().__init__(images_dir)
        self.images_dir, self.labels_dir, self.mask_dir = images_dir, labels_dir, mask_dir


class PassingData(PairData):
    """Passes on what its base class takes.

    Args:
        data_dir: Folder of the data.
        kwargs: Arguments of the base class.
    """

    def __init__(self, data_dir: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.data_dir = data_dir


def make_pairs(images_dir: str, labels_path: str) -> PairData:
    """Make a DataModule by a function.

    Args:
        images_dir: Folder of the images.
        labels_path: Folder of the labels, not named like one.
    """
    return PairData(images_dir, labels_path)


def make_trainer(**arguments: Any) -> Trainer:
    """A Trainer that says nothing."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(**quiet, **arguments)


class LinkedCLI(SageMakerCLI):
    """Passes on what the data knows, at both times that links are applied."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the links."""
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")
        parser.link_arguments("data.data_dir", "model.weights")


class Host:
    """One host of a SageMaker job, in this process.

    Args:
        base_dir: Its ``/opt/ml``.
        monkeypatch: Restores the variables and the arguments.

    Attributes:
        channels_of_data_hosts: What the data hosts of its job would say.
        script: The line that makes every Trainer, instead of the test's own lines, which differ between attempts; None
            leaves these.
    """

    script: str | None = "train.py:1"

    def __init__(self, base_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base_dir = base_dir
        self.model_dir = base_dir / "model"
        self._monkeypatch = monkeypatch
        self.channels_of_data_hosts: Sequence[str] = ()
        monkeypatch.setattr(ServiceConnection, "host_channels", lambda *_, is_quiet: list(self.channels_of_data_hosts))

    def configure(
        self,
        groups: Mapping[str, Sequence[str]] = ONE_HOST,
        name: str = "algo-1",
        *,
        channels: Sequence[str] = (),
        **files: Any,
    ) -> Host:
        """Write the job's files.

        Args:
            groups: Hosts by group.
            name: The host that this is.
            channels: Names of the channels; their folders are made.
            files: Content of the other files, see ``write_job``.
        """
        self._monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(self.base_dir))
        self.output_dir = self.base_dir / "output" / "data" / name
        for channel in channels:
            self.channel(channel).mkdir(parents=True, exist_ok=True)
        settings = {channel: {"TrainingInputMode": "File"} for channel in channels}
        write_job(self.base_dir, resource_config(groups, name, interface="lo"), channels=settings, **files)
        return self

    def channel(self, name: str) -> Path:
        """Folder of a channel."""
        return self.base_dir / "input" / "data" / name

    def start(
        self, *arguments: str, model: Any = SmallModel, data: Any = SmallData, cli: Any = SageMakerCLI, **kwargs: Any
    ) -> Any:
        """Do what a training script does.

        Args:
            arguments: What follows the script on the command line.
            model: First argument of the CLI.
            data: Second argument of the CLI.
            cli: Class of the CLI.
            kwargs: Other arguments of the CLI.

        Returns:
            The CLI.
        """
        self._monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        self.new_process()
        return cli(model, data, seed_everything_default=1, **kwargs)

    def new_process(self) -> None:
        """Count the Trainers and the runs of loggers from 1, and prepare nothing, as in a process of its own."""
        if PreparedProcess.current is not None:
            PreparedProcess.current.undo()
        self._monkeypatch.setattr(fits, "_made", Counter())
        if self.script is not None:
            self._monkeypatch.setattr(fits, "_place", lambda _: self.script)
        self._monkeypatch.setattr(loggers, "_taken", Counter())

    def make(self, *arguments: str, **kwargs: Any) -> Any:
        """Like ``start``, but make model, data and trainer only."""
        return self.start(*arguments, run=False, **kwargs)
