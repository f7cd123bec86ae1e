"""The steps of one rank's pass over virtual shards: which batch of which shard each is, and where the pass ends.

Where a shard ends is known only when a data host says so: a step that lies behind the end of its shard is empty, and
is passed over. Pure rules.
"""

from __future__ import annotations

import numpy as np

from lightning_sm.data.plan.samples import IndexArray, ShardPlan
from lightning_sm.errors import WireError

# No pass has so many steps.
_NO_END = 1 << 62


class ShardSteps:
    """Steps in the order in which they are asked and delivered; steps that are known to be empty are left out.

    A pass that begins in the middle first asks the shards how far they go: batch k is ticket k only if no shard ended
    before. That costs nothing, as the shards have to be opened and skipped to that place anyway.

    Args:
        num_shards: Virtual shards of the dataset.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.
        first: Batches of the pass that were delivered before.
        stop: Batches after which the pass ends; None: with its shards.
    """

    num_steps: int | None = None  # not known before the shards have ended

    def __init__(self, num_shards: int, rank: int, world_size: int, first: int = 0, stop: int | None = None) -> None:
        self._num_shards = num_shards
        self._plan = ShardPlan(num_shards, rank, world_size)
        self._first, self._stop = first, stop
        self._asked: dict[int, tuple[int, int, bool]] = {}  # shard, offset, whether the batch is wanted
        self._num_asked = self._num_empty = 0
        self._sizes: dict[int, int] = {}  # batches that a shard has at least
        self._unanswered: set[int] = set()
        self._beginnings: dict[bytes, int] = {}
        self._has_twins = False
        self._is_located = False
        self._ticket: int | None = None
        self._locate()

    def batch(self, step: int) -> IndexArray:
        """Return what a data host needs to know: number of shards, shard, offset, whether the batch is wanted.

        Args:
            step: Number of the step.
        """
        shard, offset, is_wanted = self._get(step)
        return np.array([self._num_shards, shard, offset, is_wanted], np.int64)

    def shard(self, step: int) -> int:
        """Return the shard of a step, all of whose steps should go to the same data host.

        Args:
            step: Number of the step.
        """
        return self._get(step)[0]

    def pass_over(self, step: int, end: int | None) -> None:
        """Take the answer that a step is empty.

        Args:
            step: Number of the step.
            end: Number of batches in its shard; None: more than were asked about.

        Raises:
            WireError: The answer does not fit the question.
        """
        shard, offset, is_wanted = self._get(step)
        if (end is None and is_wanted) or not 0 <= (end or 0) <= offset:
            raise WireError(f"shard {shard} has {end} batches, for a request for batch {offset}")
        self._num_empty += 1
        if end is None:
            self._sizes[shard] = offset + 1
        else:
            self._plan.ended(shard, end)
        self._unanswered.discard(step)
        if self._is_located:
            self._move_to(self._ticket)
        elif not self._unanswered:
            self._locate()

    def twin(self, step: int, content: bytes) -> tuple[int, int] | None:
        """Return two shards that begin with the same batch, the first time that there are such.

        Args:
            step: Number of a step that came.
            content: A hash of its batch.
        """
        shard, offset, _ = self._get(step)
        if offset or self._has_twins:
            return None
        other = self._beginnings.setdefault(content, shard)
        self._has_twins = other != shard
        return (other, shard) if self._has_twins else None

    @property
    def stop_step(self) -> int:
        """The step after the last, as far as it is known."""
        if not self._is_located:
            return self._num_asked
        stop = _NO_END if self._stop is None else self._num_empty + max(0, self._stop - self._first)
        if self._ticket is not None:
            return stop
        last = self._num_asked
        while last - 1 in self._asked and self._is_behind_end(*self._asked[last - 1]):
            last -= 1
        return min(stop, last)

    @property
    def num_batches(self) -> int | None:
        """Batches in all shards of this rank; None while a shard is open."""
        return self._plan.num_batches

    def forget(self, step: int) -> None:
        """Let go of the steps below one, which nobody needs any more.

        Args:
            step: Number of the step.
        """
        for old in range(min(self._asked, default=step), step):
            self._asked.pop(old, None)

    def _get(self, step: int) -> tuple[int, int, bool]:
        while self._num_asked <= step:
            if self._ticket is None:
                raise AssertionError("no step is asked for behind the end")
            self._ask(*self._plan.ticket(self._ticket), is_wanted=True)
            self._move_to(self._ticket + 1)
        return self._asked[step]

    def _ask(self, shard: int, offset: int, *, is_wanted: bool) -> None:
        self._asked[self._num_asked] = shard, offset, is_wanted
        self._num_asked += 1

    def _move_to(self, ticket: int | None) -> None:
        self._ticket = None if ticket is None else self._plan.next_ticket(ticket)

    def _is_behind_end(self, shard: int, offset: int, is_wanted: bool) -> bool:
        end = self._plan.end(shard)
        return not is_wanted or (end is not None and offset >= end)

    def _locate(self) -> None:
        """Find the ticket of the first batch, with what is known of the ends; ask about what is not."""
        ticket = self._plan.ticket_of(self._first)
        sizes = {} if ticket is None else self._plan.sizes_before(ticket)
        for shard, size in sizes.items():
            if self._plan.end(shard) is None and size > self._sizes.get(shard, 0):
                self._unanswered.add(self._num_asked)
                self._ask(shard, size - 1, is_wanted=False)
        self._is_located = not self._unanswered
        if self._is_located:
            self._ticket = ticket
