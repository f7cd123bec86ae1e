"""Datasets whose batches show the random state that made them, and a hash over a stream of batches."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import Dataset, IterableDataset, get_worker_info

# Variable from which datasets read the name of their data host.
HOST_VARIABLE = "LIGHTNING_SM_TEST_HOST"


class Augmented(Dataset):
    """Samples with noise from all three generators.

    Args:
        length: Number of samples.
        delay_s: Time to read a sample.
        flags: Folder in which a file named ``slow-HOST`` makes that host eight times slower.
    """

    def __init__(self, length: int, delay_s: float = 0.0, flags: Path | None = None) -> None:
        self.length, self.delay_s, self.flags = length, delay_s, flags

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.delay_s:
            time.sleep(self.delay_s * (8 if self._is_slow() else 1))
        return {
            "index": index,
            "torch": torch.rand(3) + index,
            "numpy": np.random.rand(2).astype(np.float32),
            "random": random.random(),
            "name": f"sample {index}",
        }

    def _is_slow(self) -> bool:
        return self.flags is not None and (self.flags / f"slow-{os.environ[HOST_VARIABLE]}").exists()


class Broken(Dataset):
    """Numbers with a fault at sample 13.

    Args:
        breaks: Causes the fault.
        length: Number of samples.
    """

    def __init__(self, breaks: Callable[[], None], length: int = 40) -> None:
        self.breaks, self.length = breaks, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == 13:
            self.breaks()
        return index


class Sharded(IterableDataset):
    """Numbers with noise from all generators, split by worker; the first workers have more than the last.

    Args:
        length: One more than the largest number.
        delay_s: Time to read a sample.
    """

    def __init__(self, length: int = 403, delay_s: float = 0.0) -> None:
        self.length, self.delay_s = length, delay_s

    def __iter__(self) -> Sharded:
        info = get_worker_info()
        self.next, self.step = info.id, info.num_workers
        return self

    def __next__(self) -> dict[str, Any]:
        index, self.next = self.next, self.next + self.step * (2 if self.next % self.step > self.step // 2 else 1)
        if index >= self.length:
            raise StopIteration
        if self.delay_s:
            time.sleep(self.delay_s)
        return {"index": index, "torch": torch.rand(2) + index, "numpy": np.random.rand(2), "random": random.random()}


class Data(LightningDataModule):
    """Loaders from functions, so that each test defines its data in one place.

    Args:
        make: Returns the loaders for training.
        make_val: Returns the loaders for validation.
    """

    def __init__(self, make: Callable[[], Any], make_val: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.make = make
        self.make_val = make_val

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return self.make_val() if self.make_val is not None else []


def stream_hash(batches: Iterable[Any], first_step: int = 0) -> str:
    """Return a hash over steps, structure, types, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for step, batch in enumerate(batches, first_step):
        digest.update(f"step {step}:".encode())
        for part in _parts(batch):
            digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"key {key!r}".encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.contiguous().numpy().tobytes()
    else:
        yield repr(value).encode()
