"""States of the three random generators that transforms use: ``random``, NumPy and torch."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed all three.

    Args:
        seed: 64 bits.
    """
    random.seed(seed)
    # The legacy generator behind np.random.seed takes 32 bits.
    np.random.seed(seed & 0xFFFFFFFF)
    # torch.manual_seed() also seeds every accelerator, and takes 100 us; this takes 1 us.
    torch.default_generator.manual_seed(seed)


class RandomStates:
    """The states of all three for one of several streams of samples that take turns in a process.

    Args:
        seed: Initial seed, 64 bits.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        """Restore the states at which this stream stopped."""
        if self._states is None:
            seed_all(self._seed)
            return
        python, numpy, torch_state = self._states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remember the states at which this stream stopped."""
        self._states = (random.getstate(), np.random.get_state(), torch.default_generator.get_state())
