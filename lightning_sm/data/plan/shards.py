"""Virtual shards of an iterable dataset: which batch of which shard each step of a rank is, and where the pass ends.

The shards depend neither on data hosts nor on their workers. Where a shard ends is known only once a data host says
so: a step behind the end of its shard has no batch, and is skipped. Pure rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_sm.data.plan.order import IndexArray
from lightning_sm.data.plan.samples import check_rank
from lightning_sm.errors import DataSettingsError, WireError

# Divides evenly over 1, 2, 4, 8 or 16 ranks or data workers, so that these cluster shapes read the same shards.
_COMMON = 16
# For each rank, or for as many workers. A shard is read by one worker: with a few shards for each worker all have about
# as many, and with one shard for each rank only so many workers would work. More would end with more small batches.
_SHARDS_EACH = 8

# More steps than any pass has.
_NO_END = 1 << 62


def default_num_shards(world_size: int) -> int:
    """Return the number of virtual shards to use when the user sets none."""
    return math.lcm(_COMMON, world_size) * _SHARDS_EACH


def shard_steps(counts: Sequence[int], world_size: int) -> tuple[int, int]:
    """Return how many steps every rank can take over shards with these numbers of batches, and the batches left out."""
    _check_shards(len(counts), world_size)
    steps = min(sum(counts[rank::world_size]) for rank in range(world_size))
    return steps, sum(counts) - steps * world_size


class ShardPlan:
    """One rank's requests to an iterable dataset that is cut into virtual shards, each with a cursor of its own.

    A rank owns every ``world_size``-th shard and requests one batch of each in turn. Requests are numbered by tickets.
    ``ended`` records where a shard ends; its later tickets are empty.

    Args:
        num_shards: Virtual shards of the dataset.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.

    Raises:
        DataSettingsError: ``num_shards`` is not a multiple of ``world_size``.
    """

    def __init__(self, num_shards: int, rank: int, world_size: int) -> None:
        check_rank(rank, world_size)
        _check_shards(num_shards, world_size)
        self._rank = rank
        self._world_size = world_size
        self._num_own = num_shards // world_size
        self._ends: dict[int, int] = {}

    def ticket(self, number: int) -> tuple[int, int]:
        """Return the shard that a ticket requests, and the offset of the batch in it."""
        offset, position = divmod(number, self._num_own)
        return self._rank + position * self._world_size, offset

    def ended(self, shard: int, offset: int) -> None:
        """Record that a shard has no batch at ``offset`` or later; of several offsets the smallest counts."""
        self._ends[shard] = min(offset, self._ends.get(shard, offset))

    def is_empty(self, number: int) -> bool:
        """Return whether a ticket is known to have no batch, so that it need not be requested."""
        shard, offset = self.ticket(number)
        return shard in self._ends and offset >= self._ends[shard]

    def last_ticket(self) -> int | None:
        """Return the last ticket that has a batch; -1 if no shard has any, None while a shard's end is unknown."""
        if self.num_batches is None:
            return None
        lasts = ((end - 1) * self._num_own + shard // self._world_size for shard, end in self._ends.items())
        return max(-1, *lasts)

    @property
    def num_batches(self) -> int | None:
        """Batches in all shards of this rank; None while a shard's end is unknown."""
        return sum(self._ends.values()) if len(self._ends) == self._num_own else None

    def end(self, shard: int) -> int | None:
        """Return the number of batches in a shard; None while it is unknown."""
        return self._ends.get(shard)

    def next_ticket(self, number: int) -> int | None:
        """Return the first ticket from ``number`` on that is not known to be empty; None if all are."""
        last = self.last_ticket()
        if last is not None and number > last:
            return None
        return next(ticket for ticket in itertools.count(number) if not self.is_empty(ticket))

    def sizes_before(self, number: int) -> dict[int, int]:
        """Return for each shard of this rank how many batches the tickets below ``number`` stand for."""
        sizes = {}
        for position in range(self._num_own):
            shard = self._rank + position * self._world_size
            num_tickets = max(0, -(-(number - position) // self._num_own))
            sizes[shard] = min(num_tickets, self._ends.get(shard, num_tickets))
        return sizes

    def ticket_of(self, batch: int) -> int | None:
        """Return the ticket of a batch, counted over all shards of this rank; None if they are known to have fewer."""
        if self.num_batches is not None and batch >= self.num_batches:
            return None
        # Each round of tickets has at least one batch, until all shards have ended.
        low = batch
        high = (batch + 1) * self._num_own
        while low < high:
            middle = (low + high) // 2
            if sum(self.sizes_before(middle + 1).values()) > batch:
                high = middle
            else:
                low = middle + 1
        return low


class _Step(NamedTuple):
    """A step; a probe only asks whether its shard has a batch at the offset, and wants no batch."""

    shard: int
    offset: int
    is_wanted: bool


class ShardSteps:
    """Steps in the order in which they are requested and delivered, without those that are known to be empty.

    A pass that resumes in the middle first probes the lengths of the shards: batch k is ticket k only if no shard
    ended before it. The probes cost nothing, as the shards have to be opened and skipped to that offset anyway.

    Args:
        num_shards: Virtual shards of the dataset.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.
        first: Batches of the pass that were delivered before.
        stop: Batches after which the pass ends; None: at the end of the shards.
    """

    num_steps: int | None = None  # unknown until all shards have ended

    def __init__(self, num_shards: int, rank: int, world_size: int, first: int = 0, stop: int | None = None) -> None:
        self._num_shards = num_shards
        self._plan = ShardPlan(num_shards, rank, world_size)
        self._first = first
        self._stop = stop
        self._steps: dict[int, _Step] = {}
        self._next_step = 0
        self._num_empty = 0
        self._min_sizes: dict[int, int] = {}  # batches that a shard has at least
        self._open_probes: set[int] = set()
        self._first_batches: dict[bytes, int] = {}
        self._has_duplicates = False
        self._ticket: int | None = None
        self._locate_first()

    def batch(self, step: int) -> IndexArray:
        """Return what a data host has to know, int64: number of shards, shard, offset, whether the batch is wanted."""
        return np.array([self._num_shards, *self._get(step)], np.int64)

    def shard(self, step: int) -> int:
        """Return the shard of a step; all steps of a shard should be requested from the same data host."""
        return self._get(step).shard

    def skip(self, step: int, end: int | None) -> None:
        """Record that a step delivers no batch.

        Args:
            step: Number of the step.
            end: Number of batches in its shard; None: the shard has the batch that the step probed.

        Raises:
            WireError: The answer does not fit the request.
        """
        shard, offset, is_wanted = self._get(step)
        if (end is None and is_wanted) or not 0 <= (end or 0) <= offset:
            raise WireError(f"shard {shard} reports {end} batches, for a request for batch {offset}")
        self._num_empty += 1
        if end is None:
            self._min_sizes[shard] = offset + 1
        else:
            self._plan.ended(shard, end)
        if not self._open_probes:
            self._move_to(self._ticket)
            return
        self._open_probes.discard(step)
        if not self._open_probes:
            self._locate_first()

    def duplicate_shards(self, step: int, content: bytes) -> tuple[int, int] | None:
        """Return two shards that begin with the same batch, the first time that this is known.

        Args:
            step: Number of a step whose batch arrived.
            content: A hash of the batch.
        """
        shard, offset, _ = self._get(step)
        if offset or self._has_duplicates:
            return None
        other = self._first_batches.setdefault(content, shard)
        self._has_duplicates = other != shard
        return (other, shard) if self._has_duplicates else None

    @property
    def stop_step(self) -> int:
        """The step after the last, as far as it is known."""
        if self._open_probes:
            return self._next_step
        stop = _NO_END if self._stop is None else self._num_empty + max(0, self._stop - self._first)
        if self._ticket is not None:
            return stop
        last = self._next_step
        while last - 1 in self._steps and self._is_empty(self._steps[last - 1]):
            last -= 1
        return min(stop, last)

    @property
    def num_batches(self) -> int | None:
        """Batches in all shards of this rank; None while a shard's end is unknown."""
        return self._plan.num_batches

    def forget(self, step: int) -> None:
        """Free the memory of all steps below one, which the caller no longer needs."""
        for old in range(min(self._steps, default=step), step):
            self._steps.pop(old, None)

    def _get(self, step: int) -> _Step:
        while self._next_step <= step:
            if self._ticket is None:
                raise AssertionError("steps behind the end are never requested")
            self._add(_Step(*self._plan.ticket(self._ticket), is_wanted=True))
            self._move_to(self._ticket + 1)
        return self._steps[step]

    def _add(self, step: _Step) -> None:
        self._steps[self._next_step] = step
        self._next_step += 1

    def _move_to(self, ticket: int | None) -> None:
        self._ticket = None if ticket is None else self._plan.next_ticket(ticket)

    def _is_empty(self, step: _Step) -> bool:
        end = self._plan.end(step.shard)
        return not step.is_wanted or (end is not None and step.offset >= end)

    def _locate_first(self) -> None:
        """Find the ticket of the first batch from the known ends, or probe the shards whose ends are missing for it."""
        ticket = self._plan.ticket_of(self._first)
        sizes = {} if ticket is None else self._plan.sizes_before(ticket)
        for shard, size in sizes.items():
            if self._plan.end(shard) is None and size > self._min_sizes.get(shard, 0):
                self._open_probes.add(self._next_step)
                self._add(_Step(shard, size - 1, is_wanted=False))
        if not self._open_probes:
            self._ticket = ticket


def _check_shards(num_shards: int, world_size: int) -> None:
    if num_shards < 1 or num_shards % world_size:
        nearest = max(1, math.ceil(num_shards / world_size)) * world_size
        raise DataSettingsError(
            f"num_shards={num_shards} (data_service.virtual_shards) does not divide evenly over "
            f"world_size={world_size} trainer ranks. Set it to a multiple of {world_size}, such as {nearest}."
        )
