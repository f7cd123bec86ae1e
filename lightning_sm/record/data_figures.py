"""Measurements of trainer ranks and data hosts.

Data hosts pass the other ranks' measurements to rank 0, in their answers to its heartbeats. A collective call could
hang, because every rank would have to make it at the same point between the user's own collective calls.
"""

from __future__ import annotations

from itertools import chain

import msgspec
from msgspec.structs import asdict, replace

from lightning_sm._structs import Natural, Real, Struct

# Round to a tenth of a millisecond.
_DIGITS = 4
# The sums in a group restart at zero together: with the data host's process, the rank's requests, or the connection.
_HOST_SUMS = (
    ("busy_s", "capacity_s", "num_built", "built_s"),
    ("num_received", "transfer_s", "num_retries"),
    ("num_lost", "num_hedges"),
)


class BatchFigures(Struct, frozen=True):
    """The size and timing of one batch.

    Attributes:
        num_bytes: Size of the batch.
        queue_s: Seconds that the request waited for a worker.
        produce_s: Seconds that the worker took to build the batch.
        transfer_s: Seconds from request to delivery, excluding ``queue_s`` and ``produce_s``.
        num_ready: Number of batches buffered behind this one.
    """

    num_bytes: Natural
    queue_s: Real
    produce_s: Real
    transfer_s: Real
    num_ready: Natural

    @property
    def in_transit(self) -> float:
        """Share of the time from request to delivery in which the batch was in transit."""
        return self.transfer_s / max(1e-9, self.queue_s + self.produce_s + self.transfer_s)


class RankFigures(msgspec.Struct, forbid_unknown_fields=True):
    """Measurements of a rank's training loaders, summed since its process started.

    Attributes:
        num_batches: Number of batches from all training loaders.
        num_steps: Number of batches from the first training loader.
        num_timed: Number of steps that the step clock has timed: all but the first step of each run.
        num_bytes: Total size of the batches.
        wait_s: Seconds that the timed steps waited for their batches.
        transfer_wait_s: The part of ``wait_s`` in which batches were in transit from a data host.
        busy_s: Seconds that the timed steps took, excluding ``wait_s``.
        sync_s: The part of ``busy_s`` in the backward pass and the optimizer, where ranks wait for each other.
        queue_s: Total seconds that requests waited for a worker.
        produce_s: Total seconds that workers spent on the batches.
        transfer_s: Total seconds from request to batch, excluding ``queue_s`` and ``produce_s``.
    """

    num_batches: Natural = 0
    num_steps: Natural = 0
    num_timed: Natural = 0
    num_bytes: Natural = 0
    wait_s: Real = 0.0
    transfer_wait_s: Real = 0.0
    busy_s: Real = 0.0
    sync_s: Real = 0.0
    queue_s: Real = 0.0
    produce_s: Real = 0.0
    transfer_s: Real = 0.0

    def count(self, batch: BatchFigures, *, is_step: bool) -> None:
        """Add a batch, but not the time of its step.

        Args:
            batch: Figures of the batch.
            is_step: Whether the batch is from the first training loader.
        """
        self.num_batches += 1
        self.num_bytes += batch.num_bytes
        self.queue_s += batch.queue_s
        self.produce_s += batch.produce_s
        self.transfer_s += batch.transfer_s
        self.num_steps += is_step

    def plus(self, other: RankFigures) -> RankFigures:
        """Return the sum of these figures and others."""
        return RankFigures(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def since(self, before: RankFigures | None) -> RankFigures:
        """Return what was added since an earlier moment.

        Args:
            before: The figures at that moment. If None, or if they come from a process that has been replaced,
                everything is returned.
        """
        if before is None or before.num_batches > self.num_batches:
            return self
        return RankFigures(**{name: value - getattr(before, name) for name, value in asdict(self).items()})

    @property
    def seconds(self) -> float:
        """Seconds that the timed steps took."""
        return self.wait_s + self.busy_s

    @property
    def wait_fraction(self) -> float:
        """Fraction of ``seconds`` in which the steps waited; 0 before the first timed step."""
        return self.wait_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def own_s(self) -> float:
        """Seconds of work in which the rank did not depend on other ranks."""
        return self.busy_s - self.sync_s

    def rounded(self) -> RankFigures:
        """Return the figures, rounded for sending."""
        return RankFigures(**{name: round(value, _DIGITS) for name, value in asdict(self).items()})


class HostFigures(Struct, frozen=True):
    """A data host's work, summed since its process started or between two moments.

    Attributes:
        name: Name of the data host, with its address.
        state: "up", "suspect" or "down", at the end.
        why: Why the host is not up.
        workers: Number of workers; 0 if the host was never reached.
        busy_s: Seconds that workers worked while trainers had more to request, summed over all workers.
        capacity_s: Seconds that the workers could have worked in this time.
        num_built: Number of batches that the workers built, for all ranks.
        built_s: Seconds that these batches took.
        num_received: Number of batches that this rank received from the host.
        transfer_s: Seconds that the received batches were in transit.
        num_retries: Number of this rank's requests that were sent again, to this host or to another.
        num_lost: Number of times this rank lost the connection.
        num_hedges: Number of this rank's late requests to the host that were also sent to another.
    """

    name: str
    state: str = "up"
    why: str = ""
    workers: Natural = 0
    busy_s: Real = 0.0
    capacity_s: Real = 0.0
    num_built: Natural = 0
    built_s: Real = 0.0
    num_received: Natural = 0
    transfer_s: Real = 0.0
    num_retries: Natural = 0
    num_lost: Natural = 0
    num_hedges: Natural = 0

    def since(self, before: HostFigures | None) -> HostFigures:
        """Return what was added since an earlier moment, or everything if ``before`` is None or the host restarted."""
        values = {name: getattr(self, name) for name in HostFigures.__struct_fields__}
        for names in _HOST_SUMS if before is not None else ():
            added = {name: values[name] - getattr(before, name) for name in names}
            if min(added.values()) >= 0:
                values |= added
        return HostFigures(**values)

    def plus(self, later: HostFigures) -> HostFigures:
        """Return the sum of these and later figures; other fields have the later values."""
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in chain(*_HOST_SUMS)})
