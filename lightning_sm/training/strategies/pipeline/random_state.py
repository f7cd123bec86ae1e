"""The random numbers of a pipeline: the same on all ranks of a replica in hooks, others in each stage.

User code outside the stages draws from the default generators of Python, NumPy and torch, whose states are equal on all
ranks of a replica: where one rank alone draws, the others get its state. The stages of a rank draw from a stream of
their own, whose seed is drawn from the default generator for each run. So a checkpoint with the state of the default
generators has all that the stages draw later.
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
    """Return the state of the default generators, to be compared, or sent to another rank."""
    return pickle.dumps(RandomState.now())


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Give the generators the state back that they have now."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()


def take_random_state(sent: bytes) -> None:
    """Set the default generators to the state of another rank.

    Args:
        sent: What ``random_state`` has returned there.
    """
    state: RandomState = pickle.loads(sent)  # noqa: S301 - a rank's own
    state.restore()


@contextmanager
def stage_stream(position: int) -> Iterator[None]:
    """Let code draw from a rank's own stream of random numbers, and the default generators go on as before it.

    The seed of this run comes from the default generator, the same on ranks with the same state.

    Args:
        position: The rank's position in the replica: stages would otherwise drop the same features.
    """
    own = int(torch.randint(2**62, (), device="cpu")) + position
    with preserve_random_state():
        torch.default_generator.manual_seed(own)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(own)  # that of this rank's device alone
        random.seed(own)
        np.random.seed(own % 2**32)
        yield
