"""GpuTimer: how long a CUDA device works on the parts of a step, without ever waiting for it.

Times on the host say when work was launched. In some of the steps events are recorded in the stream, and read many
steps later, when the device has passed them. No step is synchronised, and no CUDA graph that is being captured gets an
event.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_sm.record.events import PARTS
from lightning_sm.record.step_clock import ON_GPU

# Every so many steps one is timed; an event costs some microseconds.
_EVERY_N_STEPS = 10
# More marks than these in a step (many optimizers) are not recorded.
_MOST_MARKS = 64
# Steps whose events are not read yet. If the device is so far behind, no further step is timed.
_MOST_PENDING = 16


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GpuTimer:
    """Times parts of some steps on a CUDA device.

    Args:
        make_event: Makes an event; it has ``record``, ``query`` and ``elapsed_time`` of ``torch.cuda.Event``.
        is_capturing: Whether the current stream captures a CUDA graph, in which events have no time.
    """

    def __init__(
        self,
        make_event: Callable[[], Any] = _timing_event,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._make_event = make_event
        self._is_capturing = is_capturing
        self._pool: list[Any] = []
        self._pending: deque[list[tuple[int, Any]]] = deque()
        self._marks: list[tuple[int, Any]] | None = None
        self._num_steps = 0
        self._means: dict[str, float] = {}

    def begin_step(self, part: int) -> None:
        """A step begins with a part; some are timed."""
        self._num_steps += 1
        is_due = self._num_steps % _EVERY_N_STEPS == 0 and len(self._pending) < _MOST_PENDING
        self._marks = [] if is_due and not self._is_capturing() else None
        self.mark(part)

    def mark(self, part: int) -> None:
        """From here on, the stream has the work of this part."""
        if self._marks is None:
            return
        if len(self._marks) >= _MOST_MARKS or self._is_capturing():
            self._drop(self._marks)
            self._marks = None
            return
        event = self._pool.pop() if self._pool else self._make_event()
        event.record()
        self._marks.append((part, event))

    def end_step(self, part: int) -> None:
        """A step ends; the rest of the stream is of another part."""
        self.mark(part)
        if self._marks:
            self._pending.append(self._marks)
        self._marks = None

    def read(self) -> dict[str, float] | None:
        """Return the mean seconds of a step by part, from the steps that the device has finished since the last call.

        Returns:
            If there are none, those of the last time; None if no step was ever timed.
        """
        sums = dict.fromkeys(ON_GPU, 0.0)
        num_steps = 0
        while self._pending and self._is_passed(self._pending[0]):
            marks = self._pending.popleft()
            for (part, begin), (_, end) in itertools.pairwise(marks):
                if PARTS[part] in sums:
                    sums[PARTS[part]] += begin.elapsed_time(end) / 1e3
            self._drop(marks)
            num_steps += 1
        if num_steps:
            self._means = {name: seconds / num_steps for name, seconds in sums.items()}
        return self._means or None

    @staticmethod
    def _is_passed(marks: list[tuple[int, Any]]) -> bool:
        try:
            return all(event.query() for _, event in marks)
        except RuntimeError:
            # After an error on the device, every call raises it. The training has raised it before, or will.
            return False

    def _drop(self, marks: list[tuple[int, Any]]) -> None:
        self._pool += [event for _, event in marks]
