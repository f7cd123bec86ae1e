"""The default data: 1,797 scanned handwritten digits from scikit-learn, which need no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

_FILE_NAME = "digits.npz"
_IMAGE_SHAPE = (8, 8)
_NUM_CLASSES = 10

# Each pixel is the number of dark points in a 4x4 block of the scan, from 0 to 16 (UCI, "Optical Recognition of
# Handwritten Digits").
_MAX_PIXEL = 16

# Mean and standard deviation of all pixels, after division by 16.
_MEAN, _STD = 0.3053, 0.3760

# The size that ResNet-18's five halvings reduce to one pixel. Smaller images train too, but to a lower accuracy.
_SIZE = 32

# Fixed, so that test accuracies are comparable for every val_fraction.
_TEST_FRACTION = 0.2
_SPLIT_SEED = 0

Sample = tuple[Tensor, Tensor]


class DigitsDataModule(LightningDataModule):
    """Handwritten digits, 8x8 grayscale, enlarged to three equal channels of 32x32 pixels.

    A fifth of the images is reserved for testing. The split is the same in every run and on every host, and each part
    has the same share of every digit.

    Args:
        data_dir: Folder with a copy of the images in digits.npz, or null for scikit-learn's copy.
        batch_size: Samples per batch and process: two hosts with one process each train on twice as many per step.
        num_workers: Number of worker processes per training process; 0 loads data in the training process itself.
        val_fraction: Share of all images that is used for validation.
        augment: Whether to rotate, shift and scale training images slightly, differently in every epoch.
        drop_last: Whether to skip the last batch of a training epoch if it is smaller than the others.
    """

    def __init__(
        self,
        data_dir: str | None = None,
        *,
        batch_size: int = 32,
        num_workers: int = 0,
        val_fraction: float = 0.2,
        augment: bool = True,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < val_fraction < 1 - _TEST_FRACTION:
            raise ValueError(
                f"val_fraction={val_fraction} leaves no images for training or validation: {_TEST_FRACTION} of "
                f"them are reserved for testing. Choose a fraction between 0 and {1 - _TEST_FRACTION}, such as 0.2."
            )
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.augment = augment
        self.drop_last = drop_last

    @property
    def num_classes(self) -> int:
        """Number of classes: the ten digits."""
        return _NUM_CLASSES

    def setup(self, stage: str | None = None) -> None:
        """Read and split the images; every process loads all parts, whatever the stage.

        Raises:
            FileNotFoundError: ``data_dir`` has no ``digits.npz``.
            ValueError: The arrays in ``digits.npz`` have the wrong shape.
        """
        # The import takes 0.5 s, which --help does not need.
        from sklearn.model_selection import train_test_split  # noqa: PLC0415

        images, labels = _load(self.data_dir)
        rest, test = train_test_split(
            np.arange(len(labels)), test_size=_TEST_FRACTION, stratify=labels, random_state=_SPLIT_SEED
        )
        val_share = self.val_fraction / (1 - _TEST_FRACTION)
        train, val = train_test_split(rest, test_size=val_share, stratify=labels[rest], random_state=_SPLIT_SEED)
        self.train_dataset = _Digits(images[train], labels[train], augment=self.augment)
        self.val_dataset = _Digits(images[val], labels[val])
        self.test_dataset = _Digits(images[test], labels[test])

    def train_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the training images.

        Returns:
            Batches ``(images, labels)`` in a new order every epoch: (B, 3, 32, 32) float32, (B,) int64.
        """
        return self._loader(self.train_dataset, shuffle=True, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the validation images.

        Returns:
            Batches as in training, in a fixed order.
        """
        return self._loader(self.val_dataset)

    def test_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the test images.

        Returns:
            Batches as in training, in a fixed order.
        """
        return self._loader(self.test_dataset)

    def predict_dataloader(self) -> DataLoader[Sample]:
        """Make the loader of the images to predict, which are the test images.

        Returns:
            Batches as in training, in a fixed order.
        """
        return self._loader(self.test_dataset)

    def _loader(self, dataset: _Digits, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Sample]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


class _Digits(Dataset[Sample]):
    """Images (N, 8, 8) with pixels from 0 to 16, and labels (N,), as normalized tensors."""

    def __init__(self, images: NDArray[np.float32], labels: NDArray[np.int64], augment: bool = False) -> None:
        small = torch.from_numpy(images).unsqueeze(1) / _MAX_PIXEL
        # Enlarge the images once, which takes 7 MB; doing it on each access would cost 0.1 ms per image and epoch.
        self._images = functional.interpolate(small, size=(_SIZE, _SIZE), mode="bilinear", align_corners=False)
        self._labels = torch.from_numpy(labels)
        self._augmentation = v2.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1)) if augment else None

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        image = self._images[index]
        if self._augmentation is not None:
            image = self._augmentation(image)
        return ((image - _MEAN) / _STD).expand(3, -1, -1), self._labels[index]


def write_digits(data_dir: str | Path) -> Path:
    """Write scikit-learn's copy of the images to ``digits.npz`` in a folder, for ``DigitsDataModule(data_dir)``.

    Args:
        data_dir: The folder, which is created if necessary.

    Returns:
        Path of the file.
    """
    images, labels = _load(None)
    path = Path(data_dir) / _FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, images=images.astype(np.uint8), labels=labels)
    return path


def _load(data_dir: str | None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if data_dir is None:
        from sklearn.datasets import load_digits  # noqa: PLC0415  # 0.5 s, see setup

        digits = load_digits()
        return digits.images.astype(np.float32), digits.target.astype(np.int64)
    path = Path(data_dir) / _FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f'{path} does not exist. Create it with python -c "from app.digits import write_digits; write_digits('
            f"'{data_dir}')\", or omit data_dir to use scikit-learn's copy."
        )
    with np.load(path) as arrays:
        images, labels = (arrays.get(name, np.empty(0)) for name in ("images", "labels"))
    if images.shape != (len(labels), *_IMAGE_SHAPE) or labels.ndim != 1:
        raise ValueError(
            f"{path} has images of shape {images.shape} and labels of shape {labels.shape}; expected (N, 8, 8) and "
            "(N,)."
        )
    return images.astype(np.float32), labels.astype(np.int64)
