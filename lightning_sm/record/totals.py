"""The sums over a rank's steps, and the pace of several ranks, for all readers of a record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_sm.record.events import PARTS, Steps


@dataclass
class Totals:
    """Sums over consecutive, complete steps.

    Attributes:
        num_steps: Number of timed steps, over which means are taken.
        samples: Number of samples in their batches.
        parts: Seconds by part.
        in_transit_s: Seconds of ``data_wait`` in which the batch was in transit from a data host.
        num_untimed: Number of steps that the other sums exclude: the first step of each process.
    """

    num_steps: int = 0
    samples: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    in_transit_s: float = 0.0
    num_untimed: int = 0

    @classmethod
    def of(cls, lines: Iterable[Steps]) -> Totals:
        """Sum the lines of a record."""
        lines = list(lines)
        return cls(
            sum(line.n for line in lines),
            sum(line.samples for line in lines),
            {part: math.fsum(line.parts.get(part, 0.0) for line in lines) for part in PARTS},
            num_untimed=sum(line.untimed for line in lines),
        )

    @property
    def num_trained(self) -> int:
        """Total number of steps, timed and untimed."""
        return self.num_steps + self.num_untimed

    @property
    def wall_s(self) -> float:
        """Total seconds of the timed steps."""
        return sum(self.parts.values())

    @property
    def step_s(self) -> float:
        """Mean seconds per step; 0 without steps."""
        return self.wall_s / self.num_steps if self.num_steps else 0.0

    @property
    def waiting(self) -> float:
        """The share of the steps' time spent waiting for data, 0 to 1."""
        return self.share("data_wait")

    def share(self, *parts: str) -> float:
        """Return the share of the steps' time spent in some parts, 0 to 1."""
        return sum(self.parts[name] for name in parts) / max(1e-9, self.wall_s)

    def plus(self, other: Totals, sign: int = 1) -> Totals:
        """Add ``other``; with ``sign=-1``, subtract it, which gives the sums since ``other`` was taken."""
        return Totals(
            self.num_steps + sign * other.num_steps,
            self.samples + sign * other.samples,
            {part: seconds + sign * other.parts[part] for part, seconds in self.parts.items()},
            self.in_transit_s + sign * other.in_transit_s,
            num_untimed=self.num_untimed + sign * other.num_untimed,
        )


def pace_of(ranks: Mapping[int, Totals]) -> tuple[int | None, Totals]:
    """Return the rank that sets the pace, and its steps; None and empty sums if no steps were timed.

    The pace is set by the last rank to reach the gradient exchange in the backward pass.

    Args:
        ranks: The sums over each rank's steps, all from the same period.
    """
    timed = {rank: steps for rank, steps in ranks.items() if steps.num_steps}
    if not timed:
        return None, Totals()
    rank = max(timed, key=lambda rank: (timed[rank].wall_s - timed[rank].parts["backward"]) / timed[rank].num_steps)
    return rank, timed[rank]


def with_longest_wait(parts: Mapping[str, float], share: float) -> dict[str, float]:
    """Estimate the parts for the rank that waits longest for data, from the parts of another rank.

    The other ranks wait for that rank in their backward pass, and this wait looks like work. So the additional wait is
    subtracted from the backward pass first, and any remainder from the other parts.

    Args:
        parts: Seconds by part, measured on the other rank.
        share: The share of the time that the longest-waiting rank waits for data, 0 to 1.
    """
    more_s = max(0.0, share * sum(parts.values()) - parts["data_wait"])
    in_backward_s = min(more_s, parts["backward"])
    work_s = sum(seconds for part, seconds in parts.items() if part not in ("data_wait", "backward"))
    left = max(0.0, 1.0 - (more_s - in_backward_s) / max(1e-9, work_s))
    scaled = {part: left * seconds for part, seconds in parts.items()}
    return scaled | {"data_wait": parts["data_wait"] + more_s, "backward": parts["backward"] - in_backward_s}


def samples_per_step(ranks: Iterable[Totals], world_size: int) -> float | None:
    """Return the number of samples per step over all ranks; None if it is unknown for any rank.

    Args:
        ranks: The sums of each rank, with at least one step.
        world_size: Number of ranks.
    """
    means = [steps.samples / steps.num_steps for steps in ranks]
    return of_all_ranks(means, world_size) if means and all(means) else None


def of_all_ranks(values: Sequence[float], world_size: int) -> float:
    """Return the sum over all ranks, assuming the mean for ranks without a value."""
    return math.fsum(values) * max(1.0, world_size / len(values)) if values else 0.0
