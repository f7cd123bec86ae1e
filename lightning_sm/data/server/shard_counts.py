"""The counts of an iterable dataset's batches on a data host, whose workers read this host's part of the shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_sm.data.protocol.calls import CountRequest, LoaderPass, Problem, Running, ShardSizes
from lightning_sm.data.protocol.failures import LOST_WORKERS
from lightning_sm.data.protocol.spec import BatchSpec, ShardEnd, StepRangeSpec
from lightning_sm.data.server.worker_pool import Answer, ServedRange, Task, WorkerPool

# An offset that no shard has: a worker that is asked for it reads to the end, and answers with the number of batches.
_BEHIND_THE_END = 1 << 62
# Crashes of workers after which the dataset is to blame.
_MAX_CRASHES = 4
_NUM_KEPT = 32
# A call checks this often whether the trainer has exited.
_PERIOD_S = 0.5


@dataclass(eq=False)
class _Count:
    spec: StepRangeSpec  # without batches
    batch_spec: BatchSpec  # without keys
    num_shards: int
    missing: dict[int, Task] = field(default_factory=dict)  # by shard
    sizes: dict[int, int] = field(default_factory=dict)
    problem: Problem | None = None
    num_crashes: int = 0
    num_waiting: int = 0

    @property
    def is_over(self) -> bool:
        return self.problem is not None or not self.missing


class ShardCounts:
    """The numbers of batches in shards, once per request, for all trainers that ask.

    Args:
        pool: The workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._counts: dict[LoaderPass, _Count] = {}  # the newest is last

    def is_known(self, request: LoaderPass) -> bool:
        """Return whether a part has been counted, or is being counted."""
        with self._changed:
            return request in self._counts

    @property
    def num_running(self) -> int:
        """Counts that have not ended."""
        with self._changed:
            return sum(not count.is_over for count in self._counts.values())

    def answer(
        self, request: CountRequest, timeout_s: float, is_wanted: Callable[[], bool]
    ) -> ShardSizes | Running | Problem:
        """Return the batches in the shards that a request names.

        Args:
            request: The request.
            timeout_s: How long to wait for the workers, which go on counting.
            is_wanted: Returns whether the trainer still waits. When none does, the count is given up: the dataset may
                have no end.
        """
        part = range(request.part, request.num_shards, request.num_parts)
        with self._changed:
            count = self._counts.get(request) or self._start(request, part)
            deadline = time.monotonic() + timeout_s
            count.num_waiting += 1
            while not count.is_over and is_wanted() and time.monotonic() < deadline:
                self._changed.wait(_PERIOD_S)
            count.num_waiting -= 1
            if not (count.is_over or count.num_waiting or is_wanted()):
                self._counts.pop(request, None)
                self._cancel(count)
                return Running()
            if count.problem is not None:
                return count.problem
            if count.missing:
                return Running()
            return ShardSizes([count.sizes[shard] for shard in part], count.sizes[0])

    def _start(self, request: CountRequest, part: range) -> _Count:
        spec = StepRangeSpec(request.opening, request.loader, ())
        batch_spec = BatchSpec(request.seed, request.epoch, request.pass_index, 0, 0, np.empty(0, np.int64))
        count = self._counts[request] = _Count(spec, batch_spec, request.num_shards)
        over = [key for key, other in self._counts.items() if other.is_over]
        for key in over[:-_NUM_KEPT]:
            del self._counts[key]
        for shard in dict.fromkeys([0, *part]):
            self._submit(count, shard)
        return count

    def _submit(self, count: _Count, shard: int) -> None:
        keys = np.array([count.num_shards, shard, _BEHIND_THE_END, 0], np.int64)
        spec = replace(count.spec, batches=(count.batch_spec._replace(keys=keys),))
        task = Task(count, spec.opening, spec.encode(), lambda answer: self._take(count, shard, answer))
        count.missing[shard] = task
        self._pool.submit(task)

    def _take(self, count: _Count, shard: int, answer: Answer) -> None:
        if isinstance(answer, ServedRange):  # it was asked for no batch
            answer.release()
            return
        with self._changed:
            if count.missing.pop(shard, None) is None:  # given up
                return
            if isinstance(answer, ShardEnd):
                count.sizes[shard] = answer.num_batches or 0
            elif answer.error in LOST_WORKERS and count.num_crashes < _MAX_CRASHES:
                count.num_crashes += 1
                self._submit(count, shard)
            else:
                where = f"{answer.where}, while counting the batches of shard {shard} of {count.num_shards}"
                error = "RemoteTransformError" if answer.error in LOST_WORKERS else answer.error
                count.problem = Problem(error, answer.text, where, answer.traceback)
                self._cancel(count)
            self._changed.notify_all()

    def _cancel(self, count: _Count) -> None:
        for task in count.missing.values():
            self._pool.cancel(task)
        count.missing.clear()
