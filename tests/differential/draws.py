"""Random numbers in samples and batches, and functions that find them there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

# A kind that draws only for some samples.
_SOMETIMES = "sometimes"

_NONE = -1

# With this many bits, two different draws never have the same value; with generators of 32-bit seeds, it is unlikely.
_BITS = 62

_GLOBALS: dict[str, Any] = {"random": random, "numpy": np.random, "torch": torch.default_generator}

_HELD: dict[str, Callable[[], Any]] = {
    "Random": lambda: random.Random(0),
    "RandomState": lambda: np.random.RandomState(0),
    "default_rng": lambda: np.random.default_rng(0),
    "Philox": lambda: np.random.Generator(np.random.Philox(0)),
    "torch.Generator": lambda: torch.Generator().manual_seed(0),
}

GLOBAL_KINDS, HELD_KINDS = (*_GLOBALS, _SOMETIMES), tuple(_HELD)

PLACES = ("attribute", "container", "closure")

# Keys that are not part of a sample, which the comparison with stock Lightning ignores.
DRAWS, HELD_DRAWS, SHARD = "draws", "draws of a shard", "shard"


class Draw(NamedTuple):
    """A random number.

    Attributes:
        index: Number of the sample for which it was drawn; for a batch, the number of the loader's first sample.
        shard: Worker that drew it, if the generators of several workers may be in the same state; else -1.
        value: The random number.
    """

    index: int
    shard: int
    value: int


class Dice:
    """Random augmentation that draws a number from each of its generators.

    Args:
        kinds: Kinds of generators, from ``GLOBAL_KINDS`` and ``HELD_KINDS``. Held generators start in the same state.
        place: Where the generators are held, one of ``PLACES``.

    Attributes:
        kinds: Kinds of generators.
        rolls: Functions that draw, by kind, if closures hold the generators.
        generators: The generators, by kind, if a container holds them.
    """

    def __init__(self, kinds: Sequence[str], place: str) -> None:
        self.kinds, self._place = tuple(kinds), place
        self.rolls: dict[str, Callable[[], int]] = {}
        self.generators: dict[str, Any] = {}
        for kind in (kind for kind in kinds if kind in _HELD):
            generator = _HELD[kind]()
            if place == "closure":
                self.rolls[kind] = _closure(generator)
            elif place == "container":
                self.generators[kind] = generator
            else:
                setattr(self, kind, generator)

    @property
    def words(self) -> str:
        """Description of the generators."""
        return f"{'+'.join(self.kinds)} ({self._place})"

    def roll(self, index: int) -> Any:
        """Draw from each generator.

        Args:
            index: Number of the sample.

        Returns:
            An array of the sample's number and the random numbers.
        """
        return np.array([index, *map(self._roll, self.kinds)], np.int64)

    def _roll(self, kind: str) -> int:
        if kind in self.rolls:
            return self.rolls[kind]()
        if kind == _SOMETIMES:
            return _number(np.random) if random.random() < 0.5 else _NONE
        if kind in _GLOBALS:
            return _number(_GLOBALS[kind])
        return _number(self.generators[kind] if self._place == "container" else getattr(self, kind))


def _closure(generator: Any) -> Callable[[], int]:
    return lambda: _number(generator)


def _number(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        return int(torch.randint(1 << _BITS, (1,), generator=generator))
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(1 << _BITS))
    if isinstance(generator, np.random.RandomState) or generator is np.random:
        return int(generator.randint(1 << _BITS, dtype=np.int64))
    return int(generator.getrandbits(_BITS))


def draws_of(batch: Any) -> list[Draw]:
    """Return all random numbers in a batch, in order."""
    if isinstance(batch, (list, tuple)):
        return [draw for part in batch for draw in draws_of(part)]
    if not isinstance(batch, dict):
        return []
    draws = [Draw(row[0], -1, value) for row in _rows(batch.get(DRAWS)) for value in row[1:] if value != _NONE]
    shards = _rows(batch.get(SHARD))
    for (shard,), row in zip(shards, _rows(batch.get(HELD_DRAWS)), strict=True):
        draws += [Draw(row[0], shard, value) for value in row[1:]]
    return draws + [draw for name, part in without_draws(batch).items() for draw in draws_of(part)]


def without_draws(batch: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dictionary of a batch or sample without its random numbers."""
    return {name: part for name, part in batch.items() if name not in (DRAWS, HELD_DRAWS, SHARD)}


def _rows(value: Any) -> list[list[int]]:
    """Return the rows of an array of shape (numbers,) or (samples, numbers), or none if the array is missing."""
    if value is None:
        return []
    array = np.asarray(value)
    rows: list[list[int]] = array.reshape(-1, array.shape[-1]).tolist()
    return rows
