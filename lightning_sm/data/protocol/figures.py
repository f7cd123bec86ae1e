"""Measurements of trainer ranks and data hosts. Rank 0 gets those of the other ranks with the data hosts' heartbeats.

A collective call would have to come at the same moment on all ranks, between the user's own calls, and could hang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

# Digits after the point: a tenth of a millisecond.
_DIGITS = 4
# Sums that start again together: of the data host's process, of a rank's requests, and of its connection.
_HOST_SUMS = (
    ("busy_s", "capacity_s", "num_built", "built_s"),
    ("num_received", "transfer_s", "num_retries"),
    ("num_lost", "num_hedges"),
)


@dataclass(frozen=True)
class BatchFigures:
    """The time and memory of one batch.

    Attributes:
        num_bytes: Its bytes.
        queue_s: Seconds that its request waited for a worker.
        produce_s: Seconds that the worker took for it.
        transfer_s: Seconds from request to delivery, without these two.
        num_ready: Batches that were buffered behind it.
    """

    num_bytes: int
    queue_s: float
    produce_s: float
    transfer_s: float
    num_ready: int


@dataclass
class RankFigures:
    """Measurements of a rank's training loaders, summed up since its process started.

    Attributes:
        num_batches: Number of batches, of all training loaders.
        num_steps: Number of batches of the first training loader.
        num_timed: Number of these whose step has its duration in ``busy_s``: all but the newest of each pass.
        num_bytes: Bytes of the batches.
        first_wait_s: Seconds that the training loop waited for the first batches of passes.
        wait_s: Seconds that it waited for the other batches.
        transfer_wait_s: The part of ``wait_s`` in which batches were in transit from a data host.
        busy_s: Seconds that it worked between batches.
        sync_s: The part of ``busy_s`` in the backward pass and the optimizer, where ranks wait for each other.
        queue_s: Total seconds that requests waited for a worker.
        produce_s: Total seconds that workers spent on the batches.
        produce_ms2: Sum of the squares of these times, in square milliseconds: how much they vary decides how many
            workers keep up.
        transfer_s: Total seconds from request to batch, without ``queue_s`` and ``produce_s``.
    """

    num_batches: int = 0
    num_steps: int = 0
    num_timed: int = 0
    num_bytes: int = 0
    first_wait_s: float = 0.0
    wait_s: float = 0.0
    transfer_wait_s: float = 0.0
    busy_s: float = 0.0
    sync_s: float = 0.0
    queue_s: float = 0.0
    produce_s: float = 0.0
    produce_ms2: float = 0.0
    transfer_s: float = 0.0

    def count(self, batch: BatchFigures, wait_s: float, busy_s: float | None, sync_s: float, *, is_step: bool) -> None:
        """Add a batch.

        Args:
            batch: What it took.
            wait_s: Seconds that the training loop waited for it.
            busy_s: Seconds since the loader gave the batch before; None for the first batch of a pass.
            sync_s: The part of ``busy_s`` in the backward pass and the optimizer.
            is_step: Whether it is a batch of the first loader. Where a step takes batches of several loaders, the
                first one's ``busy_s`` has the waits for the others in it.
        """
        self.num_batches += 1
        self.num_bytes += batch.num_bytes
        self.queue_s += batch.queue_s
        self.produce_s += batch.produce_s
        self.produce_ms2 += (1e3 * batch.produce_s) ** 2
        self.transfer_s += batch.transfer_s
        if busy_s is None:
            self.first_wait_s += wait_s
        else:
            self.wait_s += wait_s
            total_s = batch.queue_s + batch.produce_s + batch.transfer_s
            self.transfer_wait_s += wait_s * batch.transfer_s / max(1e-9, total_s)
        if not is_step:
            self.busy_s -= wait_s
            return
        self.num_steps += 1
        if busy_s is not None:
            self.num_timed += 1
            self.busy_s += busy_s
            self.sync_s += sync_s

    def since(self, before: RankFigures | None) -> RankFigures:
        """Return what was added since an earlier moment.

        Args:
            before: The figures at that moment; None, or figures of a process that has been replaced: everything.
        """
        if before is None or before.num_batches > self.num_batches:
            return self
        return RankFigures(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    @property
    def seconds(self) -> float:
        """Seconds from the first batch to the last."""
        return self.wait_s + self.busy_s

    @property
    def wait_fraction(self) -> float:
        """Fraction of these seconds that the training loop waited; 0 before the second batch."""
        return self.wait_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def produce_variation(self) -> float | None:
        """Standard deviation of the workers' time for a batch, divided by its mean; None for fewer than two batches."""
        if self.num_batches <= 1 or self.produce_s <= 0:
            return None
        mean_ms = 1e3 * self.produce_s / self.num_batches
        return math.sqrt(max(0.0, self.produce_ms2 / self.num_batches - mean_ms**2)) / mean_ms

    @property
    def own_s(self) -> float:
        """Seconds that the rank worked by itself: no other rank can have made it wait."""
        return self.busy_s - self.sync_s

    def rounded(self) -> RankFigures:
        """Return the figures as they travel."""
        return RankFigures(**{name: round(value, _DIGITS) for name, value in vars(self).items()})


@dataclass(frozen=True)
class HostFigures:
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
    workers: int = 0
    busy_s: float = 0.0
    capacity_s: float = 0.0
    num_built: int = 0
    built_s: float = 0.0
    num_received: int = 0
    transfer_s: float = 0.0
    num_retries: int = 0
    num_lost: int = 0
    num_hedges: int = 0

    def since(self, before: HostFigures | None) -> HostFigures:
        """Return what was added since an earlier moment; None: since the start. A restarted host counts from zero."""
        values = {one.name: getattr(self, one.name) for one in fields(HostFigures)}
        for names in _HOST_SUMS if before is not None else ():
            added = {name: values[name] - getattr(before, name) for name in names}
            if min(added.values()) >= 0:
                values |= added
        return HostFigures(**values)
