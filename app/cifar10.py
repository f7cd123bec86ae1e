"""CIFAR-10: 60,000 color images in ten classes, loaded through lightning-bolts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from app.bolts_compat import import_bolts

_NUM_CLASSES = 10
_DEFAULT_DATA_DIR = "outputs/cifar10"

# Usual since ResNet (He et al. 2015, 4.2): 4 pixels on each side, then a random crop of the original size.
_PADDING = 4
_SIZE = 32

Sample = tuple[Tensor, Tensor]


class CIFAR10DataModule(LightningDataModule):
    """CIFAR-10, 3x32x32, normalized, with random crops and mirror images in training.

    This class wraps the data module of lightning-bolts. A subclass would need lightning-bolts as soon as this file is
    imported, and two classes with the same name would make ``--data CIFAR10DataModule`` ambiguous. Arguments shared
    with ``DigitsDataModule`` have the same defaults, because the command line keeps the values of the data module that
    it replaces.

    Args:
        data_dir: Folder with the original files in cifar-10-batches-py, which are downloaded if missing; null means
            outputs/cifar10.
        batch_size: Samples per batch and process: two hosts with one process each train on twice as many per step.
        num_workers: Number of worker processes per training process; 0 loads data in the training process itself.
        val_split: How many of the 50,000 training images are used for validation.
        augment: Whether to crop and mirror training images at random.
    """

    def __init__(
        self,
        data_dir: str | None = None,
        *,
        batch_size: int = 32,
        num_workers: int = 0,
        val_split: int = 5000,
        augment: bool = True,
    ) -> None:
        super().__init__()
        self.data_dir = data_dir if data_dir is not None else _DEFAULT_DATA_DIR
        bolts = import_bolts("pl_bolts.datamodules.cifar10_datamodule")
        self._bolts: Any = bolts.CIFAR10DataModule(
            data_dir=self.data_dir,
            val_split=val_split,
            num_workers=num_workers,
            normalize=True,
            batch_size=batch_size,
            pin_memory=torch.cuda.is_available(),
        )
        if augment:
            self._bolts.train_transforms = v2.Compose(
                [
                    v2.RandomCrop(_SIZE, padding=_PADDING),
                    v2.RandomHorizontalFlip(),
                    self._bolts.default_transforms(),
                ]
            )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return _NUM_CLASSES

    def prepare_data(self) -> None:
        """Download missing files, in one process per host.

        Raises:
            FileNotFoundError: Files are missing or differ from the originals, and the download failed.
        """
        try:
            self._bolts.prepare_data()
        except OSError as error:
            raise FileNotFoundError(
                f"{Path(self.data_dir) / 'cifar-10-batches-py'} does not contain the original files of CIFAR-10, and "
                f"downloading them to {self.data_dir} failed: {error}. Unpack cifar-10-python.tar.gz from "
                "https://www.cs.toronto.edu/~kriz/cifar.html there."
            ) from error

    def setup(self, stage: str | None = None) -> None:
        """Read and split the images."""
        # lightning-bolts has only two stages: "fit" loads the validation images, and "test" the images to predict.
        self._bolts.setup({"validate": "fit", "predict": "test"}.get(stage, stage) if stage else None)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the training images.

        Returns:
            Batches ``(images, labels)`` in a new order every epoch: (B, 3, 32, 32) float32, (B,) int64.
        """
        loader: DataLoader[Sample] = self._bolts.train_dataloader()
        return loader

    def val_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the validation images.

        Returns:
            Batches as in training, in a fixed order.
        """
        loader: DataLoader[Sample] = self._bolts.val_dataloader()
        return loader

    def test_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the 10,000 test images.

        Returns:
            Batches as in training, in a fixed order.
        """
        loader: DataLoader[Sample] = self._bolts.test_dataloader()
        return loader

    def predict_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the images to predict, which are the test images.

        Returns:
            Batches as in training, in a fixed order.
        """
        return self.test_dataloader()
