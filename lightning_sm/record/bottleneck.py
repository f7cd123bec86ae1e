"""The limit of a training step's time, and the effect of more workers on it. Pure functions on plain numbers.

The model of a step, as in tf.data service's autoscaler: the slowest part sets the pace,

    T(W) = max(t0, c / (W * e), wire)

with ``t0`` a step without waiting for data, ``c`` the seconds of work of all workers for the batches of one step, ``W``
workers that are busy for the share ``e`` of the time, and ``wire`` the time of network and decoding for a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A training that waits for a smaller share of its time is not input-bound (as in the TensorFlow profiler).
NOT_INPUT_BOUND = 0.05
# Workers are the limit if they are busy for this share of the time in which there is something to do.
WORKERS_ARE_BUSY = 0.8
# Plan workers to be busy for at most this share of the time, because batches differ.
_TARGET = 0.9
# Steps this close to what network and decoding take are limited by them.
_NEAR = 0.8


@dataclass(frozen=True)
class StepModel:
    """The time of a step, measured after the first batches.

    Attributes:
        own_s: ``t0``: seconds of a step without waiting, the larger of the host's and the GPU's work.
        cost_s: ``c``: seconds of work of all workers for one step of all ranks.
        workers: Number of workers during the measurement.
        busy: ``e``: the share of the time in which they worked while training waited, 0 to 1.
        wire_s: The least time of network and decoding for one step, in seconds; 0 if unknown.
    """

    own_s: float
    cost_s: float
    workers: int
    busy: float = 1.0
    wire_s: float = 0.0

    def step_s(self, workers: int) -> float:
        """Predict the seconds of a step with another number of workers."""
        return max(self.own_s, self.cost_s / max(1e-9, workers * self.busy), self.wire_s)

    def limit(self, workers: int) -> str:
        """Name what limits a step: ``training``, ``workers`` or ``network``."""
        step_s = self.step_s(workers)
        if step_s <= self.own_s:
            return "training"
        return "network" if self.wire_s >= _NEAR * step_s else "workers"

    @property
    def workers_needed(self) -> int:
        """The number of workers with which training does not wait, with a tenth in reserve."""
        return max(1, math.ceil(self.cost_s / max(1e-9, _TARGET * self.own_s)))
