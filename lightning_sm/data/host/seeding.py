"""The seeding of the random generators that a loader's code uses, and no others: all three take 7 us per sample."""

from __future__ import annotations

import functools
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from lightning_sm.data.host.random_state import GENERATORS, NUMPY, PYTHON, TORCH, Generator

# Seeds all generators that are used, with 64 bits; None: no generator is used.
Seed = Callable[[int], object] | None

_Made = TypeVar("_Made")

# After this many seeds, a loader's code is expected to use only those generators that it has used so far.
_TRIAL_SEEDS = 256

_READERS: tuple[tuple[Generator, ModuleType, str], ...] = (
    (PYTHON, random, "getstate"),
    (NUMPY, np.random, "get_state"),
    (TORCH, torch, "initial_seed"),
    (TORCH, torch, "get_rng_state"),
    (TORCH, torch.random, "initial_seed"),
    (TORCH, torch.random, "get_rng_state"),
)

# Limits to the search for changed objects: a dataset may hold a million samples.
_MAX_OBJECTS = 10_000
_MAX_ITEMS = 64

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


class Seeding:
    """The seeds of one loader's batches in one worker, with the same results as if all generators were always seeded.

    At first, all generators are seeded and watched. Later, only those that were used are seeded, and the others are
    watched: if a batch uses one of them, the batch is made again with that one seeded. If the code changes its own
    objects, making a batch twice could change the results, so all generators are always seeded.

    Args:
        trial_seeds: How many seeds are set before some generators are left out.
    """

    # The one that ran last in this process: after another one has run, unused generators must be watched afresh.
    _last: ClassVar[Seeding | None] = None

    def __init__(self, trial_seeds: int = _TRIAL_SEEDS) -> None:
        self._seeds_left = trial_seeds
        self._is_on_trial = True
        self._used: set[Generator] = set()
        self._seed: Seed = None
        self._objects: list[object] | None = None

    def run(self, make: Callable[[Seed], _Made], owners: Sequence[object]) -> _Made:
        """Make a batch, or raise what making it raises.

        Args:
            make: Makes the batch, and calls its argument with the seed of each sample. It may be called several times.
            owners: The objects whose code it runs.
        """
        if Seeding._last is not self:
            Seeding._last = self
            for generator in GENERATORS:
                if generator not in self._used:
                    generator.clear()
        if self._is_on_trial:
            return self._run_trial(make, owners)
        try:
            made = make(self._seed)
        except Exception:
            if not self._has_missed():
                raise
        else:
            if not self._has_missed():
                return made
        return self.run(make, owners)

    def _has_missed(self) -> bool:
        """Return whether a generator was used that was not seeded; seed it from now on."""
        missed = [generator for generator in GENERATORS if generator not in self._used and generator.was_used]
        if missed:
            self._use(missed)
        return bool(missed)

    def _use(self, generators: Iterable[Generator]) -> None:
        self._used.update(generators)
        used = [generator for generator in GENERATORS if generator in self._used]

        def seed_used(seed: int) -> None:
            for generator in used:
                generator.seed(seed)

        self._seed = seed_used if used else None

    def _run_trial(self, make: Callable[[Seed], _Made], owners: Sequence[object]) -> _Made:
        try:
            return make(self._seed_on_trial)
        finally:
            self._note_use()
            if self._objects is None:  # not before the first batch, which may open files
                self._objects = _state_of(owners)
            elif self._seeds_left <= 0:
                self._is_on_trial = False
                self._use(self._used if _state_of(owners) == self._objects else GENERATORS)

    def _seed_on_trial(self, seed: int) -> None:
        self._note_use()
        for generator in GENERATORS:
            generator.start(seed)
        self._seeds_left -= 1

    def _note_use(self) -> None:
        self._used.update(generator for generator in GENERATORS if generator.was_used)


def watch_readers() -> None:
    """Notice when code in this process reads a state but draws nothing, to seed a generator of its own, for example."""

    def watched(generator: Generator, read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def noticed(*args: Any, **options: Any) -> Any:
            generator.was_read = True
            return read(*args, **options)

        return noticed

    for generator, module, name in _READERS:
        setattr(module, name, watched(generator, getattr(module, name)))


def _state_of(owners: Iterable[object]) -> list[object]:
    """Return what code could have changed in its objects: plain values, sizes of containers, states of generators."""
    found: list[object] = []
    seen: set[int] = set()
    queue = deque(owners)
    while queue and len(seen) < _MAX_OBJECTS:
        value: Any = queue.popleft()
        if isinstance(value, _PLAIN):
            found.append(value)
        elif id(value) not in seen and not isinstance(value, (type, FunctionType, ModuleType)):
            seen.add(id(value))
            try:
                if isinstance(value, _GENERATORS):
                    found.append(pickle.dumps(value))
                elif type(value) in _CONTAINERS:
                    found.append(len(value))
                    if len(value) <= _MAX_ITEMS:
                        queue.extend(value.values() if isinstance(value, dict) else value)
                else:
                    queue.extend(getattr(value, "__dict__", {}).values())
            except Exception:  # noqa: BLE001  # of the user's classes, or of a generator on a GPU
                found.append(object())  # what cannot be looked at may change
    return found
