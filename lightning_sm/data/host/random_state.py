"""Random states of the three generators that transforms draw from: ``random``, NumPy and torch."""

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
    np.random.seed(seed & 0xFFFFFFFF)  # what transforms draw from
    # torch.manual_seed takes 100 us, because it seeds every accelerator, too; this takes 1 us.
    torch.default_generator.manual_seed(seed)


class RandomStates:
    """The states of all three, kept for one of several streams of samples that take turns in a process.

    Args:
        seed: What they start from.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        """Go on where this stream stopped."""
        if self._states is None:
            seed_all(self._seed)
            return
        python, numpy, torch_state = self._states
        random.setstate(python)
        np.random.set_state(numpy)  # what transforms draw from
        torch.default_generator.set_state(torch_state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remember where this stream stopped."""
        self._states = (random.getstate(), np.random.get_state(), torch.default_generator.get_state())
