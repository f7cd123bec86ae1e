"""Random cases: loaders, Trainer settings, and the calls of a script. The number of a case determines all of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from tests.differential.draws import GLOBAL_KINDS, HELD_KINDS, PLACES, Dice
from tests.differential.samplers import (
    Backwards,
    Buckets,
    Counting,
    EveryOther,
    Oversampled,
    Shifted,
    Strided,
    distributed,
)
from tests.differential.samples import KINDS, Lists, Mixing, Samples, Stream, collate_twice, keep_list

# Only every eighth case has two ranks, because such cases take longer to start.
_RANKS_EVERY = 8

# Offsets of sample numbers, which identify the hooks, the stage and the loader of a sample.
_OF_HOOKS, _OF_EVALUATION, _OF_PART, _OF_CONCATENATED = 100_000, 10_000, 1000, 500


@dataclass
class Part:
    """A loader, and the properties of its batches that are the same in every run.

    Attributes:
        loader: The loader.
        is_ordered: Whether the batches arrive in the same order with stock Lightning and with data hosts.
        is_complete: Whether each pass has every sample once.
        size: Number of samples in a pass.
        words: Description of the loader.
    """

    loader: DataLoader[Any]
    is_ordered: bool
    is_complete: bool
    size: int
    words: list[str]

    def has(self, word: str) -> bool:
        """Return whether the description contains a word."""
        return any(word in phrase for phrase in self.words)


@dataclass
class Loaders:
    """The loaders that a ``*_dataloader()`` hook returns.

    Attributes:
        value: The return value: the loaders in their structure.
        parts: The loaders one by one.
        mode: How the loaders are combined: ``sequential``, or another mode of ``CombinedLoader``.
        shape: Name of the structure.
    """

    value: Any
    parts: list[Part]
    mode: str
    shape: str = "one"

    @property
    def words(self) -> str:
        """Description of the loaders, for people."""
        return "; ".join([self.shape, *(", ".join(part.words) for part in self.parts)])

    def has(self, word: str) -> bool:
        """Return whether the description of a loader contains a word."""
        return any(part.has(word) for part in self.parts)

    @staticmethod
    def index_of(sample: int) -> int:
        """Return the index of a sample's loader, from the sample's number."""
        return sample % _OF_EVALUATION // _OF_PART


class Hooks(NamedTuple):
    """The loaders of a DataModule's hooks.

    Attributes:
        train: Loaders for training.
        evaluation: Loaders for validation, test and prediction.
    """

    train: Loaders
    evaluation: Loaders


class Act(NamedTuple):
    """A call of a method of the Trainer.

    Attributes:
        method: Name of the method: ``fit``, ``validate``, ``test`` or ``predict``.
        hooks: Index of the case's hooks that return the loaders.
        holder: Owner of the hooks: ``datamodule``, ``other datamodule``, ``model``, or ``bare`` if the script passes
            the loaders themselves.
        trainer: ``new``, ``same``, or ``continued``: the same Trainer for one more epoch.
    """

    method: str
    hooks: int
    holder: str
    trainer: str


@dataclass
class Case:
    """One script.

    Attributes:
        number: Seed of the case.
        world_size: Number of ranks.
        hooks: Loaders of the DataModule, before and after the script changes one of its attributes.
        trainer: Arguments of the Trainer.
        acts: Calls of the Trainer's methods.
    """

    number: int
    world_size: int
    hooks: list[Hooks]
    trainer: dict[str, Any]
    acts: list[Act]

    @property
    def words(self) -> str:
        """Description of the case, for people."""
        acts = ", ".join(f"{act.method} {act.hooks} ({act.holder}, {act.trainer} trainer)" for act in self.acts)
        loaders = "; ".join(
            f"{number}: train: {hooks.train.words}; evaluation: {hooks.evaluation.words}"
            for number, hooks in enumerate(self.hooks)
        )
        return f"{self.world_size} ranks; {acts}; {loaders}; {self.trainer}"

    def loaders(self, act: int, stage: str) -> Loaders:
        """Return the loaders of a stage.

        Args:
            act: Index of the call.
            stage: Name of the stage; all stages other than ``train`` share their loaders.
        """
        hooks = self.hooks[self.acts[act].hooks]
        return hooks.train if stage == "train" else hooks.evaluation


class _Maker:
    """A generator of the loaders of a case.

    Args:
        rng: Source of all random choices.
        world_size: Number of ranks.
        splits: Whether the Trainer splits the data over the ranks.
    """

    def __init__(self, rng: random.Random, world_size: int, *, splits: bool) -> None:
        self._rng, self._world_size, self._splits = rng, world_size, splits

    def hooks(self, number: int) -> Hooks:
        """Make the loaders of some hooks.

        Args:
            number: Index of the hooks in the case.
        """
        first = number * _OF_HOOKS
        return Hooks(self._loaders(first, is_training=True), self._loaders(first + _OF_EVALUATION, is_training=False))

    def _loaders(self, first: int, *, is_training: bool) -> Loaders:
        shape = self._rng.choice(["one", "one", "one", "list", "dict", "combined"])
        mode = "max_size_cycle" if is_training else "sequential"
        if shape == "one":
            part = self._part(first, may_stream=True, is_training=is_training)
            return Loaders(part.loader, [part], mode)
        if shape == "combined":
            mode = self._rng.choice(["max_size_cycle", "max_size", "min_size", "sequential"])
            shape = f"combined {mode}"
        num_parts = self._rng.choice([1, 2, 3])
        # Combined loaders need the same number of steps, and thus of samples, on all ranks.
        is_even = self._world_size > 1 and mode != "sequential"
        parts = [
            self._part(first + _OF_PART * number, is_even=is_even, is_training=is_training)
            for number in range(num_parts)
        ]
        value: Any = [part.loader for part in parts]
        if shape == "dict":
            value = {f"loader {number}": loader for number, loader in enumerate(value)}
        elif shape.startswith("combined"):
            value = CombinedLoader(value, mode)
        return Loaders(value, parts, mode, shape)

    def _part(self, first: int, *, is_training: bool, may_stream: bool = False, is_even: bool = False) -> Part:
        rng = self._rng
        kind = rng.choice(KINDS)
        lengths = [2, 4, 8, 14, 20, 32] if is_even else [1, 2, 3, 5, 8, 13, 20, 31]
        # Stock Lightning cannot predict fewer samples than ranks: one rank fails, and the other waits for it.
        length = rng.choice([size for size in lengths if size >= self._world_size])
        if may_stream and rng.random() < 0.2:
            return self._stream(kind, length, first)
        dataset: Any = rng.choice([Samples, Lists])(length, first, kind, self._dice())
        words = [f"{type(dataset).__name__} of {length} {kind}"]
        if dataset.transform is not None:
            words.append(f"random by {dataset.transform.words}")
        wrapped = rng.random()
        if wrapped < 0.1 and not is_even and length > 2:
            dataset = Subset(dataset, list(range(length))[:: rng.choice([1, 2])])
            words.append("Subset")
        elif wrapped < 0.2:
            own = dataset.transform and Dice(dataset.transform.kinds, rng.choice(PLACES))
            more = Samples(4 if is_even else 3, first + _OF_CONCATENATED, kind, own)
            dataset = ConcatDataset([dataset, more])
            words.append("ConcatDataset")
        ways = ["plain", "shuffle", "sampler", "sampler", "none"]
        # On several ranks, stock Lightning replaces batch samplers, which changes the number of steps.
        ways += [] if is_even else ["batch_sampler"]
        how = rng.choice(ways)
        collate = self._collate(first, words, takes_list=how != "none")
        if how == "none":
            words.append("batch_size=None")
            return Part(DataLoader(dataset, batch_size=None, collate_fn=collate), True, True, len(dataset), words)
        if how == "batch_sampler":
            return self._with_batch_sampler(dataset, collate, words)
        size = rng.choice([1, 2, 3, 4, 8])
        drop_last = rng.random() < 0.25
        words.append(f"batch_size={size}" + (", drop_last" if drop_last else ""))
        options: dict[str, Any] = {"batch_size": size, "drop_last": drop_last, "collate_fn": collate}
        if how == "plain":
            return Part(DataLoader(dataset, **options), True, True, len(dataset), words)
        if how == "shuffle":
            words.append("shuffle")
            return Part(DataLoader(dataset, shuffle=True, **options), False, True, len(dataset), words)
        samplers = self._samplers(dataset, is_even=is_even, is_training=is_training)
        name, sampler, is_ordered, is_complete, size = rng.choice(samplers)
        words.append(name)
        return Part(DataLoader(dataset, sampler=sampler, **options), is_ordered, is_complete, size, words)

    def _dice(self, share: float = 0.6) -> Dice | None:
        """Make random augmentation for a share of the loaders."""
        rng = self._rng
        is_random = rng.random() < share
        kinds = rng.sample([*GLOBAL_KINDS, *HELD_KINDS], rng.choice([1, 2, 3]))
        place = rng.choice(PLACES)
        return Dice(kinds, place) if is_random else None

    def _collate(self, first: int, words: list[str], *, takes_list: bool) -> Any:
        rng = self._rng
        collate: Any = None
        if rng.random() < 0.25:
            collate = rng.choice([keep_list, collate_twice])
            if collate is collate_twice and not takes_list:
                collate = None
        dice = self._dice(0.2)
        if dice is not None:
            collate = Mixing(collate or (default_collate if takes_list else default_convert), first, dice)
        if collate is not None:
            words.append(collate.__name__)
        return collate

    def _stream(self, kind: str, length: int, first: int) -> Part:
        rng = self._rng
        size = rng.choice([None, 1, 2, 4])
        # Ranks of stock Lightning must have the same number of batches.
        length += -length % (self._world_size * (size or 1)) if self._world_size > 1 else 0
        words = [f"stream of {length} {kind}", f"batch_size={size}"]
        transforms = None
        if rng.random() < 0.6:
            of_all = Dice(rng.sample(GLOBAL_KINDS, rng.choice([1, 2])), "attribute")
            transforms = of_all, Dice(rng.sample(HELD_KINDS, rng.choice([1, 2])), rng.choice(PLACES))
            words += [f"random by {one.words}" for one in transforms]
        loader: Any = DataLoader(Stream(length, first, kind, transforms), batch_size=size)
        return Part(loader, False, True, length, words)

    def _samplers(self, dataset: Any, *, is_even: bool, is_training: bool) -> list[tuple[str, Any, bool, bool, int]]:
        length = len(dataset)
        is_uneven = length % self._world_size != 0
        skewed = [1.0 + 9.0 * (index % 3 == 0) for index in range(length)]
        often = Oversampled(length, is_even=is_even)
        samplers = [
            ("SequentialSampler", SequentialSampler(dataset), True, True, length),
            ("RandomSampler with replacement", RandomSampler(dataset, replacement=True), False, False, length),
            ("SubsetRandomSampler", SubsetRandomSampler(range(length)), False, True, length),
            ("WeightedRandomSampler", WeightedRandomSampler(skewed, 2 * length), False, False, 2 * length),
            ("RandomSampler with generator", RandomSampler(dataset, generator=torch.Generator()), False, True, length),
            ("DistributedSampler", distributed(dataset, shuffle=True), False, True, length),
            ("DistributedSampler in order", distributed(dataset, shuffle=False), True, True, length),
            ("DistributedSampler that drops", distributed(dataset, shuffle=True, drop_last=True), False, True, length),
            ("reversed DistributedSampler", distributed(dataset, Backwards), not is_uneven, True, length),
        ]
        # Stock Lightning would split the indices of such a sampler by rank a second time.
        if self._world_size == 1 or not self._splits:
            samplers.append(("sampler with rank", Strided(length), True, True, length))
        # If the Trainer does not split, training with a sampler that ignores the rank is an error.
        if self._splits or self._world_size == 1 or not is_training:
            samplers += [
                ("own sampler", EveryOther(length, is_sized=True), True, True, length),
                ("own sampler without length", EveryOther(length, is_sized=False), True, True, length),
                ("own sampler that repeats", often, True, False, len(often)),
                ("sampler that counts its passes", Counting(length), True, True, length),
            ]
        if not is_even:
            half = max(1, length // 2)
            samplers.append(("RandomSampler of a part", RandomSampler(dataset, num_samples=half), False, False, half))
        return samplers

    def _with_batch_sampler(self, dataset: Any, collate: Any, words: list[str]) -> Part:
        rng = self._rng
        length = len(dataset)
        sizes: list[int] = []
        while sum(sizes) < length:
            sizes.append(min(rng.randint(1, 5), length - sum(sizes)))
        kind = rng.choice(["torch's", "own", "own with random numbers"])
        words.append(f"{kind} batch sampler")
        if kind == "torch's":
            size = rng.randint(1, 4)
            words.append(f"of {size}")
            sampler: Any = BatchSampler(EveryOther(length, is_sized=True), size, drop_last=False)
        else:
            sampler = Buckets(sizes) if kind == "own" else Shifted(sizes)
        loader: Any = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        return Part(loader, kind != "own with random numbers", True, length, words)


def _acts(rng: random.Random) -> list[Act]:
    """Choose a script's calls: a fit, then evaluations or more fits, with the same or other loaders."""
    acts = [Act("fit", 0, rng.choice(["datamodule", "datamodule", "bare", "model"]), "new")]
    for _ in range(rng.choice([1, 1, 2])):
        last = acts[-1]
        method = rng.choice(["fit", "validate", "test", "predict"])
        hooks = rng.choice([last.hooks, rng.randrange(2)])
        trainer = rng.choice(["new", "same"])
        holder = rng.choice([last.holder, last.holder, "datamodule", "other datamodule", "bare", "model"])
        if method == "fit" and last.method == "fit" and rng.random() < 0.3:
            trainer, holder = "continued", last.holder
        elif method == "fit":
            trainer = "new"
        # The other DataModule has its own data, at index 2.
        acts.append(Act(method, 2 if holder == "other datamodule" else hooks % 2, holder, trainer))
    return acts


def case(number: int, num_workers: int = 0) -> Case:
    """Make a case; each call returns fresh loaders.

    Args:
        number: Seed of the case.
        num_workers: Number of workers of each loader.
    """
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
    if world_size > 1 and rng.random() < 0.25:
        trainer["use_distributed_sampler"] = False
    acts = _acts(rng)
    maker = _Maker(rng, world_size, splits=trainer.get("use_distributed_sampler", True))
    hooks = [maker.hooks(index) for index in range(1 + max(act.hooks for act in acts))]
    if num_workers:
        for part in (part for one in hooks for loaders in one for part in loaders.parts):
            part.loader.num_workers, part.loader.prefetch_factor = num_workers, 2
    return Case(number, world_size, hooks, trainer, acts)
