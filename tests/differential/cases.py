"""Random cases: loaders of all kinds, and settings of the Trainer. A case is a function of its number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

KINDS = ("number", "tensor", "array", "dict", "tuple", "named", "nested", "text")

# Every eighth case has two ranks; starting the others costs less.
_RANKS_EVERY = 8


class Point(NamedTuple):
    """A sample with names."""

    x: torch.Tensor
    index: int


def sample(kind: str, index: int) -> Any:
    """A sample that has its index in all of its parts."""
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
    """A map-style dataset."""

    def __init__(self, length: int, first: int, kind: str) -> None:
        self.length, self.first, self.kind = length, first, kind

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return sample(self.kind, self.first + int(index))


class Lists(Samples):
    """A dataset that fetches lists of samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """An iterable dataset, split over ranks, as ``split_dataset_by_node`` does it, and over workers."""

    def __init__(self, length: int, first: int, kind: str) -> None:
        self.length, self.first, self.kind = length, first, kind

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        has_ranks = torch.distributed.is_initialized()
        rank, num_ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if has_ranks else (0, 1)
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        for index in range(rank * num_workers + worker, self.length, num_ranks * num_workers):
            yield sample(self.kind, self.first + index)


class EveryOther(Sampler):
    """A sampler of the user's, with a fixed order and a length."""

    def __init__(self, length: int, is_sized: bool) -> None:
        self.order = [*range(0, length, 2), *range(1, length, 2)]
        if is_sized:
            self.__class__ = SizedEveryOther

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class SizedEveryOther(EveryOther):
    """The same, with a length."""

    def __len__(self) -> int:
        return len(self.order)


class Counting(Sampler):
    """A sampler that begins elsewhere in each pass, by a counter of its own."""

    def __init__(self, length: int) -> None:
        self.length, self.num_passes = length, 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return iter([(index + self.num_passes) % self.length for index in range(self.length)])

    def __len__(self) -> int:
        return self.length


class Buckets:
    """A batch sampler of the user's, with batches of many sizes."""

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
    """A batch sampler that has random numbers of its own."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        self.random.shuffle(batches)
        return iter(batches)


def keep_list(samples: list[Any]) -> Any:
    """A collate function of the user's that collates nothing."""
    return {"samples": samples, "count": len(samples)}


def collate_twice(samples: list[Any]) -> Any:
    """A collate function of the user's around torch's own."""
    return default_collate(samples), [default_collate(samples[::-1])]


@dataclass
class Part:
    """A loader, and what of its batches is the same in every run.

    Attributes:
        loader: The loader.
        is_ordered: Whether the batches come in the same order in stock Lightning and here.
        is_complete: Whether each pass has every sample once.
        size: Samples in a pass.
        words: What it is.
    """

    loader: DataLoader[Any]
    is_ordered: bool
    is_complete: bool
    size: int
    words: list[str]

    def has(self, word: str) -> bool:
        """Whether it is described by a word."""
        return any(word in one for one in self.words)


@dataclass
class Loaders:
    """What a ``*_dataloader()`` hook returns.

    Attributes:
        value: The loaders in their structure.
        parts: Each of them.
        mode: How they are read together: ``sequential``, or another mode of ``CombinedLoader``.
        shape: The structure.
    """

    value: Any
    parts: list[Part]
    mode: str
    shape: str = "one"

    @property
    def words(self) -> str:
        """What they are, for people."""
        return "; ".join([self.shape, *(", ".join(part.words) for part in self.parts)])

    def has(self, word: str) -> bool:
        """Whether a word describes one of them."""
        return any(part.has(word) for part in self.parts)


@dataclass
class Case:
    """One script.

    Attributes:
        number: What it is made from.
        world_size: Number of ranks.
        train: Loaders for training.
        evaluation: Loaders for validation, test and prediction.
        trainer: Arguments of the Trainer.
        runs: What it calls of the Trainer.
    """

    number: int
    world_size: int
    train: Loaders
    evaluation: Loaders
    trainer: dict[str, Any]
    runs: tuple[str, str]

    @property
    def words(self) -> str:
        """What it is, for people."""
        return (
            f"{self.world_size} ranks, train: {self.train.words}; evaluation: {self.evaluation.words}; {self.trainer}"
        )


class _Maker:
    """Makes the loaders of a case.

    Args:
        rng: Decides.
        world_size: Number of ranks.
    """

    def __init__(self, rng: random.Random, world_size: int) -> None:
        self._rng, self._world_size = rng, world_size

    def loaders(self, first: int, *, is_training: bool) -> Loaders:
        """Make the value of a hook.

        Args:
            first: The number of the first sample.
            is_training: Whether it is for training.
        """
        shape = self._rng.choice(["one", "one", "one", "list", "dict", "combined"])
        mode = "max_size_cycle" if is_training else "sequential"
        if shape == "one":
            part = self._part(first, may_stream=True)
            return Loaders(part.loader, [part], mode)
        if shape == "combined":
            mode = self._rng.choice(["max_size_cycle", "max_size", "min_size", "sequential"])
            shape = f"combined {mode}"
        num_parts = self._rng.choice([1, 2, 3])
        # Where ranks have a different number of samples, loaders that are read together have no common steps.
        is_even = self._world_size > 1 and mode != "sequential"
        parts = [self._part(first + 1000 * number, is_even=is_even) for number in range(num_parts)]
        value: Any = [part.loader for part in parts]
        if shape == "dict":
            value = {f"loader {number}": loader for number, loader in enumerate(value)}
        elif shape.startswith("combined"):
            value = CombinedLoader(value, mode)
        return Loaders(value, parts, mode, shape)

    def _part(self, first: int, *, may_stream: bool = False, is_even: bool = False) -> Part:
        rng = self._rng
        kind = rng.choice(KINDS)
        lengths = [2, 4, 8, 14, 20, 32] if is_even else [1, 2, 3, 5, 8, 13, 20, 31]
        # Stock Lightning cannot predict fewer samples than there are ranks: one rank fails, and the other waits for it.
        length = rng.choice([size for size in lengths if size >= self._world_size])
        options: dict[str, Any] = {}
        if may_stream and rng.random() < 0.2:
            return self._stream(kind, length, first)
        if rng.random() < 0.25:
            options["collate_fn"] = rng.choice([keep_list, collate_twice])
        dataset: Any = rng.choice([Samples, Lists])(length, first, kind)
        words = [f"{type(dataset).__name__} of {length} {kind}", *(one.__name__ for one in options.values())]
        wrapped = rng.random()
        if wrapped < 0.1 and not is_even and length > 2:
            dataset = Subset(dataset, list(range(length))[:: rng.choice([1, 2])])
            words.append("Subset")
        elif wrapped < 0.2:
            dataset = ConcatDataset([dataset, Samples(4 if is_even else 3, first + 500, kind)])
            words.append("ConcatDataset")
        ways = ["plain", "shuffle", "sampler", "none"]
        # Stock Lightning replaces them on several ranks, so that they have other numbers of steps.
        ways += [] if is_even else ["batch_sampler"]
        how = rng.choice(ways)
        if how == "none":
            words.append("batch_size=None")
            if options.get("collate_fn") is collate_twice:
                del options["collate_fn"]  # it takes a list
            return Part(DataLoader(dataset, batch_size=None, **options), True, True, len(dataset), words)
        if how == "batch_sampler":
            return self._with_batch_sampler(dataset, options, words)
        size = rng.choice([1, 2, 3, 4, 8])
        drop_last = rng.random() < 0.25
        words.append(f"batch_size={size}" + (", drop_last" if drop_last else ""))
        options |= {"batch_size": size, "drop_last": drop_last}
        if how == "plain":
            return Part(DataLoader(dataset, **options), True, True, len(dataset), words)
        if how == "shuffle":
            words.append("shuffle")
            return Part(DataLoader(dataset, shuffle=True, **options), False, True, len(dataset), words)
        name, sampler, is_ordered, is_complete, size = rng.choice(self._samplers(dataset, is_even=is_even))
        words.append(name)
        return Part(DataLoader(dataset, sampler=sampler, **options), is_ordered, is_complete, size, words)

    def _stream(self, kind: str, length: int, first: int) -> Part:
        size = self._rng.choice([None, 1, 2, 4])
        # Ranks of stock Lightning must have the same number of batches.
        length += -length % (self._world_size * (size or 1)) if self._world_size > 1 else 0
        words = [f"stream of {length} {kind}", f"batch_size={size}"]
        loader: Any = DataLoader(Stream(length, first, kind), batch_size=size)
        return Part(loader, False, True, length, words)

    def _samplers(self, dataset: Any, *, is_even: bool) -> list[tuple[str, Any, bool, bool, int]]:
        length = len(dataset)
        samplers = [
            ("SequentialSampler", SequentialSampler(dataset), True, True, length),
            ("own sampler", EveryOther(length, is_sized=True), True, True, length),
            ("own sampler without length", EveryOther(length, is_sized=False), True, True, length),
            ("sampler that counts its passes", Counting(length), True, True, length),
            ("RandomSampler with replacement", RandomSampler(dataset, replacement=True), False, False, length),
            ("SubsetRandomSampler", SubsetRandomSampler(range(length)), False, True, length),
            ("WeightedRandomSampler", WeightedRandomSampler([1.0] * length, length), False, False, length),
            ("RandomSampler with generator", RandomSampler(dataset, generator=torch.Generator()), False, True, length),
            ("DistributedSampler", _distributed(dataset, shuffle=True), False, True, length),
            ("DistributedSampler in order", _distributed(dataset, shuffle=False), True, True, length),
        ]
        if not is_even:
            half = max(1, length // 2)
            samplers.append(("RandomSampler of a part", RandomSampler(dataset, num_samples=half), False, False, half))
        return samplers

    def _with_batch_sampler(self, dataset: Any, options: dict[str, Any], words: list[str]) -> Part:
        rng = self._rng
        length = len(dataset)
        sizes: list[int] = []
        while sum(sizes) < length:
            sizes.append(min(rng.randint(1, 5), length - sum(sizes)))
        which = rng.choice(["torch's", "own", "own with random numbers"])
        words.append(f"{which} batch sampler")
        if which == "torch's":
            size = rng.randint(1, 4)
            words.append(f"of {size}")
            sampler: Any = BatchSampler(EveryOther(length, is_sized=True), size, drop_last=False)
            return Part(DataLoader(dataset, batch_sampler=sampler, **options), True, True, length, words)
        sampler = Buckets(sizes) if which == "own" else Shifted(sizes)
        return Part(DataLoader(dataset, batch_sampler=sampler, **options), which == "own", True, length, words)


def _distributed(dataset: Any, *, shuffle: bool) -> Any:
    """A sampler as in PyTorch's tutorials, which asks the process group for the ranks where there is one."""
    ranks = {} if torch.distributed.is_initialized() else {"num_replicas": 1, "rank": 0}
    return DistributedSampler(dataset, shuffle=shuffle, **ranks)


def case(number: int) -> Case:
    """Make a case; call it again for loaders that nobody has used."""
    rng = random.Random(number)
    world_size = 2 if number % _RANKS_EVERY == _RANKS_EVERY - 1 else 1
    trainer: dict[str, Any] = {"max_epochs": rng.choice([1, 2, 3])}
    choices: dict[str, list[Any]] = {
        "limit_train_batches": [1, 2, 3, 0.5],
        "limit_val_batches": [0, 1, 2, 0.5],
        "num_sanity_val_steps": [0, 1, -1],
        "check_val_every_n_epoch": [2],
        "accumulate_grad_batches": [2, 3],
        "reload_dataloaders_every_n_epochs": [1, 2],
        "limit_predict_batches": [1, 0.5],
        "limit_test_batches": [1, 0.5],
        "overfit_batches": [1, 2, 0.5],
        "val_check_interval": [1, 2, 0.5],
    }
    for name, values in choices.items():
        if rng.random() < (0.05 if name == "overfit_batches" else 0.15):
            trainer[name] = rng.choice(values)
    if world_size > 1 and rng.random() < 0.15:
        trainer["use_distributed_sampler"] = False
    maker = _Maker(rng, world_size)
    train, evaluation = maker.loaders(0, is_training=True), maker.loaders(10_000, is_training=False)
    runs = ("fit", rng.choice(["validate", "test", "predict"]))
    return Case(number, world_size, train, evaluation, trainer, runs)
