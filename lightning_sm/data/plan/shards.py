"""Virtual shards of an iterable dataset: which batch of which shard each step of a rank is, and where the pass ends.

The shards depend neither on data hosts nor on their workers. Where a shard ends is known only once a data host says
so: a step behind the end of its shard has no batch, and is skipped. Pure rules.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_sm.data.plan.order import IndexArray
from lightning_sm.data.plan.samples import check_rank
from lightning_sm.errors import DataSettingsError, WireError

# Divides evenly over 1, 2, 4, 8 or 16 ranks or data workers, so that these cluster shapes read the same shards.
_COMMON = 16
# A shard is read by one worker: with one shard for each of many ranks, only so many workers would work. With few ranks,
# datasets may be small, and of a few files: more shards than these have would be empty, or have no full batch.
_SHARDS_OF_MANY_RANKS = 8

# More steps than any pass has.
_NO_END = 1 << 62

# A rank that has more shards requests their batches one by one: for blocks, the training process holds a slot of each.
_MAX_SHARDS_IN_BLOCK = 32


def default_num_shards(world_size: int) -> int:
    """Return the number of virtual shards to use when the user sets none."""
    return math.lcm(_COMMON, world_size) * (_SHARDS_OF_MANY_RANKS if world_size > _COMMON else 1)


def max_slots_in_block(num_shards: int, world_size: int) -> int:
    """Return how many slots the training process holds at most for the shards of which it takes batches in turn."""
    own = num_shards // world_size
    return own if own <= _MAX_SHARDS_IN_BLOCK else 1


def shard_steps(counts: Sequence[int], world_size: int) -> tuple[int, int]:
    """Return how many steps every rank can take over shards with these numbers of batches, and the batches left out."""
    check_shards(len(counts), world_size)
    steps = min(sum(counts[rank::world_size]) for rank in range(world_size))
    return steps, sum(counts) - steps * world_size


class _Step(NamedTuple):
    """A step; a probe only asks whether its shard has a batch at the offset, and wants no batch.

    In a block, ``row`` says how many batches of the shard are before it.
    """

    shard: int
    offset: int
    is_wanted: bool
    row: int | None = None


class ShardSteps:
    """One rank's steps over its shards, in the order in which they are requested.

    A rank owns every ``world_size``-th shard, and trains on one batch of each in turn. Batches that are known not to
    exist are no steps; other steps turn out to be empty. Internally, tickets number all batches as if no shard ended.

    Small batches are requested in blocks: several of the first shard, as many of the second, and so on. Within a block
    the training process puts them in order again, row by row: the first of each shard, the second of each.

    A pass that resumes in the middle first probes the lengths of the shards: batch k is ticket k only if no shard
    ended before it. The probes cost nothing, as the shards have to be opened and skipped to that offset anyway.

    Args:
        num_shards: Virtual shards of the dataset.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.
        first: Batches of the pass that were delivered before.
        stop: Batches after which the pass ends; None: at the end of the shards.

    Raises:
        DataSettingsError: ``num_shards`` is not a multiple of ``world_size``.
    """

    num_steps: int | None = None  # unknown until all shards have ended
    range_length = 1  # batches of each shard in the blocks from here on

    def __init__(self, num_shards: int, rank: int, world_size: int, first: int = 0, stop: int | None = None) -> None:
        check_rank(rank, world_size)
        check_shards(num_shards, world_size)
        self._num_shards = num_shards
        self._shards = range(rank, num_shards, world_size)
        self._ends: dict[int, int] = {}  # batches in the shards whose ends are known
        self._first = first
        self._stop = stop
        self._steps: dict[int, _Step] = {}
        self._block_stops: deque[int] = deque()
        self._next_step = 0
        self._num_empty = 0
        self._min_sizes: dict[int, int] = {}  # batches that a shard has at least
        self._open_probes: set[int] = set()
        self._ticket: int | None = None
        self._locate_first()

    def batch(self, step: int) -> IndexArray:
        """Return what a data host has to know, int64: number of shards, shard, offset, whether the batch is wanted."""
        return np.array([self._num_shards, *self._get(step)[:3]], np.int64)

    @property
    def num_shards(self) -> int:
        """Shards of this rank."""
        return len(self._shards)

    def shard(self, step: int) -> int:
        """Return the shard of a step; all steps of a shard should be requested from the same data host."""
        return self._get(step).shard

    def row(self, step: int) -> int | None:
        """Return which row of its block a step is in; None: it is delivered when those before it are."""
        return self._get(step).row

    def ends_block(self, step: int) -> bool:
        """Return, once for each block, whether its steps are all below a step."""
        is_end = bool(self._block_stops) and self._block_stops[0] <= step
        if is_end:
            self._block_stops.popleft()
        return is_end

    def skip(self, step: int, end: int | None) -> None:
        """Record that a step delivers no batch.

        Args:
            step: Number of the step.
            end: Number of batches in its shard; None: the shard has the batch that the step probed.

        Raises:
            WireError: The answer does not fit the request.
        """
        shard, offset, is_wanted, _ = self._get(step)
        if (end is None and is_wanted) or not 0 <= (end or 0) <= offset:
            raise WireError(f"shard {shard} reports {end} batches, for a request for batch {offset}")
        self._num_empty += 1
        if end is None:
            self._min_sizes[shard] = offset + 1
        else:
            self._ends[shard] = min(end, self._ends.get(shard, end))
        if not self._open_probes:
            self._move_to(self._ticket)
            return
        self._open_probes.discard(step)
        if not self._open_probes:
            self._locate_first()

    @property
    def stop_step(self) -> int:
        """The step after the last, as far as it is known."""
        if self._open_probes:
            return self._next_step
        stop = self._wanted_stop
        if self._ticket is not None:
            return stop
        last = self._next_step
        while last - 1 in self._steps and self._is_empty(self._steps[last - 1]):
            last -= 1
        return min(stop, last)

    @property
    def num_batches(self) -> int | None:
        """Batches in all shards of this rank; None while a shard's end is unknown."""
        return sum(self._ends.values()) if len(self._ends) == len(self._shards) else None

    def forget(self, step: int) -> None:
        """Free the memory of all steps below one, which the caller no longer needs."""
        for old in range(min(self._steps, default=step), step):
            self._steps.pop(old, None)

    @property
    def _wanted_stop(self) -> int:
        """The step after the last that is wanted, if no other step turns out to be empty."""
        return _NO_END if self._stop is None else self._num_empty + max(0, self._stop - self._first)

    def _get(self, step: int) -> _Step:
        while self._next_step <= step:
            if self._ticket is None:
                raise AssertionError("steps behind the end are never requested")
            num_rows = self._num_rows(self._ticket)
            if num_rows > 1:
                self._add_block(self._ticket, num_rows)
            else:
                self._add(self._step_of(self._ticket))
                self._move_to(self._ticket + 1)
        return self._steps[step]

    def _num_rows(self, ticket: int) -> int:
        """Return how many rows a block from a ticket on has; 1: none is worth while there."""
        if self.range_length == 1 or len(self._shards) > _MAX_SHARDS_IN_BLOCK:
            return 1
        tickets = range(ticket, ticket + len(self._shards))
        num_open = sum(not self._is_empty(self._step_of(each)) for each in tickets)
        if num_open == 1:  # its steps follow each other
            return 1
        # Where the end of the pass cuts a block, batches are requested one by one.
        return min(self.range_length, (self._wanted_stop - self._next_step) // num_open)

    def _add_block(self, first: int, num_rows: int) -> None:
        stop = first + num_rows * len(self._shards)
        for ticket in range(first, first + len(self._shards)):
            for row, each in enumerate(range(ticket, stop, len(self._shards))):
                step = self._step_of(each)
                if not self._is_empty(step):
                    self._add(step._replace(row=row))
        self._block_stops.append(self._next_step)
        self._move_to(stop)

    def _add(self, step: _Step) -> None:
        self._steps[self._next_step] = step
        self._next_step += 1

    def _step_of(self, ticket: int) -> _Step:
        offset, position = divmod(ticket, len(self._shards))
        return _Step(self._shards[position], offset, is_wanted=True)

    def _move_to(self, ticket: int | None) -> None:
        """Continue with the first ticket from one on that is not known to be empty, if there is any."""
        is_known = self.num_batches is not None
        stop = max(self._ends.values()) * len(self._shards) if is_known else _NO_END
        while ticket is not None and self._is_empty(self._step_of(ticket)):
            ticket = ticket + 1 if ticket < stop else None
        self._ticket = ticket

    def _is_empty(self, step: _Step) -> bool:
        return not step.is_wanted or step.offset >= self._ends.get(step.shard, _NO_END)

    def _num_before(self, offset: int) -> int:
        """Return how many batches the shards have below an offset, as far as their ends are known."""
        return sum(min(offset, self._ends.get(shard, offset)) for shard in self._shards)

    def _locate_first(self) -> None:
        """Find the ticket of the first batch from the known ends, or probe the shards whose ends are missing for it."""
        if self.num_batches is not None and self._first >= self.num_batches:
            return
        # Below each further offset is at least one batch more, until all shards have ended.
        offset = bisect_right(range(self._first + 2), self._first, key=self._num_before) - 1
        places = [place for place, shard in enumerate(self._shards) if offset < self._ends.get(shard, _NO_END)]
        first = places[self._first - self._num_before(offset)]
        for place, shard in enumerate(self._shards):
            size = offset + (place < first)
            if shard not in self._ends and size > self._min_sizes.get(shard, 0):
                self._open_probes.add(self._next_step)
                self._add(_Step(shard, size - 1, is_wanted=False))
        if not self._open_probes:
            self._ticket = offset * len(self._shards) + first


def check_shards(num_shards: int, world_size: int) -> None:
    """Check that shards divide evenly over the ranks.

    Raises:
        DataSettingsError: They do not.
    """
    if num_shards < 1 or num_shards % world_size:
        nearest = max(1, math.ceil(num_shards / world_size)) * world_size
        raise DataSettingsError(
            f"num_shards={num_shards} (data_service.virtual_shards) does not divide evenly over "
            f"world_size={world_size} trainer ranks. Set it to a multiple of {world_size}, such as {nearest}."
        )
