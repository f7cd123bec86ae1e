"""GpuTimer: measures how long a CUDA device works on each part of a step, without waiting for the device.

Host times only show when work was launched. So during some steps, the timer records events in the stream, and reads
them many steps later, when the device has passed them. It never synchronises, and records no events in a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import torch

from lightning_sm.record.step_clock import ON_GPU

# Events cost a few microseconds each, so time only every n-th step.
_EVERY_N_STEPS = 10
# If the device is far behind, or the timer is rarely read, keep only the newest steps.
_MOST_PENDING = 16


class GpuTimer:
    """A timer for the parts of some steps on a CUDA device."""

    def __init__(self) -> None:
        self._pending: deque[list[tuple[str, Any]]] = deque(maxlen=_MOST_PENDING)
        self._marks: list[tuple[str, Any]] | None = None
        self._num_steps = 0
        self._means: dict[str, float] = {}

    def begin_step(self, part: str) -> None:
        """Start timing a step, beginning with its first part. Only some steps are timed."""
        self._num_steps += 1
        self._marks = [] if self._num_steps % _EVERY_N_STEPS == 0 else None
        self.mark(part)

    def mark(self, part: str) -> None:
        """Assign the work that is launched from now on to a part."""
        if self._marks is None:
            return
        if torch.cuda.is_current_stream_capturing():  # events in a CUDA graph have no time
            self._marks = None
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append((part, event))

    def end_step(self, part: str) -> None:
        """End a step, and assign the work that is launched from now on to ``part``."""
        self.mark(part)
        if self._marks:
            self._pending.append(self._marks)
        self._marks = None

    def read(self) -> dict[str, float] | None:
        """Return the mean seconds per step by part, over the steps that the device finished since the last call.

        Returns:
            The previous means if no step has finished since; None if no step was ever timed.
        """
        sums = dict.fromkeys(ON_GPU, 0.0)
        num_steps = 0
        while self._pending and self._is_passed(self._pending[0]):
            marks = self._pending.popleft()
            for (part, begin), (_, end) in itertools.pairwise(marks):
                if part in sums:
                    sums[part] += begin.elapsed_time(end) / 1e3
            num_steps += 1
        if num_steps:
            self._means = {name: seconds / num_steps for name, seconds in sums.items()}
        return self._means or None

    @staticmethod
    def _is_passed(marks: list[tuple[str, Any]]) -> bool:
        try:
            return all(event.query() for _, event in marks)
        except RuntimeError:
            # Once the device has failed, every call raises its error. Training raises it, too, so ignore it here.
            return False
