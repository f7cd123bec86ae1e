"""The plan of a pass: which samples form which batch, at which step and on which rank. Pure rules over numbers.

Every trainer rank computes its own part of the same plan and requests batches from data hosts by explicit indices;
data hosts keep no cursor. ``world_size`` counts the trainer ranks only, ``batch_size`` is per rank, and a global batch
is what all ranks together train on in one step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_sm.data.plan.order import IndexArray, Order
from lightning_sm.errors import DataSettingsError

# A shuffled order is evaluated for about so many samples at once: one by one, steps of a few samples would cost five
# times more. The window of a pass lies in so many of these blocks.
_BLOCK_SAMPLES = 4096
_NUM_BLOCKS = 4


def num_steps(num_samples: int, batch_size: int | None, *, drop_last: bool, world_size: int) -> int:
    """Count the steps of a pass, the same on every rank: else collectives would hang.

    Without ``drop_last``, the samples that do not fill a step are one more step. With ``drop_last``, they are left out,
    unless there is no other step and fewer samples are missing than there are ranks: as many as torch's
    ``DistributedSampler`` repeats. If ``batch_size`` is None, every sample is a batch of its own: a ``BatchPlan``.
    """
    if batch_size is None:
        return -(-num_samples // world_size)
    full, tail = divmod(num_samples, batch_size * world_size)
    if drop_last:
        return full or int(tail > (batch_size - 1) * world_size)
    return full + (tail > 0)


class Tail(NamedTuple):
    """The last step of a pass, as far as it is not like the others for a rank.

    Attributes:
        weight: Samples of the rank in this step, divided by the mean over the ranks; 0: its batch repeats another
            rank's. It is 1 on all ranks, or on none.
        is_uneven: Whether the batches of the ranks differ in size.
    """

    weight: float = 1.0
    is_uneven: bool = False

    @classmethod
    def of(cls, num_samples: int, batch_size: int | None, *, drop_last: bool, rank: int, world_size: int) -> Tail:
        """Return the last step that a plan has unless it is padded; arguments are those of ``num_steps``."""
        in_tail = 0 if drop_last and batch_size is not None else num_samples % ((batch_size or 1) * world_size)
        size, extra = divmod(in_tail, world_size)
        if not extra:
            return cls()
        return cls((size + (rank < extra)) * world_size / in_tail, is_uneven=size > 0)


class _StepPlan:
    """One rank's part of one pass: for each step, an interval of an order.

    Attributes:
        num_steps: Steps of the pass, the same on every rank.
    """

    def __init__(self, order: Order, num_steps: int, step_samples: int) -> None:
        self.num_steps = num_steps
        self._order = order
        self._block_steps = max(1, _BLOCK_SAMPLES // max(1, step_samples))
        # Of each step, where in the order it begins, and its indices. The last used block is last.
        self._blocks: dict[int, list[tuple[int, IndexArray]]] = {}

    @property
    def order_length(self) -> int:
        """Samples in the order of the pass, of all ranks together."""
        return len(self._order)

    def batch(self, step: int) -> IndexArray:
        """Return this rank's indices at a step, never empty.

        Raises:
            IndexError: The pass has no such step.
        """
        return self._step(step)[1]

    def position(self, step: int) -> int:
        """Return where in the order the samples of ``batch(step)`` begin; behind its last sample comes its first.

        Raises:
            IndexError: The pass has no such step.
        """
        return self._step(step)[0]

    def batches(self) -> tuple[IndexArray, IndexArray]:
        """Return the indices of all steps of this rank, and where each step begins in them and the last one ends."""
        return self._read(np.arange(self.num_steps))

    def positions(self) -> IndexArray:
        """Return ``position(step)`` of all steps."""
        return self._positions(np.arange(self.num_steps))

    def _step(self, step: int) -> tuple[int, IndexArray]:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"Step {step} does not exist (number of steps in the pass: {self.num_steps}).")
        number, place = divmod(step, self._block_steps)
        self._blocks[number] = self._blocks.pop(number, []) or self._block(number)
        while len(self._blocks) > _NUM_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return self._blocks[number][place]

    def _block(self, number: int) -> list[tuple[int, IndexArray]]:
        first = number * self._block_steps
        steps = np.arange(first, min(first + self._block_steps, self.num_steps))
        indices, offsets = self._read(steps)
        return list(zip(self._positions(steps).tolist(), np.split(indices, offsets[1:-1]), strict=True))

    def _positions(self, steps: IndexArray) -> IndexArray:
        return self._intervals(steps)[0] % len(self._order)

    def _read(self, steps: IndexArray) -> tuple[IndexArray, IndexArray]:
        starts, sizes = self._intervals(steps)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        # A padded pass repeats its first samples, as the only step of a pass with drop_last may.
        return self._order[positions % len(self._order)], offsets

    def _intervals(self, steps: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return where in the order each of some steps begins, and how many samples it has."""
        raise NotImplementedError


class SamplePlan(_StepPlan):
    """One rank's part of one pass over an order of samples.

    Step k is the k-th global batch of the order, and each rank takes a contiguous slice of it. Without ``drop_last``
    nothing is dropped: the samples that do not fill a step are one more step, split as evenly as possible. If it has
    fewer samples than ranks, a rank without one repeats another rank's. Apart from that, the batches, step by step and
    rank by rank, are the order itself, unless the last step is padded. With ``drop_last``, a pass repeats samples if
    its only step would otherwise lack fewer samples than there are ranks.

    Args:
        order: Sample indices of the pass, for all ranks together. Only those of this rank's steps are read.
        batch_size: Samples per batch, per rank.
        drop_last: Leave out the samples that do not fill a global batch.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.
        pads: Let the ranks have batches of equal sizes in the last step, too: the first samples of the order repeat
            there, as many as torch's ``DistributedSampler`` repeats. With ``drop_last`` they have them anyway.

    Raises:
        ValueError: An argument is out of range, or ``order`` is not a list of integers.
    """

    def __init__(
        self,
        order: Order | Sequence[int],
        batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        *,
        pads: bool = False,
    ) -> None:
        check_rank(rank, world_size)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not a positive number.")
        order = _as_order(order)
        super().__init__(
            order, num_steps(len(order), batch_size, drop_last=drop_last, world_size=world_size), batch_size
        )
        self._rank = rank
        self._world_size = world_size
        self._batch_size = batch_size
        self._stop = -(-len(order) // world_size) * world_size if pads else len(order)
        if drop_last:
            self._stop = self.num_steps * batch_size * world_size

    def _intervals(self, steps: IndexArray) -> tuple[IndexArray, IndexArray]:
        sizes = np.full(len(steps), self._batch_size)
        starts = steps * self._batch_size * self._world_size + self._rank * self._batch_size
        if len(steps) and steps[-1] == self.num_steps - 1:
            begin = int(steps[-1]) * self._batch_size * self._world_size
            last = _share(range(begin, self._stop), self._rank, self._world_size)
            starts[-1], sizes[-1] = last.start, len(last)
        return starts, sizes


class BatchPlan(_StepPlan):
    """One rank's part of one pass over batches that the user's code has made, and that stay as they are.

    Step k of rank r is batch ``k * world_size + r``. A last group with fewer batches than ranks is one more step, in
    which the ranks that would have none repeat batches of this group.

    Args:
        flat: The sample indices of all batches, one batch after the other; without ``offsets`` it may be any order.
        offsets: Where each batch starts in ``flat``, and where the last one ends. None: every index stands for a batch.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.

    Raises:
        DataSettingsError: The batch sampler returned an empty batch.
        ValueError: An argument is out of range, or ``offsets`` does not cut ``flat`` into batches.
    """

    def __init__(self, flat: Order | Sequence[int], offsets: IndexArray | None, rank: int, world_size: int) -> None:
        check_rank(rank, world_size)
        flat = _as_order(flat)
        self._offsets = None if offsets is None else _as_indices(offsets)
        if self._offsets is not None:
            _check_offsets(self._offsets, len(flat))
        self._num_batches = len(flat) if self._offsets is None else len(self._offsets) - 1
        super().__init__(
            flat,
            num_steps(self._num_batches, None, drop_last=False, world_size=world_size),
            len(flat) // max(1, self._num_batches),
        )
        self._rank = rank
        self._world_size = world_size

    def _intervals(self, steps: IndexArray) -> tuple[IndexArray, IndexArray]:
        first = steps * self._world_size
        numbers = first + self._rank % np.minimum(self._world_size, self._num_batches - first)
        if self._offsets is None:
            return numbers, np.ones_like(numbers)
        return self._offsets[numbers], self._offsets[numbers + 1] - self._offsets[numbers]


class ReceivedPlan(BatchPlan):
    """One rank's part of one pass, as a data host has cut it out of the order of the user's sampler.

    Args:
        flat: The sample indices of the rank's batches, one batch after the other.
        offsets: Where each batch starts in ``flat``, and where the last one ends.
        positions: Where each batch starts in the whole order.
        order_length: Samples in the whole order.

    Raises:
        DataSettingsError: A batch is empty.
        ValueError: The arguments do not fit each other.
    """

    def __init__(self, flat: IndexArray, offsets: IndexArray, positions: IndexArray, order_length: int) -> None:
        super().__init__(flat, offsets, 0, 1)
        if len(positions) != self.num_steps:
            raise ValueError(f"There are {len(positions)} positions for {self.num_steps} batches.")
        self._received_positions = _as_indices(positions)
        self._order_length = order_length

    @property
    def order_length(self) -> int:
        """Samples in the order of the pass, of all ranks together."""
        return self._order_length

    def _positions(self, steps: IndexArray) -> IndexArray:
        return self._received_positions[steps]


def digest(array: IndexArray) -> str:
    """Return a short hash of a list of integers, by which two hosts compare theirs, whatever the integer types."""
    return hashlib.blake2b(_as_indices(array).astype("<i8", copy=False).tobytes(), digest_size=8).hexdigest()


def check_rank(rank: int, world_size: int) -> None:
    """Check that a world has a rank.

    Raises:
        ValueError: It does not.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} does not exist in world_size={world_size}.")


def _as_order(values: Order | Sequence[int]) -> Order:
    return _as_indices(values) if isinstance(values, (Sequence, np.ndarray)) else values


def _as_indices(values: IndexArray | Sequence[int]) -> IndexArray:
    array = np.asarray(values)
    # NumPy turns an empty list into an array of floats, which is fine.
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"Expected a list of integers, not an array of {array.dtype} with shape {array.shape}.")
    return array.astype(np.int64, copy=False)


def _share(values: range, rank: int, world_size: int) -> range:
    """Cut off a rank's contiguous part; sizes differ by at most one, and no part is empty."""
    if len(values) < world_size:
        # A rank without a batch would leave the others waiting in their next collective.
        return values[rank % len(values) :][:1]
    size, extra = divmod(len(values), world_size)
    start = rank * size + min(rank, extra)
    return values[start : start + size + (rank < extra)]


def _check_offsets(offsets: IndexArray, size: int) -> None:
    sizes = np.diff(offsets)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != size or (sizes < 0).any():
        raise ValueError(f"The {len(offsets)} offsets do not cut {size} samples into batches.")
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise DataSettingsError(
            f"Batch {empty[0]} of the batch sampler is empty. Return at least one sample index in every batch."
        )
