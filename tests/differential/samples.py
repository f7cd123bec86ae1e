"""Datasets and collate functions of random cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from tests.differential.draws import DRAWS, HELD_DRAWS, SHARD, Dice

KINDS = ("number", "tensor", "array", "dict", "tuple", "named", "nested", "text")


class Point(NamedTuple):
    """A sample with named fields."""

    x: torch.Tensor
    index: int


def sample(kind: str, index: int) -> Any:
    """Return a sample whose index is in all of its parts."""
    makers = {
        "number": lambda: index,
        "tensor": lambda: torch.full((2, 3), index),
        "array": lambda: np.full((3,), index, np.float32),
        "dict": lambda: {"index": index, "x": torch.full((4,), float(index))},
        "tuple": lambda: (torch.full((3,), float(index)), index),
        "named": lambda: Point(torch.full((2,), index), index),
        "nested": lambda: {"index": index, "more": [torch.tensor(index), {"half": index / 2}]},
        "text": lambda: {"index": index, "text": f"sample {index}"},
    }
    return makers[kind]()


class Samples(Dataset):
    """A map-style dataset.

    Args:
        length: Number of samples.
        first: Number of the first sample.
        kind: Kind of sample, from ``KINDS``.
        transform: Random augmentation of each sample.
    """

    def __init__(self, length: int, first: int, kind: str, transform: Dice | None = None) -> None:
        self.length, self.first, self.kind, self.transform = length, first, kind, transform

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        number = self.first + int(index)
        own = sample(self.kind, number)
        return own if self.transform is None else {"sample": own, DRAWS: self.transform.roll(number)}


class Lists(Samples):
    """A dataset that fetches lists of samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """An iterable dataset that is split over ranks, as by ``split_dataset_by_node``, and over workers.

    Args:
        length: Number of samples.
        first: Number of the first sample.
        kind: Kind of sample, from ``KINDS``.
        transforms: Random augmentations of each sample, from global generators and from held ones.
    """

    def __init__(self, length: int, first: int, kind: str, transforms: tuple[Dice, Dice] | None = None) -> None:
        self.length, self.first, self.kind, self.transforms = length, first, kind, transforms

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        has_ranks = torch.distributed.is_initialized()
        rank, num_ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if has_ranks else (0, 1)
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        for number in range(
            self.first + rank * num_workers + worker, self.first + self.length, num_ranks * num_workers
        ):
            own = sample(self.kind, number)
            if self.transforms is None:
                yield own
                continue
            of_all, held = self.transforms
            shard = np.array([worker], np.int64)
            yield {"sample": own, DRAWS: of_all.roll(number), HELD_DRAWS: held.roll(number), SHARD: shard}


def keep_list(samples: list[Any]) -> Any:
    """Return the samples as a list, like a user's collate function that collates nothing."""
    return {"samples": samples, "count": len(samples)}


def collate_twice(samples: list[Any]) -> Any:
    """Collate the samples twice, like a user's collate function that wraps torch's."""
    return default_collate(samples), [default_collate([*map(_own, samples[::-1])])]


def _own(item: Any) -> Any:
    return item["sample"] if isinstance(item, dict) and "sample" in item else item


class Mixing:
    """A collate function that draws random numbers, as functions that mix samples do.

    Args:
        collate: Function that collates the samples.
        first: Number of the loader's first sample.
        dice: Source of the random numbers.
    """

    def __init__(self, collate: Callable[[Any], Any], first: int, dice: Dice) -> None:
        self.collate, self.first, self.dice = collate, first, dice
        self.__name__ = f"Mixing {dice.words}"

    def __call__(self, samples: Any) -> Any:
        return {"batch": self.collate(samples), DRAWS: self.dice.roll(self.first)}
