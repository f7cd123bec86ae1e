"""Random numbers in a pipeline: hooks draw the same on all ranks of a replica, and each stage draws different ones.

Outside the stages, user code draws from the default generators of Python, NumPy and torch. Their states are equal on
all ranks of a replica: if only one rank draws, its state is copied to the others. Each stage draws from a separate
stream, which is seeded from the default generator each time the stage runs. So the default generators' state in a
checkpoint determines everything that the stages draw later.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_sm._random_state import RandomState


def random_state() -> bytes:
    """Return the state of the default generators as bytes, to be compared or sent to another rank."""
    return pickle.dumps(RandomState.now())


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the current state of the generators after the block."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()


def take_random_state(sent: bytes) -> None:
    """Set the default generators to the state of another rank.

    Args:
        sent: The result of ``random_state`` on that rank.
    """
    state: RandomState = pickle.loads(sent)  # noqa: S301 - from another rank of this job
    state.restore()


@contextmanager
def stage_stream(position: int) -> Iterator[None]:
    """Let the block draw from the stage's random stream, then restore the default generators.

    The seed is drawn from the default generator, so ranks with the same state draw the same seed.

    Args:
        position: The rank's position in the replica, added to the seed: otherwise, all stages would drop the same
            features.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) + position
    with preserve_random_state():
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(seed)  # of this rank's device only
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
