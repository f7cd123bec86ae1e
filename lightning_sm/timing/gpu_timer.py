"""GpuTimer: measures how long a CUDA device works on the parts of a step, without ever waiting for the device.

Times on the host only say when work was launched. So some steps record events in the stream, which are read many steps
later, when the device has passed them. No step is synchronised, and no event goes into a CUDA graph that is captured.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_sm.record.step_clock import ON_GPU

# An event costs some microseconds: time only one step in this many.
_EVERY_N_STEPS = 10
# Of a device that is far behind, or is read rarely, only the newest steps are kept.
_MOST_PENDING = 16


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GpuTimer:
    """A timer of the parts of some steps on a CUDA device.

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
        self._pending: deque[list[tuple[str, Any]]] = deque(maxlen=_MOST_PENDING)
        self._marks: list[tuple[str, Any]] | None = None
        self._num_steps = 0
        self._means: dict[str, float] = {}

    def begin_step(self, part: str) -> None:
        """Begin a step with a part; only some steps are timed."""
        self._num_steps += 1
        self._marks = [] if self._num_steps % _EVERY_N_STEPS == 0 else None
        self.mark(part)

    def mark(self, part: str) -> None:
        """Begin a part: the work that is launched from here on belongs to it."""
        if self._marks is None:
            return
        if self._is_capturing():
            self._marks = None
            return
        event = self._make_event()
        event.record()
        self._marks.append((part, event))

    def end_step(self, part: str) -> None:
        """End a step; ``part`` is that of the work launched from here on."""
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
            # After an error on the device, every call raises it, and so has the training, or it will.
            return False
