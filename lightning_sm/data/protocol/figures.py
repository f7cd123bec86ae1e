"""Measurements of trainer ranks and data hosts. Rank 0 gets those of the other ranks with the data hosts' heartbeats.

A collective call would have to come at the same moment on all ranks, between the user's own calls, and could hang.
"""

from __future__ import annotations

from itertools import chain

import msgspec
from msgspec.structs import asdict, replace

from lightning_sm._structs import Struct
from lightning_sm.data.protocol.codec import Natural, Real

# Digits after the point: a tenth of a millisecond.
_DIGITS = 4
# Sums that start again together: of the data host's process, of a rank's requests, and of its connection.
_HOST_SUMS = (
    ("busy_s", "capacity_s", "num_built", "built_s"),
    ("num_received", "transfer_s", "num_retries"),
    ("num_lost", "num_hedges"),
)


class BatchFigures(Struct, frozen=True):
    """The time and memory of one batch.

    Attributes:
        num_bytes: Its bytes.
        queue_s: Seconds that its request waited for a worker.
        produce_s: Seconds that the worker took for it.
        transfer_s: Seconds from request to delivery, without these two.
        num_ready: Batches that were buffered behind it.
    """

    num_bytes: Natural
    queue_s: Real
    produce_s: Real
    transfer_s: Real
    num_ready: Natural

    @property
    def in_transit(self) -> float:
        """Share of the time from request to delivery in which it was in transit."""
        return self.transfer_s / max(1e-9, self.queue_s + self.produce_s + self.transfer_s)


class RankFigures(msgspec.Struct, forbid_unknown_fields=True):
    """Measurements of a rank's training loaders, summed up since its process started.

    Attributes:
        num_batches: Number of batches, of all training loaders.
        num_steps: Number of batches of the first training loader.
        num_timed: Number of steps that the clock of steps has timed: all but the first one of a run.
        num_bytes: Bytes of the batches.
        wait_s: Seconds that the timed steps waited for their batches.
        transfer_wait_s: The part of ``wait_s`` in which batches were in transit from a data host.
        busy_s: Seconds that the timed steps took besides.
        sync_s: The part of ``busy_s`` in the backward pass and the optimizer, where ranks wait for each other.
        queue_s: Total seconds that requests waited for a worker.
        produce_s: Total seconds that workers spent on the batches.
        transfer_s: Total seconds from request to batch, without ``queue_s`` and ``produce_s``.
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
        """Add a batch, without the time of its step.

        Args:
            batch: What it took.
            is_step: Whether it is a batch of the first training loader.
        """
        self.num_batches += 1
        self.num_bytes += batch.num_bytes
        self.queue_s += batch.queue_s
        self.produce_s += batch.produce_s
        self.transfer_s += batch.transfer_s
        self.num_steps += is_step

    def plus(self, other: RankFigures) -> RankFigures:
        """Return the sums of both."""
        return RankFigures(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def since(self, before: RankFigures | None) -> RankFigures:
        """Return what was added since an earlier moment.

        Args:
            before: The figures at that moment; None, or figures of a process that has been replaced: everything.
        """
        if before is None or before.num_batches > self.num_batches:
            return self
        return RankFigures(**{name: value - getattr(before, name) for name, value in asdict(self).items()})

    @property
    def seconds(self) -> float:
        """Seconds of the timed steps."""
        return self.wait_s + self.busy_s

    @property
    def wait_fraction(self) -> float:
        """Fraction of these seconds that they waited; 0 before the first timed step."""
        return self.wait_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def own_s(self) -> float:
        """Seconds that the rank worked by itself: no other rank can have made it wait."""
        return self.busy_s - self.sync_s

    def rounded(self) -> RankFigures:
        """Return the figures as they travel."""
        return RankFigures(**{name: round(value, _DIGITS) for name, value in asdict(self).items()})


class HostFigures(Struct, frozen=True):
    """The work of a data host, summed up since the start of its process, or between two moments.

    Attributes:
        name: Its name, with its address.
        state: "up", "suspect" or "down", at the end.
        why: Why it is not up.
        workers: Its number of workers; 0: it was never reached.
        busy_s: Seconds that its workers worked while trainers had more to request, of all workers together.
        capacity_s: Seconds that they could have worked in this time.
        num_built: Number of batches that they built, for all ranks.
        built_s: Seconds that these took.
        num_received: Number of batches that this rank got from it.
        transfer_s: Seconds that these were in transit.
        num_retries: Number of this rank's requests that had to be sent again, to this host or to another.
        num_lost: How often this rank lost the connection.
        num_hedges: Number of this rank's requests to it that were late, and were also sent to another host.
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
        """Return what was added since an earlier moment; None: since the start. A restarted host counts from zero."""
        values = {name: getattr(self, name) for name in HostFigures.__struct_fields__}
        for names in _HOST_SUMS if before is not None else ():
            added = {name: values[name] - getattr(before, name) for name in names}
            if min(added.values()) >= 0:
                values |= added
        return HostFigures(**values)

    def plus(self, later: HostFigures) -> HostFigures:
        """Return the sums of both, and what else the later ones say."""
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in chain(*_HOST_SUMS)})
