"""The seeding of the random generators that the code of a loader draws from."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from lightning_sm.data.host.generators import GLOBALS, HeldGenerators, seed_generator

logger = logging.getLogger(__name__)

# After so many batches, a loader's code is expected to draw only from those global generators
# that it has drawn from so far. Seeding all three takes 6 us.
_TRIAL_SEEDS = 1024


class Seeding:
    """The seeding of one loader in one worker.

    The generators that the loader's objects hold are always seeded. Global ones are, too, if anything has drawn from
    them in the first batches. The others are watched: they are seeded alike before each request, and must still yield
    the same number after it.

    Args:
        name: Name of the loader, for messages.
        *owners: The objects whose code draws.
        trial_seeds: How many seeds are set before some generators are left out.

    Attributes:
        name: Name of the loader, for messages.
    """

    # Which object has prepared the unused generators last in this process, and with which seed.
    _watched: ClassVar[tuple[Seeding | None, int]] = (None, 0)

    def __init__(self, name: str, *owners: object, trial_seeds: int = _TRIAL_SEEDS) -> None:
        self.name = name
        self._owners = owners
        self._held: HeldGenerators | None = None
        self._has_searched_again = False
        self._seeds_left = trial_seeds
        self._is_on_trial = True
        self._used: list[Any] = []
        self._unused: dict[Any, object] = dict.fromkeys(GLOBALS)  # and what they yield as long as nothing draws

    def start(self, seed: int) -> Callable[[int], None] | None:
        """Prepare for a batch.

        Args:
            seed: For generators that nothing draws from: code may look at their state.

        Returns:
            A function that takes the seed of each batch before the batch is built; None: there is nothing to seed.
        """
        if self._held is None:
            self._held = HeldGenerators(*self._owners)
        if Seeding._watched != (self, seed):
            self._watch(seed)
        self._is_on_trial = self._seeds_left > 0
        return self._seed if self._is_on_trial or self._used or self._held else None

    def check(self) -> None:
        """Notice draws from generators that are not seeded. Call it after a request."""
        self._note_draws()
        if self._held is not None and not self._has_searched_again:
            self._held.search_again()
            self._has_searched_again = True

    def _seed(self, seed: int) -> None:
        if self._is_on_trial:
            self._seeds_left -= 1
            self._watch(seed)
        for generator in self._used:
            seed_generator(generator, seed)
        if self._held:
            self._held.seed(seed)

    def _watch(self, seed: int) -> None:
        self._note_draws()
        for generator in self._unused:
            seed_generator(generator, seed)
            self._unused[generator] = _next_of(generator)
            seed_generator(generator, seed)
        Seeding._watched = self, seed

    def _note_draws(self) -> None:
        """Seed the generators that were drawn from for the first time from now on, instead of watching them."""
        if Seeding._watched[0] is not self:
            return
        Seeding._watched = None, 0
        drawn = [generator for generator, expected in self._unused.items() if _next_of(generator) != expected]
        for generator in drawn:
            del self._unused[generator]
            self._used.append(generator)
            if not self._is_on_trial:
                logger.warning(
                    "The code of %s has drawn from the global generator of %s for the first time, after more than %d "
                    "batches in this worker. Batches of the last request are not reproducible; all later ones are. "
                    "Draw from this generator in every batch, if each must be.",
                    self.name,
                    getattr(generator, "__name__", "torch"),
                    _TRIAL_SEEDS,
                )


def _next_of(generator: Any) -> object:
    """Return what differs if anything has drawn from a global generator. It may draw itself."""
    if generator is random:
        return random.random()  # noqa: S311  # not for secrets
    return np.random.random_sample() if generator is np.random else generator.get_state().numpy().tobytes()
