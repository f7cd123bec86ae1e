"""Which samples make up which batch, at which step, on which rank, and with which random state.

Pure rules over numbers. The trainer ranks compute the plan, each its own part and all of them alike, and ask data
hosts for batches by explicit indices; data hosts keep no cursor. ``world_size`` counts the ranks of the trainers only,
``batch_size`` is per rank, and a global batch is what all ranks together train on in one step.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_sm.errors import DataSettingsError

IndexArray: TypeAlias = npt.NDArray[np.int64]


def _to_integer(value: object) -> int:
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"it holds a {type(value).__name__}")


# Made once: json.dumps makes one for every call that sets an option, which takes longer than the hash.
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_to_integer)

# Divides evenly over 1, 2, 4, 8 or 16 ranks or data workers, so that these cluster shapes read the same shards.
_MIN_SHARDS = 16


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
    prefix = _encode(["lightning_sm.order", int(seed), int(epoch), int(pass_index), salt])
    key = np.frombuffer(hashlib.blake2b(prefix, digest_size=16).digest(), dtype="<u8")
    return np.argsort(np.random.Philox(key=key).random_raw(length), kind="stable").astype(np.int64, copy=False)


def num_steps(num_samples: int, batch_size: int, *, drop_last: bool, world_size: int) -> int:
    """Count the steps of a ``SamplePlan`` over ``num_samples``; every rank has as many, else collectives would hang.

    These are the full global batches, plus one for a tail that has a sample for every rank, or that is all there is.
    """
    full, tail = divmod(num_samples, batch_size * world_size)
    has_tail_step = not drop_last and tail > 0 and (tail >= world_size or full == 0)
    return full + has_tail_step


class SamplePlan:
    """One rank's part of one pass over an order of samples.

    Step k is the k-th global batch of the order, and each rank takes a contiguous slice of it. Without ``drop_last``
    nothing is dropped or padded: the tail is one more step that is split as evenly as possible. A tail with fewer
    samples than ranks joins the last full step instead, whose batches then have at most ``batch_size + 1`` samples.
    Either way the batches, step by step and rank by rank, are the order itself.

    Args:
        order: Sample indices of the pass, for all ranks together.
        batch_size: Samples per batch, per rank.
        drop_last: Leave out the samples that do not fill a global batch.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.

    Attributes:
        num_steps: Steps of the pass, the same on every rank.
        num_repeated: Samples served once more, over all ranks, where there are fewer samples than ranks; else 0.

    Raises:
        ValueError: An argument is out of range, or ``order`` is not a list of integers.
    """

    def __init__(self, order: IndexArray, batch_size: int, drop_last: bool, rank: int, world_size: int) -> None:
        _check_rank(rank, world_size)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not a positive number.")
        self._order = _as_indices(order)
        self._rank, self._world_size = rank, world_size
        self._global_batch_size = batch_size * world_size
        size = len(self._order)
        self.num_steps = num_steps(size, batch_size, drop_last=drop_last, world_size=world_size)
        self.num_repeated = max(0, world_size - size) if self.num_steps else 0
        self._end = self.num_steps * self._global_batch_size if drop_last else size

    def batch(self, step: int) -> IndexArray:
        """Return this rank's indices at a step, never empty; a step that the pass lacks is an ``IndexError``."""
        _check_step(step, self.num_steps)
        start = step * self._global_batch_size
        end = self._end if step == self.num_steps - 1 else start + self._global_batch_size
        return _share(self._order[start:end], self._rank, self._world_size)

    def samples_before(self, step: int) -> int:
        """Return how many samples all ranks consumed before a step; at the end of a pass, tails count as full."""
        return step * self._global_batch_size


class BatchPlan:
    """One rank's part of one pass over the batches of a custom batch sampler.

    Step k of rank r is batch ``k * world_size + r``. The samples of a last group with fewer batches than ranks are
    split as evenly as possible in one more step; where they are fewer than the ranks, the first ranks take one each
    into their last batch. ``num_steps`` and ``num_repeated`` mean what they mean in ``SamplePlan``.

    Args:
        flat: The sample indices of all batches, one batch after the other.
        offsets: Where each batch starts in ``flat``, and where the last one ends.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.

    Raises:
        DataSettingsError: The batch sampler returned an empty batch.
        ValueError: An argument is out of range, or ``offsets`` does not cut ``flat`` into batches.
    """

    def __init__(self, flat: IndexArray, offsets: IndexArray, rank: int, world_size: int) -> None:
        _check_rank(rank, world_size)
        self._flat, self._offsets = _as_indices(flat), _as_indices(offsets)
        _check_offsets(self._offsets, len(self._flat))
        self._rank, self._world_size = rank, world_size
        self._num_full, num_left = divmod(len(self._offsets) - 1, world_size)
        self._tail_start = int(self._offsets[self._num_full * world_size])
        tail_size = len(self._flat) - self._tail_start
        has_tail_step = num_left > 0 and (tail_size >= world_size or self._num_full == 0)
        self.num_steps = self._num_full + has_tail_step
        self.num_repeated = max(0, world_size - tail_size) if has_tail_step else 0

    def batch(self, step: int) -> IndexArray:
        """Return this rank's indices at a step, never empty; a step that the pass lacks is an ``IndexError``."""
        _check_step(step, self.num_steps)
        tail = self._flat[self._tail_start :]
        if step == self._num_full:
            return _share(tail, self._rank, self._world_size)
        number = step * self._world_size + self._rank
        batch = self._flat[self._offsets[number] : self._offsets[number + 1]]
        if step == self.num_steps - 1 and self._rank < len(tail):
            return np.concatenate([batch, tail[self._rank : self._rank + 1]])
        return batch

    def samples_before(self, step: int) -> int:
        """Return how many samples all ranks consumed before a step; ``num_steps`` stands for the end of the pass."""
        return int(self._offsets[step * self._world_size if step < self.num_steps else -1])


class ShardPlan:
    """One rank's requests to an iterable dataset that is cut into virtual shards, each with a cursor of its own.

    The shards do not depend on data hosts or workers. A rank owns every ``world_size``-th shard and asks for one batch
    of each in turn. Where a shard ends is known only then: ``ended`` records it, and later tickets of it are empty.

    Args:
        num_shards: Virtual shards of the dataset.
        rank: Global rank among the trainers.
        world_size: Number of trainer ranks.

    Raises:
        DataSettingsError: ``num_shards`` is not a multiple of ``world_size``.
    """

    def __init__(self, num_shards: int, rank: int, world_size: int) -> None:
        _check_rank(rank, world_size)
        _check_shards(num_shards, world_size)
        self._num_shards, self._rank, self._world_size = num_shards, rank, world_size
        self._num_own = num_shards // world_size
        self._ends: dict[int, int] = {}

    def ticket(self, number: int) -> tuple[int, int]:
        """Return the shard and the offset of the batch in it that this rank's ticket ``number`` stands for."""
        offset, position = divmod(number, self._num_own)
        return self._rank + position * self._world_size, offset

    def ended(self, shard: int, offset: int) -> None:
        """Record that a shard has no batch at ``offset`` or later.

        Answers may come out of order: the smallest offset wins. An end of another rank's shard is a ``ValueError``.
        """
        if not 0 <= shard < self._num_shards or shard % self._world_size != self._rank or offset < 0:
            raise ValueError(f"Rank {self._rank} of {self._world_size} has no offset {offset} in shard {shard}.")
        self._ends[shard] = min(offset, self._ends.get(shard, offset))

    def is_empty(self, number: int) -> bool:
        """Return whether a ticket is known to have no batch, so that nobody needs to be asked for it."""
        shard, offset = self.ticket(number)
        return shard in self._ends and offset >= self._ends[shard]

    @property
    def exhausted(self) -> bool:
        """Whether all shards of this rank have ended."""
        return len(self._ends) == self._num_own

    def last_ticket(self) -> int | None:
        """Return the ticket after which nothing can come, -1 for no batch at all, None while a shard is open."""
        if not self.exhausted:
            return None
        lasts = ((end - 1) * self._num_own + shard // self._world_size for shard, end in self._ends.items())
        return max(-1, *lasts)

    @property
    def num_batches(self) -> int | None:
        """Batches in all shards of this rank; None while a shard is open."""
        return sum(self._ends.values()) if self.exhausted else None

    def end(self, shard: int) -> int | None:
        """Return the number of batches in a shard; None while it is open."""
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
            asked = max(0, -(-(number - position) // self._num_own))
            sizes[shard] = min(asked, self._ends.get(shard, asked))
        return sizes

    def ticket_of(self, batch: int) -> int | None:
        """Return the ticket of a batch, counted over all shards of this rank; None if they are known to have less."""
        if self.num_batches is not None and batch >= self.num_batches:
            return None
        # A round of tickets has a batch at least, as long as there is one.
        low, high = batch, (batch + 1) * self._num_own
        while low < high:
            middle = (low + high) // 2
            if sum(self.sizes_before(middle + 1).values()) > batch:
                high = middle
            else:
                low = middle + 1
        return low


def default_num_shards(world_size: int) -> int:
    """Return the number of virtual shards to use when the user sets none."""
    return math.lcm(_MIN_SHARDS, world_size)


def shard_steps(counts: Sequence[int], world_size: int) -> tuple[int, int]:
    """Return the steps that every rank can take over shards of so many batches, and how many that leaves out."""
    _check_shards(len(counts), world_size)
    steps = min(sum(counts[rank::world_size]) for rank in range(world_size))
    return steps, sum(counts) - steps * world_size


class SampleSeeds:
    """The random state of every sample and batch of one pass, whichever host computes it.

    Args:
        seed: Seed of the run.
        stage: What the pass is for, such as ``train``.
        loader_index: Position of the loader in its stage.
        epoch: Epoch of the trainer.
        pass_index: Counts passes over the same loader within one epoch.
    """

    def __init__(self, seed: int, stage: str, loader_index: int, epoch: int, pass_index: int) -> None:
        fields = [int(seed), stage, int(loader_index), int(epoch), int(pass_index)]
        # One prefix for each kind of key: an integer sample, any other sample, and a batch never meet.
        self._integers, self._others, self._batches = (
            hashlib.blake2b(_encode([f"lightning_sm.{kind}", *fields]), digest_size=8)
            for kind in ("integer", "key", "batch")
        )

    def of(self, key: object) -> int:
        """Return the seed of one sample, an unsigned 64-bit number.

        The key is what the dataset is asked for: an integer, a string, or tuples and lists of them. A tuple and a list
        of the same items are the same sample. What JSON cannot express is a ``DataSettingsError``.
        """
        if isinstance(key, np.integer):
            key = int(key)
        # The quick way is for what nearly every dataset is indexed with: encoding costs more than hashing.
        if type(key) is int and -(2**63) <= key < 2**63:
            state = self._integers.copy()
            state.update(key.to_bytes(8, "little", signed=True))
        else:
            state = self._others.copy()
            state.update(_encode(key))
        return int.from_bytes(state.digest(), "little")

    def of_batch(self, step: int, rank: int) -> int:
        """Return the seed for what is random in making a batch out of its samples, an unsigned 64-bit number."""
        state = self._batches.copy()
        state.update(_encode([int(step), int(rank)]))
        return int.from_bytes(state.digest(), "little")


def resume_step(samples_consumed: int, global_batch: int) -> tuple[int, int]:
    """Find where to go on after the samples that all ranks consumed in a pass, maybe with another global batch.

    The step is rounded down so that no sample is lost; the second number is how many samples come twice for that.
    """
    if samples_consumed < 0 or global_batch < 1:
        raise ValueError(f"Cannot go on after {samples_consumed} samples with a global batch of {global_batch}.")
    return divmod(samples_consumed, global_batch)


def digest(array: IndexArray) -> str:
    """Return a short hash of a list of integers, by which two hosts compare theirs, whatever the integer types."""
    return hashlib.blake2b(_as_indices(array).astype("<i8", copy=False).tobytes(), digest_size=8).hexdigest()


def _encode(value: object) -> bytes:
    """Write different keys differently: JSON tells 1 from "1", and marks where a sequence ends."""
    try:
        return _ENCODER.encode(value).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"The sample key {value!r} cannot be sent to a data host: {error}."
        raise DataSettingsError(f"{problem} Use integers, strings, or tuples and lists of them.") from error


def _as_indices(values: IndexArray) -> IndexArray:
    array = np.asarray(values)
    # An empty list becomes an array of floats; that is no reason to refuse it.
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


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} does not exist in world_size={world_size}.")


def _check_step(step: int, num_steps: int) -> None:
    if not 0 <= step < num_steps:
        raise IndexError(f"Step {step} does not exist: the pass has {num_steps} steps.")


def _check_offsets(offsets: IndexArray, size: int) -> None:
    sizes = np.diff(offsets)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != size or (sizes < 0).any():
        raise ValueError(f"The {len(offsets)} offsets do not cut {size} samples into batches.")
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise DataSettingsError(f"Batch {empty[0]} of the batch sampler is empty. Give every batch a sample index.")


def _check_shards(num_shards: int, world_size: int) -> None:
    if num_shards < 1 or num_shards % world_size:
        nearest = max(1, math.ceil(num_shards / world_size)) * world_size
        problem = f"num_shards={num_shards} (data_service.virtual_shards) does not divide evenly over "
        problem += f"world_size={world_size} trainer ranks."
        raise DataSettingsError(f"{problem} Set it to a multiple of {world_size}, such as {nearest}.")
