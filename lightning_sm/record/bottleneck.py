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
# Beyond this many times the measured number of workers, the prediction is a bound, not an estimate.
_ESTIMATE_UP_TO = 2.0
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


def more_workers(share: float, busy: float = 1.0) -> float:
    """Return how many times as many workers would remove the waiting.

    Args:
        share: The share of the time that training waits, 0 to 1.
        busy: The share of that time that the workers work: half idle workers need no doubling.
    """
    return busy / max(1e-9, 1.0 - share)


def times_as_many(factor: float) -> str:
    """Say a factor in words: "about 1.8 times as many"; "at most" if it is far from the measurement."""
    return f"{'about' if factor <= _ESTIMATE_UP_TO else 'at most'} {factor:.2g} times as many"


def local_verdict(share: float, workers: int, cpu: float | None = None, cpus: int = 0) -> str:
    """Say why a training waits for a loader on its own host, and what would help.

    Args:
        share: The share of the time that it waits, 0 to 1, without the first batches.
        workers: Worker processes of the loader of each rank.
        cpu: The share of the host's CPUs in use, 0 to 1; None if unknown.
        cpus: CPUs of the host; 0 if unknown.

    Returns:
        A sentence; "" if it hardly waits.
    """
    if share < NOT_INPUT_BOUND:
        return ""
    text = f"Input-bound {share:.0%} of the time"
    if workers == 0:
        return f"{text}: the training process builds its batches itself. Set num_workers of the DataLoader."
    own = f"the loader's {workers} workers" if workers > 1 else "the loader's only worker"
    if cpu is not None and cpu >= _TARGET:
        owners = f"the host's {cpus} CPUs are" if cpus > 1 else "the host's CPU is"
        return (
            f"{text}, limited by {own}, and {owners} {cpu:.0%} busy: {times_as_many(more_workers(share))} workers "
            "would remove the wait, but only on more CPUs, such as those of data hosts."
        )
    unused = "" if cpu is None else f"; the host's CPUs are {cpu:.0%} busy"
    return f"{text}, limited by {own}: {times_as_many(more_workers(share))} workers would remove the wait{unused}."
