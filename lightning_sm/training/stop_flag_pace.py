"""The pace at which ranks exchange their stop flags. This is a pure computation: the time is an argument."""

from __future__ import annotations

# Above this value, float32 sums are not exact, and ranks could disagree on the pace.
_EXACT_IN_FLOAT32 = 1 << 24
# The first step may take a hundred times as long as later steps (compilation), so let the interval grow gradually.
_MAX_GROWTH = 4
# Steps may become slower. With this limit, exchanges remain only seconds apart even if steps take ten times as long.
_MAX_TICKS = 100


class Pace:
    """A counter of ticks (steps or validation batches) that schedules an exchange about every ``every_s`` seconds.

    All ranks see the same ticks and the same sums, so they exchange at the same tick.

    Args:
        every_s: Target time between two exchanges, in seconds.
        world_size: Number of ranks.
    """

    def __init__(self, every_s: float, world_size: int) -> None:
        self._every_s = every_s
        self._world_size = world_size
        self._interval = 1
        self._ticks_left = 1
        self._last_exchange: float | None = None

    def tick(self) -> bool:
        """Count a tick, and return whether an exchange is due."""
        self._ticks_left -= 1
        return self._ticks_left <= 0

    def ms_per_tick(self, now: float) -> float:
        """Return this rank's mean milliseconds per tick since the last exchange, to be sent in the next exchange.

        The value is an integer, capped so that the sum over all ranks is exact in float32.

        Args:
            now: The current time in seconds, from ``time.monotonic()``.
        """
        elapsed_s = 0.0 if self._last_exchange is None else now - self._last_exchange
        self._last_exchange = now
        limit = _EXACT_IN_FLOAT32 // self._world_size
        return float(min(limit, round(1000 * elapsed_s / self._interval)))

    def plan_next(self, sum_ms: float) -> None:
        """Choose the tick of the next exchange from the sum of ``ms_per_tick`` over all ranks."""
        mean_s = sum_ms / self._world_size / 1000
        longest = _MAX_GROWTH * self._interval
        fitting = int(self._every_s / mean_s) if mean_s > 0 else longest
        self._interval = max(1, min(fitting, longest, _MAX_TICKS))
        self._ticks_left = self._interval
