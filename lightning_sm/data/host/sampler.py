"""The orders of the user's samplers: new in each epoch, and the same on every data host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from lightning_sm.data.host.random_state import seed_all
from lightning_sm.data.ipc.processes import in_fork
from lightning_sm.data.plan.seeds import SampleSeeds

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# Types of attributes by which a sampler may count or switch. Not lists and arrays: a sampler that shuffles one in place
# draws from a generator, which gets a new seed in each epoch.
_PLAIN = (bool, int, float, str, np.generic, type(None))


class SamplerPass(NamedTuple):
    """One pass over a sampler.

    Attributes:
        epoch: Epoch of the training, for ``set_epoch``.
        seeds: The seeds of the pass.
    """

    epoch: int
    seeds: SampleSeeds


class UserSampler:
    """A sampler or batch sampler of the user, with the samplers in its attributes.

    A local sampler continues where its last pass ended. On a data host, each pass starts from the state that the user's
    hook left, in a fork, so that all hosts yield the same order, whatever was requested before. Therefore:

    - Before each pass, the global generators, and those in the sampler's attributes, are seeded for the pass.
    - If a pass changes a number or string in the attributes, such as a counter, the passes of all earlier epochs run
      first. Finding out costs other samplers of the user's one more pass; torch's own samplers are known not to count.

    Args:
        sampler: The sampler; any iterable.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    @property
    def parts(self) -> list[Any]:
        """The sampler, and those in its attributes."""
        return self._parts()[0]

    def yields_indices(self, *, in_batches: bool) -> bool:
        """Draw the first sample in a fork, and return whether it is an integer, as then probably all are.

        Args:
            in_batches: Whether it is a batch sampler.
        """
        try:
            return bool(in_fork(lambda: self._starts_with_index(in_batches)))
        except Exception:  # noqa: BLE001  # raised again when a pass runs the sampler, as with a local loader
            return True

    def order(self, this: SamplerPass, earlier: Sequence[SamplerPass]) -> list[Any]:
        """Return the samples or batches of a pass. Call it in a fork: it changes the state of the sampler.

        Args:
            this: The pass.
            earlier: The passes of the earlier epochs.
        """
        if all(map(is_of_torch, self.parts)):
            earlier = ()
        for past in earlier:
            self._begin(past)
            before = self._plain_state()
            for _ in self._sampler:
                pass
            if self._plain_state() == before:
                break
        self._begin(this)
        return list(self._sampler)

    def _starts_with_index(self, in_batches: bool) -> bool:
        samples = chain.from_iterable(self._sampler) if in_batches else self._sampler
        first: Any = next(iter(samples), 0)
        return isinstance(first, (int, np.integer)) or (isinstance(first, torch.Tensor) and first.ndim == 0)

    def _begin(self, this: SamplerPass) -> None:
        seed_all(this.seeds.of("sampler"))
        for sampler in self._parts()[0]:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(this.epoch)
        # With equal seeds, generators would draw the same numbers.
        for number, generator in enumerate(self._parts()[1]):
            _seed(generator, this.seeds.of(["sampler", number]))

    def _plain_state(self) -> list[str]:
        """Return the numbers and strings in the attributes, as text, so that NaN equals itself."""
        return [
            f"{name}={value!r}"
            for sampler in self._parts()[0]
            for name, value in getattr(sampler, "__dict__", {}).items()
            if isinstance(value, _PLAIN)
        ]

    def _parts(self) -> tuple[list[Any], list[Any]]:
        """Return the samplers in this one, itself first, and the random generators in all of them."""
        samplers: list[Any] = []
        generators: list[Any] = []
        seen: set[int] = set()

        def take(value: Any, *, is_sampler: bool = False) -> None:
            if id(value) in seen:
                return
            seen.add(id(value))
            if isinstance(value, _GENERATORS):
                generators.append(value)
            elif is_sampler or isinstance(value, Sampler):
                samplers.append(value)
                for name, attribute in list(getattr(value, "__dict__", {}).items()):
                    # A BatchSampler takes any iterable.
                    take(attribute, is_sampler=name in ("sampler", "batch_sampler"))
            elif isinstance(value, (list, tuple, dict)):
                items = value.values() if isinstance(value, dict) else value
                # Look only at the first item: it may be a list of a million indices.
                if isinstance(next(iter(items), None), (Sampler, *_GENERATORS)):
                    for item in items:
                        take(item)

        take(self._sampler, is_sampler=True)
        return samplers, generators


def is_of_torch(sampler: Any) -> bool:
    """Return whether a sampler's class is torch's own. These keep no state but that of a generator."""
    return type(sampler).__module__.partition(".")[0] == "torch"


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)  # it takes 32 bits
    else:
        generator.seed(seed)
