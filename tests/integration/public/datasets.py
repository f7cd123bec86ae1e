"""Small data sets in the formats that the scripts read."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def image_folders(folder: Path) -> None:
    """Write folders of two classes for torchvision's ImageFolder: 16 training and 8 validation images."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def mnist(folder: Path) -> None:
    """Write MNIST's files as torchvision unpacks them, with 80 training and 8 test images."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for prefix, count in (("train", 80), ("t10k", 8)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(_idx(images))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(_idx(labels))


def sales(folder: Path) -> None:
    """Write two series of 40 days: 32 windows of 16 days begin in the first 32 days."""
    lines = [f"{shop},{day},{np.sin(day / 3 + shop):.3f}" for shop in (1, 2) for day in range(40)]
    (folder / "sales.csv").write_text("\n".join(["shop,day,sales", *lines]))


def shards(folder: Path) -> None:
    """Write tar files for WebDataset: 4 x 16 training and 4 x 8 validation images."""
    random = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 8)):
        for shard in range(4):
            with tarfile.open(folder / f"{split}-{shard:04d}.tar", "w") as tar:
                for number in range(count):
                    image = io.BytesIO()
                    Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(image, "PNG")
                    _add(tar, f"{shard}{number:04d}.png", image.getvalue())
                    _add(tar, f"{shard}{number:04d}.cls", b"%d" % (number % 2))


def tokens(folder: Path) -> None:
    """Write LitData chunks: 64 training and 16 validation sequences."""
    from litdata.streaming.cache import Cache

    for split, count in (("train", 64), ("val", 16)):
        cache = Cache(str(folder / split), chunk_size=8)
        generator = torch.Generator().manual_seed(0)
        for number in range(count):
            cache[number] = {"input_ids": torch.randint(0, 32, (12,), generator=generator)}
        cache.done()
        cache.merge()


def _idx(array: np.ndarray) -> bytes:
    """Encode an array in the format of MNIST's files: type and rank, sizes, bytes."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
