"""Thresholds and pure functions for waiting, busy workers and slow ranks, shared by all readers of a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from lightning_sm._text import duration

# Training that waits for less than this share of its time is not input-bound (as in the TensorFlow profiler).
NOT_INPUT_BOUND = 0.05
# Workers are the bottleneck if they are busy for at least this share of the time in which they have work.
WORKERS_ARE_BUSY = 0.8
# Hide limits that cost less than this share of the job's time.
WORTH_SHOWING = 0.05
# Also hide limits that cost fewer seconds than this, whatever their share.
MIN_SECONDS = 1.0
# With fewer steps than this, means are too noisy.
MIN_STEPS = 50
# A rank is slow if it takes at least this many times as long as the others.
_SLOWER = 2.0


@dataclass(frozen=True)
class WaitCause:
    """The reason why training waits for data.

    Attributes:
        name: The cause in a few words, such as ``the network``.
        text: The cause in a sentence.
        change: What would help; empty if unknown.
        host: The data host that causes the wait; empty if no host does.
        is_building: Whether building the batches takes too long, so that more workers may help.
    """

    name: str
    text: str
    change: str = ""
    host: str = ""
    is_building: bool = False


@dataclass(frozen=True)
class RankPace:
    """The speed of a single rank.

    Attributes:
        name: Display name of the rank.
        num_steps: Number of steps.
        step_s: Mean seconds per step.
        own_s: Mean seconds per step spent in this rank's own code, which no other rank can have delayed.
        wait_s: Mean seconds per step spent waiting for data.
    """

    name: str
    num_steps: int
    step_s: float
    own_s: float
    wait_s: float


@dataclass(frozen=True)
class SlowRank:
    """A rank whose code is so slow that the other ranks wait for it in the backward pass.

    Attributes:
        text: A sentence that names the rank and says how slow it is.
        extra_s: Seconds that the rank adds to each step.
    """

    text: str
    extra_s: float


def slow_rank(ranks: Iterable[RankPace]) -> SlowRank | None:
    """Return the rank that slows down the others, or None.

    Ranks can also wait for each other in the forward pass, in which DistributedDataParallel broadcasts rank 0's
    buffers. The time of the slowest rank may therefore include the others' waits for data, so these are added to the
    others' times before comparing.
    """
    timed = [rank for rank in ranks if rank.num_steps]
    if len(timed) <= 1:
        return None
    slow = max(timed, key=lambda rank: rank.own_s)
    others = [rank for rank in timed if rank is not slow]
    others_s = median(rank.own_s for rank in others)
    others_with_waits_s = median(rank.own_s + rank.wait_s for rank in others)
    extra_s = slow.own_s - others_with_waits_s
    is_trivial = extra_s * slow.num_steps < MIN_SECONDS or extra_s < WORTH_SHOWING * slow.step_s
    if is_trivial or slow.own_s < _SLOWER * others_with_waits_s:
        return None
    name = f"{slow.name[:1].upper()}{slow.name[1:]}"
    text = (
        f"{name} holds up the others: apart from the backward pass and the optimizer, its own code takes "
        f"{duration(slow.own_s)} a step, compared with {duration(others_s)} on the others."
    )
    return SlowRank(text, extra_s)
