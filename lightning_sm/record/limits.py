"""What readers of a run mean by waiting, by busy workers, and by a rank that holds up the others. Pure rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from lightning_sm._text import duration

# A training that waits for a smaller share of its time is not input-bound (as in the TensorFlow profiler).
NOT_INPUT_BOUND = 0.05
# Workers are the limit if they are busy for this share of the time in which there is something to do.
WORKERS_ARE_BUSY = 0.8
# A limit that costs a smaller share of the job is not shown.
WORTH_SHOWING = 0.05
# What takes less is not worth a word, whatever its share.
MIN_SECONDS = 1.0
# The means of fewer steps say nothing.
MIN_STEPS = 50
# A rank counts as slower than the others from this factor on.
_SLOWER = 2.0


@dataclass(frozen=True)
class WaitCause:
    """Why training waits for its data.

    Attributes:
        name: The cause in a few words, such as ``the network``.
        text: The cause, in a sentence.
        change: What would help; empty if that is not known.
        host: The data host that is the cause; empty if none is.
    """

    name: str
    text: str
    change: str = ""
    host: str = ""


@dataclass(frozen=True)
class RankPace:
    """How fast a rank is by itself.

    Attributes:
        name: Its name, for people.
        num_steps: Number of its steps.
        step_s: Seconds of a step.
        own_s: Seconds of a step in which no other rank can have made it wait.
        wait_s: Seconds of a step in which it waited for data.
    """

    name: str
    num_steps: int
    step_s: float
    own_s: float
    wait_s: float


@dataclass(frozen=True)
class SlowRank:
    """A rank whose own code is so slow that the others wait for it in the backward pass.

    Attributes:
        text: Which, and how slow, in a sentence.
        extra_s: The seconds by which it makes each step longer.
    """

    text: str
    extra_s: float


def slow_rank(ranks: Iterable[RankPace]) -> SlowRank | None:
    """Return the rank that holds up the others; None if there is none.

    Ranks may wait for each other in the forward pass, too, where DistributedDataParallel sends the buffers of rank 0.
    A rank that seems slow, but no slower than others with their waiting for data, may have waited for these.
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
