"""The clock that divides training time into the parts of steps and the spans between them; no torch, no Lightning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_sm.record.events import PARTS
from lightning_sm.record.totals import Totals

DATA_WAIT, TO_DEVICE, FORWARD, BACKWARD, OPTIMIZER, OTHER = PARTS
# The parts measured on the GPU, if there is one.
ON_GPU = (FORWARD, BACKWARD, OPTIMIZER)


@dataclass
class OpenSpan:
    """A span that has begun.

    Attributes:
        name: Name of the span.
        began_at: When it began, in seconds since the Unix epoch.
        seconds: Seconds so far, excluding nested spans.
    """

    name: str
    began_at: float
    seconds: float = 0.0


class StepClock:
    """A clock that charges all time to a part of a step or to a span, so the sum is the elapsed time.

    Args:
        now: Returns the time in seconds.

    Attributes:
        n: Number of steps outside spans so far.
        current: The part to which time outside spans is charged.
        last: When time was last charged, in seconds on this clock.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.last = now()
        self._parts = dict.fromkeys(PARTS, 0.0)
        self.current = OTHER
        self._spans: list[OpenSpan] = []
        self.n = 0
        self._untimed = 0
        self._samples = 0
        self._in_transit_s = 0.0
        self._noted_wait_s = 0.0
        # Parts and time in transit at the end of the last step.
        self._whole = dict(self._parts), 0.0

    @property
    def span(self) -> str:
        """The name of the innermost open span; empty if no span is open."""
        return self._spans[-1].name if self._spans else ""

    @property
    def totals(self) -> Totals:
        """The sums of all completed steps; reading them in the middle of a step is safe."""
        parts, in_transit_s = self._whole
        return Totals(self.n, self._samples, dict(parts), in_transit_s, num_untimed=self._untimed)

    def enter(self, part: str) -> None:
        """Charge the time until now to the current part, and the time from now on to ``part``."""
        now = self._now()
        elapsed_s = now - self.last
        self.last = now
        if self._spans:
            self._spans[-1].seconds += elapsed_s
        else:
            self._parts[self.current] += elapsed_s
        self.current = part

    def note_wait(self, in_transit: float) -> None:
        """Attribute a share of the waiting time since the previous call to transit from a data host.

        Args:
            in_transit: Share of the time from request to delivery that the batch spent in transit, 0 to 1.
        """
        self.enter(self.current)
        waited_s = self._parts[DATA_WAIT]
        self._in_transit_s += in_transit * (waited_s - self._noted_wait_s)
        self._noted_wait_s = waited_s

    def end_step(self, samples: int) -> float:
        """End a step, and charge time from now on to the next one's ``OTHER``. A step within a span counts as untimed.

        Returns:
            The current time, in seconds.
        """
        self.enter(OTHER)
        if self._spans:
            self._untimed += 1
        else:
            self.n += 1
            self._samples += samples
            self._whole = dict(self._parts), self._in_transit_s
        return self.last

    def begin_span(self, name: str) -> None:
        """Charge time to a new span until it ends."""
        self.enter(self.current)
        self._spans.append(OpenSpan(name, time.time()))

    def end_span(self, *names: str) -> OpenSpan | None:
        """End the innermost span if it has one of these names, and charge time as before the span began."""
        if not self._spans or self._spans[-1].name not in names:
            return None
        self.enter(self.current)
        return self._spans.pop()


def exposed(host: Mapping[str, float], gpu: Mapping[str, float]) -> dict[str, float]:
    """Divide the time of steps into the GPU's work and the host's time that the GPU's work does not hide.

    Waiting for data costs nothing while the GPU is still busy. So the GPU's time is counted first, and the host's
    waiting time only as far as it fits into the remaining time.

    Args:
        host: Seconds by part, measured on the host. The result has the same sum.
        gpu: Seconds by part of ``ON_GPU``, measured on the GPU during the same steps.
    """
    wall_s = sum(host.values())
    gpu_s = sum(gpu.values())
    scale = min(1.0, wall_s / gpu_s) if gpu_s > 0 else 0.0
    parts = {name: scale * gpu.get(name, 0.0) for name in ON_GPU}
    left_s = max(0.0, wall_s - sum(parts.values()))
    for name in (DATA_WAIT, TO_DEVICE):
        parts[name] = min(host[name], left_s)
        left_s -= parts[name]
    parts[OTHER] = left_s
    return {name: parts[name] for name in PARTS}
