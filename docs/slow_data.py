"""The training script of the pictures (``make pictures``): digits whose transforms take longer than the step.

A worker simulates a core of its host, and the step simulates a GPU. They sleep, because the emulated hosts share the
cores of one machine.
"""

from __future__ import annotations

import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_sm import SageMakerCLI
from lightning_sm._lightning import LightningDataModule, LightningModule

_VALIDATED = 360  # validation images, of 1,797
_VARIANTS = 3  # per training image and epoch


class Transformed(Dataset[tuple[Tensor, Tensor]]):
    """Images whose transforms take a fixed time.

    Args:
        images: Images, (N, 64) float32.
        labels: Labels, (N,) int64.
        sample_s: Seconds per image.
    """

    def __init__(self, images: Tensor, labels: Tensor, sample_s: float) -> None:
        self.images, self.labels, self.sample_s = images, labels, sample_s

    def __len__(self) -> int:
        return _VARIANTS * len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Sleep, then return the image with noise, and its label."""
        time.sleep(self.sample_s)
        image = self.images[index % len(self.images)]
        return image + 0.3 * torch.randn_like(image), self.labels[index % len(self.labels)]


class Digits(LightningDataModule):
    """Scikit-learn's digits.

    Args:
        batch_size: Images per batch.
        sample_s: Seconds that the transforms of an image take.
    """

    def __init__(self, batch_size: int = 32, sample_s: float = 0.05) -> None:
        super().__init__()
        self.batch_size, self.sample_s = batch_size, sample_s

    def setup(self, stage: str | None = None) -> None:
        """Load the images."""
        digits = load_digits()
        images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        self.train = Transformed(images[_VALIDATED:], labels[_VALIDATED:], self.sample_s)
        self.val = TensorDataset(images[:_VALIDATED], labels[:_VALIDATED])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the loader of the slow images."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return the loader of images without transforms."""
        return DataLoader(self.val, _VALIDATED)


class Classifier(LightningModule):
    """A small network whose step takes as long as a large network's.

    Args:
        step_s: Seconds per step.
        learning_rate: Learning rate of Adam.
    """

    def __init__(self, step_s: float = 0.09, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.step_s, self.learning_rate = step_s, learning_rate
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Sleep, then return the loss."""
        time.sleep(self.step_s)
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of correctly classified images."""
        correct = self.layers(batch[0]).argmax(dim=1) == batch[1]
        self.log("val_acc", correct.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), self.learning_rate)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is too small to benefit from more
    SageMakerCLI(Classifier, Digits, seed_everything_default=1)
