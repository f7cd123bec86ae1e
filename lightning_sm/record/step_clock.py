"""The clock that divides the time of a training into parts of its steps, and spans between. No torch, no Lightning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_sm.record.events import PARTS

DATA_WAIT, TO_DEVICE, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PARTS))
# The parts that the GPU itself measures, if there is one.
ON_GPU = ("forward", "backward", "optimizer")


@dataclass
class Totals:
    """The sums of all measurements since the start.

    Attributes:
        num_steps: Number of steps.
        samples: Number of samples in their batches.
        parts: Seconds by part.
        spans: Seconds by name of the span.
    """

    num_steps: int = 0
    samples: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    spans: dict[str, float] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        """The seconds of all steps."""
        return sum(self.parts.values())

    def share(self, *parts: str) -> float:
        """Return the share of some parts in the steps' time, 0 to 1."""
        return sum(self.parts[name] for name in parts) / max(1e-9, self.wall_s)

    def copy(self) -> Totals:
        """Return a snapshot."""
        return Totals(self.num_steps, self.samples, dict(self.parts), dict(self.spans))

    def since(self, before: Totals) -> Totals:
        """Return the sums added since a snapshot."""
        parts = {name: seconds - before.parts[name] for name, seconds in self.parts.items()}
        spans = {name: seconds - before.spans.get(name, 0.0) for name, seconds in self.spans.items()}
        return Totals(self.num_steps - before.num_steps, self.samples - before.samples, parts, spans)


@dataclass
class OpenSpan:
    """A span that has begun.

    Attributes:
        name: Its name.
        began_at: When it began, in seconds since the Unix epoch.
        seconds: Its time so far, without that of spans inside it.
    """

    name: str
    began_at: float
    seconds: float = 0.0


class StepClock:
    """A clock that charges all time to a part of a step or to a span, so that the sum is the time that has passed.

    Args:
        now: Returns the time in seconds.

    Attributes:
        totals: The time charged so far, up to the last call of any method.
        longest_s: The longest step since it was set to 0.
    """

    # Slots, because each step looks these attributes up some thirty times.
    __slots__ = (
        "_current", "_finished", "_last", "_n", "_now", "_parts", "_samples", "_spans", "_step_s", "longest_s",
    )  # fmt: skip

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self._parts = [0.0] * len(PARTS)
        self._current = OTHER
        self._spans: list[OpenSpan] = []
        self._step_s = 0.0
        self._n = 0
        self._samples = 0
        self._finished: dict[str, float] = {}
        self.longest_s = 0.0

    @property
    def n(self) -> int:
        """Number of steps so far."""
        return self._n

    @property
    def current(self) -> int:
        """The part to which time is charged, outside spans."""
        return self._current

    @property
    def totals(self) -> Totals:
        """The sums of the time charged so far."""
        return Totals(self._n, self._samples, dict(zip(PARTS, self._parts, strict=True)), dict(self._finished))

    def enter(self, part: int) -> None:
        """Charge the time until now to the previous part, and from now on to this one."""
        now = self._now()
        elapsed_s = now - self._last
        self._last = now
        if self._spans:
            self._spans[-1].seconds += elapsed_s
        else:
            self._parts[self._current] += elapsed_s
            self._step_s += elapsed_s
        self._current = part

    def end_step(self, samples: int) -> float:
        """End a step, unless it is inside a span, and charge ``OTHER`` of the next step; return the time."""
        self.enter(OTHER)
        if not self._spans:
            self._n += 1
            self._samples += samples
            self.longest_s = max(self.longest_s, self._step_s)
            self._step_s = 0.0
        return self._last

    def begin_span(self, name: str) -> None:
        """Charge time to a span from now on, until it ends."""
        self.enter(self._current)
        self._spans.append(OpenSpan(name, time.time()))

    def end_span(self, *names: str) -> OpenSpan | None:
        """End the innermost span if it has one of these names; charge time again as before it began."""
        if not self._spans or self._spans[-1].name not in names:
            return None
        self.enter(self._current)
        span = self._spans.pop()
        self._finished[span.name] = self._finished.get(span.name, 0.0) + span.seconds
        return span


def exposed(host: Mapping[str, float], gpu: Mapping[str, float]) -> dict[str, float]:
    """Divide the time of steps by the GPU's work, where the host only launched it.

    While the GPU still does work that was launched before, a host that waits for data costs nothing. So the GPU's time
    comes first, and only as much of the host's waiting counts as fits into the rest.

    Args:
        host: Seconds by part, as the host measured them; their sum is that of the result.
        gpu: Seconds by part of ``ON_GPU``, as the GPU measured them in the same time.
    """
    wall_s = sum(host.values())
    gpu_s = sum(gpu.values())
    scale = min(1.0, wall_s / gpu_s) if gpu_s > 0 else 0.0
    parts = {name: scale * gpu.get(name, 0.0) for name in ON_GPU}
    left_s = max(0.0, wall_s - sum(parts.values()))
    for name in ("data_wait", "to_device"):
        parts[name] = min(host[name], left_s)
        left_s -= parts[name]
    parts["other"] = left_s
    return {name: parts[name] for name in PARTS}
