"""How often ranks ask each other whether one of them was told to stop. Pure rule; time comes in."""

from __future__ import annotations

# Beyond this, sums of float32 are not exact, and ranks could disagree on the pace.
_EXACT_IN_FLOAT32 = 1 << 24
# A first step may take a hundred times as long as the next ones (compilation): grow in steps.
_MOST_GROWTH = 4
# Steps may get slower: with so many between two questions, ten times slower ones still answer within seconds.
_MOST_TICKS = 100


class Pace:
    """Counts ticks (steps, batches) between two questions, so that they come about every few seconds.

    All ranks see the same ticks and the same sums, so that all ask at the same tick.

    Args:
        every_s: Seconds between two questions, as far as ticks allow.
        world_size: Number of ranks.
    """

    def __init__(self, every_s: float, world_size: int) -> None:
        self._every_s = every_s
        self._world_size = world_size
        self._ticks = self._wanted = 1
        self._since: float | None = None

    def is_due(self) -> bool:
        """Count a tick, and tell whether it is the one to ask at."""
        self._ticks -= 1
        return self._ticks <= 0

    def tick_ms(self, now: float) -> float:
        """Return this rank's share of the question: milliseconds per tick since the last one.

        Args:
            now: Time, in seconds.

        Returns:
            A whole number, such that the sum over all ranks is exact in float32.
        """
        elapsed_s = 0.0 if self._since is None else now - self._since
        self._since = now
        limit = _EXACT_IN_FLOAT32 // self._world_size
        return float(min(limit, round(1000 * elapsed_s / self._wanted)))

    def set_from(self, sum_ms: float) -> None:
        """Choose when to ask next.

        Args:
            sum_ms: Sum of ``tick_ms`` over all ranks.
        """
        mean_s = sum_ms / self._world_size / 1000
        fitting = int(self._every_s / mean_s) if mean_s > 0 else _MOST_GROWTH * self._wanted
        self._wanted = self._ticks = max(1, min(fitting, _MOST_GROWTH * self._wanted, _MOST_TICKS))
