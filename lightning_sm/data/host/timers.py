"""Functions that a loop of events calls later."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count


class Timers:
    """Functions and the times at which they are due."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()  # functions have no order

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Let ``run_due`` call a function, once some seconds have passed."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), function))

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next function is due; None: there is none."""
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def run_due(self) -> None:
        """Call the functions that are due."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
