"""Samplers and batch samplers of random cases."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler


class EveryOther(Sampler):
    """A user's sampler with a fixed order."""

    def __init__(self, length: int, is_sized: bool) -> None:
        self.order = [*range(0, length, 2), *range(1, length, 2)]
        if is_sized:
            self.__class__ = SizedEveryOther

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class SizedEveryOther(EveryOther):
    """An ``EveryOther`` with a length."""

    def __len__(self) -> int:
        return len(self.order)


class Oversampled(SizedEveryOther):
    """A sampler that repeats every third index, as samplers do for a rare class."""

    def __init__(self, length: int, *, is_even: bool) -> None:
        self.order = [index for index in range(length) for _ in range(3 if index % 3 == 0 else 1)]
        if is_even and len(self.order) % 2:
            self.order.append(0)


class Counting(Sampler):
    """A sampler that starts at a different index in each pass, because it counts its passes."""

    def __init__(self, length: int) -> None:
        self.length, self.num_passes = length, 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return iter([(index + self.num_passes) % self.length for index in range(self.length)])

    def __len__(self) -> int:
        return self.length


class Backwards(DistributedSampler):
    """A subclass of torch's sampler that reverses the indices of a rank."""

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()][::-1])


class Strided(Sampler):
    """A user's sampler that splits by rank and shuffles by epoch."""

    def __init__(self, length: int) -> None:
        has_ranks = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if has_ranks else 0
        self.num_replicas = torch.distributed.get_world_size() if has_ranks else 1
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = [*range(self.length)]
        random.Random(self.epoch).shuffle(order)
        order += order[: -self.length % self.num_replicas]
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return math.ceil(self.length / self.num_replicas)


class Buckets:
    """A user's batch sampler with batches of many sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        for size in self.sizes:
            yield list(range(first, first + size))
            first += size

    def __len__(self) -> int:
        return len(self.sizes)


class Shifted(Buckets):
    """A batch sampler with its own random generator."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        self.random.shuffle(batches)
        return iter(batches)


def distributed(dataset: Any, kind: type[DistributedSampler[Any]] = DistributedSampler, **options: Any) -> Any:
    """Return a sampler as in PyTorch's tutorials, which reads the rank from the process group if there is one."""
    ranks = {} if torch.distributed.is_initialized() else {"num_replicas": 1, "rank": 0}
    return kind(dataset, **options, **ranks)
