"""A model and data modules that train in milliseconds, as users would write them, and a SageMaker host to run them."""

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
from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.process_state import forget_preparation

ONE_HOST = {"trainer": ["algo-1"]}
TWO_HOSTS = {"trainer": ["algo-2", "algo-1"]}


class SmallModel(LightningModule):
    """A model with one layer.

    Args:
        num_classes: Number of classes.
        weights: Folder of weights to start from.
        scores: Values of val_score to log, one per epoch.
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
        """Log the predefined score of the epoch."""
        self.log("val_score", self.scores[min(self.current_epoch, len(self.scores) - 1)], sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("test_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
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
    """A data module whose folder argument is named as in torchvision, without a default.

    Args:
        root: Folder of the data.
        size: A number.
    """

    def __init__(self, root: str, size: int = 1) -> None:
        super().__init__(root)
        self.root, self.size = root, size


class PairData(SmallData):
    """A data module with two folders, neither of which is the main one.

    Args:
        images_dir: Folder of the images.
        labels_dir: Folder of the labels.
        mask_dir: Folder of the masks; None if there are none.
    """

    def __init__(self, images_dir: str, labels_dir: str, mask_dir: str | None = None) -> None:
        super().__init__(images_dir)
        self.images_dir, self.labels_dir, self.mask_dir = images_dir, labels_dir, mask_dir


class PassingData(PairData):
    """A data module that passes keyword arguments on to its base class.

    Args:
        data_dir: Folder of the data.
        kwargs: Arguments of the base class.
    """

    def __init__(self, data_dir: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.data_dir = data_dir


def make_pairs(images_dir: str, labels_path: str) -> PairData:
    """Make a data module, in place of a class.

    Args:
        images_dir: Folder of the images.
        labels_path: Folder of the labels, although the name does not end in ``_dir``.
    """
    return PairData(images_dir, labels_path)


def make_trainer(**arguments: Any) -> Trainer:
    """Return a Trainer without output."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(**quiet, **arguments)


class LinkedCLI(SageMakerCLI):
    """A CLI with one link of each kind: applied on parsing, and on instantiation."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the links."""
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")
        parser.link_arguments("data.data_dir", "model.weights")


class Host:
    """One host of a SageMaker job, in this process.

    Args:
        base_dir: The host's ``/opt/ml``.
        monkeypatch: Fixture that restores environment variables and ``sys.argv``.

    Attributes:
        channels_of_data_hosts: Channels that the job's data hosts report.
        script: Line of code that appears to create every Trainer, because the test's lines differ between attempts;
            None to use the test's lines.
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
            name: Name of this host.
            channels: Names of the channels, whose folders are created.
            files: Contents of the other files, as for ``write_job``.
        """
        self._monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(self.base_dir))
        self.output_dir = self.base_dir / "output" / "data" / name
        for channel in channels:
            self.channel(channel).mkdir(parents=True, exist_ok=True)
        settings = {channel: {"TrainingInputMode": "File"} for channel in channels}
        write_job(self.base_dir, resource_config(groups, name, interface="lo"), channels=settings, **files)
        return self

    def channel(self, name: str) -> Path:
        """Return the folder of a channel."""
        return self.base_dir / "input" / "data" / name

    def start(
        self, *arguments: str, model: Any = SmallModel, data: Any = SmallData, cli: Any = SageMakerCLI, **kwargs: Any
    ) -> Any:
        """Run the CLI as a training script does.

        Args:
            arguments: Command-line arguments of the script.
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
        """Act like a new process: count Trainers and logger runs from 1, and forget the preparation of this process."""
        forget_preparation()
        self._monkeypatch.setattr(fits, "_made", Counter())
        if self.script is not None:
            self._monkeypatch.setattr(fits, "_place", lambda _: self.script)
        self._monkeypatch.setattr(loggers, "_taken", Counter())

    def make(self, *arguments: str, **kwargs: Any) -> Any:
        """Create model, data and trainer like ``start``, but do not run a subcommand."""
        return self.start(*arguments, run=False, **kwargs)
