"""Which samples form which batch, at which step and on which rank. Pure rules over numbers.

Every trainer rank computes its own part of the same plan and requests batches from data hosts by explicit indices;
data hosts keep no cursor. ``world_size`` counts the trainer ranks only, ``batch_size`` is per rank, and a global batch
is what all ranks together train on in one step.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_sm.data.plan.seeds import encode_key
from lightning_sm.errors import DataSettingsError

IndexArray: TypeAlias = npt.NDArray[np.int64]


def epoch_order(length: int, *, seed: int, epoch: int, pass_index: int = 0, salt: str = "") -> IndexArray:
    """Shuffle ``range(length)``, as int64: the same order in every process, on every host, under every NumPy version.

    NumPy may change what ``Generator.permutation`` returns from release to release; NEP 19 guarantees only the raw
    stream of a bit generator. So the order is the stable argsort of one raw Philox number per sample: ties, were
    there any, cannot fall differently on another processor.

    Args:
        length: Number of samples.
        seed: Seed of the run.
        epoch: Epoch of the trainer.
        pass_index: Counts passes over the same loader within one epoch.
        salt: Tells apart loaders that must not share an order.
    """
    prefix = encode_key(["lightning_sm.order", int(seed), int(epoch), int(pass_index), salt])
    key = np.frombuffer(hashlib.blake2b(prefix, digest_size=16).digest(), dtype="<u8")
    return np.argsort(np.random.Philox(key=key).random_raw(length), kind="stable").astype(np.int64, copy=False)


def num_steps(num_samples: int, batch_size: int | None, *, drop_last: bool, world_size: int) -> int:
    """Count the steps of a pass, the same on every rank: else collectives would hang.

    Of a ``SamplePlan`` these are the full global batches, plus one step for a tail that has a sample for every rank, or
    that is the only step. With ``drop_last`` the only step must lack fewer samples than there are ranks: as many as
    torch's ``DistributedSampler`` repeats. If ``batch_size`` is None, every sample is a batch of its own, as in a
    ``BatchPlan``.
    """
    if batch_size is None:
        return -(-num_samples // world_size)
    full, tail = divmod(num_samples, batch_size * world_size)
    if drop_last:
        return full or int(tail > (batch_size - 1) * world_size)
    return full + (tail > 0 and (tail >= world_size or full == 0))


class SamplePlan:
    """One rank's part of one pass over an order of samples.

    Step k is the k-th global batch of the order, and each rank takes a contiguous slice of it. Without ``drop_last``
    nothing is dropped or padded: the tail is one more step that is split as evenly as possible. A tail with fewer
    samples than ranks joins the last full step instead, whose batches then have at most ``batch_size + 1`` samples.
    Either way the batches, step by step and rank by rank, are the order itself. Only a pass with fewer samples than
    ranks repeats samples, so that every rank has one; with ``drop_last``, also one whose only step would otherwise lack
    fewer samples than there are ranks.

    Args:
        order: Sample indices of the pass, for all ranks together.
        batch_size: Samples per batch, per rank.
        drop_last: Leave out the samples that do not fill a global batch.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.

    Attributes:
        num_steps: Steps of the pass, the same on every rank.

    Raises:
        ValueError: An argument is out of range, or ``order`` is not a list of integers.
    """

    def __init__(self, order: IndexArray, batch_size: int, drop_last: bool, rank: int, world_size: int) -> None:
        check_rank(rank, world_size)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not a positive number.")
        self._order = _as_indices(order)
        self._rank = rank
        self._world_size = world_size
        self._global_batch_size = batch_size * world_size
        self.num_steps = num_steps(len(self._order), batch_size, drop_last=drop_last, world_size=world_size)
        if drop_last:
            self._order = np.resize(self._order, self.num_steps * self._global_batch_size)

    def batch(self, step: int) -> IndexArray:
        """Return this rank's indices at a step, never empty.

        Raises:
            IndexError: The pass has no such step.
        """
        _check_step(step, self.num_steps)
        start = step * self._global_batch_size
        end = None if step == self.num_steps - 1 else start + self._global_batch_size
        return _share(self._order[start:end], self._rank, self._world_size)


class BatchPlan:
    """One rank's part of one pass over batches that the user's code has made, and that stay as they are.

    Step k of rank r is batch ``k * world_size + r``. A last group with fewer batches than ranks is one more step, in
    which the ranks that would have none repeat batches of this group.

    Args:
        flat: The sample indices of all batches, one batch after the other.
        offsets: Where each batch starts in ``flat``, and where the last one ends. None: every index stands for a batch.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.

    Attributes:
        num_steps: Steps of the pass, the same on every rank.

    Raises:
        DataSettingsError: The batch sampler returned an empty batch.
        ValueError: An argument is out of range, or ``offsets`` does not cut ``flat`` into batches.
    """

    def __init__(self, flat: IndexArray, offsets: IndexArray | None, rank: int, world_size: int) -> None:
        check_rank(rank, world_size)
        self._flat = _as_indices(flat)
        self._offsets = None if offsets is None else _as_indices(offsets)
        if self._offsets is not None:
            _check_offsets(self._offsets, len(self._flat))
        self._num_batches = len(self._flat) if self._offsets is None else len(self._offsets) - 1
        self._rank = rank
        self._world_size = world_size
        self.num_steps = num_steps(self._num_batches, None, drop_last=False, world_size=world_size)

    def batch(self, step: int) -> IndexArray:
        """Return this rank's indices at a step, never empty.

        Raises:
            IndexError: The pass has no such step.
        """
        _check_step(step, self.num_steps)
        first = step * self._world_size
        number = first + self._rank % min(self._world_size, self._num_batches - first)
        if self._offsets is None:
            return self._flat[number : number + 1]
        return self._flat[self._offsets[number] : self._offsets[number + 1]]


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


def _as_indices(values: IndexArray) -> IndexArray:
    array = np.asarray(values)
    # NumPy turns an empty list into an array of floats, which is fine.
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"Expected a list of integers, not an array of {array.dtype} with shape {array.shape}.")
    return array.astype(np.int64, copy=False)


def _share(values: IndexArray, rank: int, world_size: int) -> IndexArray:
    """Cut off a rank's contiguous part; sizes differ by at most one, and no part is empty."""
    if len(values) < world_size:
        # A rank without a batch would leave the others waiting in their next collective.
        return values[rank % len(values) :][:1]
    size, extra = divmod(len(values), world_size)
    start = rank * size + min(rank, extra)
    return values[start : start + size + (rank < extra)]


def _check_step(step: int, num_steps: int) -> None:
    if not 0 <= step < num_steps:
        raise IndexError(f"Step {step} does not exist (number of steps in the pass: {num_steps}).")


def _check_offsets(offsets: IndexArray, size: int) -> None:
    sizes = np.diff(offsets)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != size or (sizes < 0).any():
        raise ValueError(f"The {len(offsets)} offsets do not cut {size} samples into batches.")
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise DataSettingsError(
            f"Batch {empty[0]} of the batch sampler is empty. Return at least one sample index in every batch."
        )
