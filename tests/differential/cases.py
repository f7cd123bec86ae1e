"""Random cases: loaders of all kinds, and settings of the Trainer. A case is a function of its number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

KINDS = ("number", "tensor", "dict", "tuple", "nested", "text")


def sample(kind: str, index: int) -> Any:
    """A sample that has its index in all of its parts."""
    if kind == "number":
        return index
    if kind == "tensor":
        return torch.full((2, 3), index)
    if kind == "dict":
        return {"index": index, "x": torch.full((4,), float(index))}
    if kind == "tuple":
        return torch.full((3,), float(index)), index
    if kind == "nested":
        return {"index": index, "more": [torch.tensor(index), {"half": index / 2}]}
    return {"index": index, "text": f"sample {index}"}


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
    """An iterable dataset, split over workers."""

    def __init__(self, length: int, first: int, kind: str) -> None:
        self.length, self.first, self.kind = length, first, kind

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, self.length, info.num_workers if info else 1):
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
    """A collate function of the user's."""
    return {"samples": samples, "count": len(samples)}


@dataclass
class Described:
    """A loader, and what of its batches is the same in every run.

    Attributes:
        make: The loader, or a structure of loaders.
        is_ordered: Whether the batches come in the same order in stock Lightning and here.
        is_complete: Whether each pass has every sample once.
    """

    make: Any
    is_ordered: bool
    is_complete: bool
    words: list[str] = field(default_factory=list)


@dataclass
class Case:
    """One script.

    Attributes:
        number: What it is made from.
        train: Loaders for training.
        evaluation: Loaders for validation, test and prediction.
        trainer: Arguments of the Trainer.
        words: What it is, for people.
    """

    number: int
    train: Described
    evaluation: Described
    trainer: dict[str, Any]

    @property
    def words(self) -> str:
        """What it is, for people."""
        return f"train: {self.train.words}; evaluation: {self.evaluation.words}; {self.trainer}"


def _single(rng: random.Random, first: int, *, may_stream: bool) -> Described:
    kind = rng.choice(KINDS)
    length = rng.choice([1, 2, 3, 5, 8, 13, 20, 31])
    options: dict[str, Any] = {}
    if rng.random() < 0.2:
        options["collate_fn"] = keep_list
    if rng.random() < 0.15:
        options["num_workers"] = 0
        options["pin_memory"] = False
    if may_stream and rng.random() < 0.15:
        size = rng.choice([None, 1, 2, 4])
        words = [f"stream of {length} {kind}, batch_size={size}"]
        # Shards have batches of their own, so that only the samples are the same.
        return Described(DataLoader(Stream(length, first, kind), batch_size=size), False, True, words)
    dataset: Dataset = rng.choice([Samples, Lists])(length, first, kind)
    words = [f"{type(dataset).__name__} of {length} {kind}", *options]
    wrapped = rng.random()
    if wrapped < 0.1:
        dataset = Subset(dataset, list(range(length))[:: rng.choice([1, 2])])
        words.append("Subset")
    elif wrapped < 0.2:
        dataset = ConcatDataset([dataset, Samples(3, first + 500, kind)])
        words.append("ConcatDataset")
    length = len(dataset)  # type: ignore[arg-type]
    how = rng.choice(["plain", "shuffle", "sampler", "batch_sampler", "none"])
    if how == "none":
        words.append("batch_size=None")
        return Described(DataLoader(dataset, batch_size=None, **options), True, True, words)
    if how == "batch_sampler":
        return _with_batch_sampler(rng, dataset, length, options, words)
    size = rng.choice([1, 2, 3, 4, 8])
    drop_last = rng.random() < 0.25
    words.append(f"batch_size={size}" + (", drop_last" if drop_last else ""))
    options |= {"batch_size": size, "drop_last": drop_last}
    if how == "plain":
        return Described(DataLoader(dataset, **options), True, not drop_last, words)
    if how == "shuffle":
        words.append("shuffle")
        return Described(DataLoader(dataset, shuffle=True, **options), False, not drop_last, words)
    name, sampler, is_ordered, is_complete = rng.choice(_samplers(dataset, length))
    words.append(name)
    return Described(DataLoader(dataset, sampler=sampler, **options), is_ordered, is_complete and not drop_last, words)


def _samplers(dataset: Any, length: int) -> list[tuple[str, Any, bool, bool]]:
    return [
        ("SequentialSampler", SequentialSampler(dataset), True, True),
        ("own sampler", EveryOther(length, is_sized=True), True, True),
        ("own sampler without length", EveryOther(length, is_sized=False), True, True),
        ("sampler that counts its passes", Counting(length), True, True),
        ("RandomSampler with replacement", RandomSampler(dataset, replacement=True), False, False),
        ("RandomSampler of half", RandomSampler(dataset, num_samples=max(1, length // 2)), False, False),
        ("SubsetRandomSampler", SubsetRandomSampler(range(length)), False, True),
        ("WeightedRandomSampler", WeightedRandomSampler([1.0] * length, length), False, False),
        ("RandomSampler with generator", RandomSampler(dataset, generator=torch.Generator()), False, True),
    ]


def _with_batch_sampler(
    rng: random.Random, dataset: Any, length: int, options: dict[str, Any], words: list[str]
) -> Described:
    sizes: list[int] = []
    while sum(sizes) < length:
        sizes.append(min(rng.randint(1, 5), length - sum(sizes)))
    which = rng.choice(["torch's", "own", "own with random numbers"])
    words.append(f"{which} batch sampler")
    if which == "torch's":
        sampler: Any = BatchSampler(EveryOther(length, is_sized=True), rng.randint(1, 4), drop_last=False)
        return Described(DataLoader(dataset, batch_sampler=sampler, **options), True, True, words)
    sampler = Buckets(sizes) if which == "own" else Shifted(sizes)
    return Described(DataLoader(dataset, batch_sampler=sampler, **options), which == "own", True, words)


def _several(rng: random.Random, first: int, *, is_training: bool) -> Described:
    shape = rng.choice(["one", "one", "one", "list", "dict", "combined"])
    if shape == "one":
        return _single(rng, first, may_stream=True)
    parts = [_single(rng, first + 1000 * number, may_stream=False) for number in range(rng.choice([1, 2, 3]))]
    loaders: Any = [part.make for part in parts]
    if shape == "dict" and is_training:
        loaders = {f"loader {number}": loader for number, loader in enumerate(loaders)}
    elif shape == "combined":
        mode = rng.choice(["max_size_cycle", "max_size", "min_size", "sequential"])
        shape = f"combined {mode}"
        loaders = CombinedLoader(loaders, mode)
    words = [shape, *(str(part.words) for part in parts)]
    is_ordered = all(part.is_ordered for part in parts)
    # With loaders of different lengths the mode decides what is complete.
    return Described(loaders, is_ordered, False, words)


def case(number: int) -> Case:
    """Make a case; call it again for loaders that nobody has used."""
    rng = random.Random(number)
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
    return Case(number, _several(rng, 0, is_training=True), _several(rng, 10_000, is_training=False), trainer)
