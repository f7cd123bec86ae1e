"""Passes over a loader: to which ranks it belongs, where a pass begins and ends, and how far shards carry it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_sm.data.plan.shards import ShardPlan
from lightning_sm.errors import DataServiceError

logger = logging.getLogger(__name__)

# Keeps apart the passes over a loader and the rounds over its shards within one of them: both count in pass_index.
_ROUND = 1 << 32


@dataclass(frozen=True)
class LoaderPlace:
    """Where a loader belongs.

    Attributes:
        opening: The loaders that the data hosts opened together.
        index: Position among them.
        stage: "train", "val", "test" or "predict".
        rank: This rank, as far as the data is split; 0 if every rank gets all of it.
        world_size: Ranks over which the data is split.
        seed: Base of all random states.
        window_batches: Batches that may be under way or ready.
        window_bytes: The same limit in bytes.
        max_batch_bytes: Capacity of a slot.
        timeout_s: Seconds to wait for a batch.
        compression: How batches are compressed on their way; empty: not at all.
        num_shards: Virtual shards into which an iterable dataset is cut.
        batches_per_pass: Batches of an iterable dataset in a pass, if the user sets them.
    """

    opening: str
    index: int
    stage: str
    rank: int
    world_size: int
    seed: int
    window_batches: int
    window_bytes: int
    max_batch_bytes: int
    timeout_s: float
    compression: str = ""
    num_shards: int = 1
    batches_per_pass: int | None = None


@dataclass
class Position:
    """Where a pass begins and ends, and in which order it goes.

    Attributes:
        epoch: Epoch of the training.
        pass_index: Number of the pass within the epoch.
        first_step: First batch of the pass.
        stop_step: Batch after the last; None: all.
        is_sequential: Whether shuffling is off for this pass (``overfit_batches``).
    """

    epoch: int = 0
    pass_index: int = 0
    first_step: int = 0
    stop_step: int | None = None
    is_sequential: bool = False


class ShardPasses:
    """Where passes over the shards of one rank begin, end, and go on when the shards have ended.

    Args:
        name: The loader, for messages.
        place: Where it belongs.
        count: Lets a data host count; returns the batches for each rank, and those that all of them leave out.

    Raises:
        DataSettingsError: The shards do not divide evenly over the ranks.
    """

    def __init__(self, name: str, place: LoaderPlace, count: Callable[[], tuple[int, int]]) -> None:
        ShardPlan(place.num_shards, place.rank, place.world_size)  # refuses what does not divide
        self._name = name
        self._place = place
        self._count = count
        self._counted: int | None = None
        self._has_warned = False
        # Epoch, passes in it that have ended, and their batches.
        self._ended = (-1, 0, 0)

    @property
    def length(self) -> int | None:
        """Batches in a pass; None: a single rank goes on until its shards have ended, several must agree before."""
        if self._place.batches_per_pass is not None or self._place.world_size == 1:
            return self._place.batches_per_pass
        if self._counted is None:
            self._counted = self._counted_length()
        return self._counted

    def begin(self, position: Position) -> Position:
        """Return where a pass begins, and where it ends if it has a length.

        Args:
            position: What the Trainer says.
        """
        epoch, num_passes, num_batches = self._ended
        first, stop, length = position.first_step, position.stop_step, self.length
        if length is not None:
            return replace(position, stop_step=length if stop is None else min(stop, length))
        if position.epoch != epoch or first < num_batches:
            return position
        # In a CombinedLoader that cycles; the Trainer counts all batches of the epoch.
        stop = None if stop is None else stop - num_batches
        return replace(position, pass_index=num_passes, first_step=first - num_batches, stop_step=stop)

    def after(self, position: Position, num_batches: int) -> Position | None:
        """Return where a pass goes on when all shards have ended; None if it is over.

        Args:
            position: Where it began.
            num_batches: Batches in the shards.

        Raises:
            DataServiceError: The pass has a length, and the shards have no batch at all.
        """
        first, stop = position.first_step, position.stop_step
        if self.length is None:
            epoch, num_passes, before = self._ended if self._ended[0] == position.epoch else (position.epoch, 0, 0)
            self._ended = epoch, num_passes + 1, before + num_batches
            return None
        if stop is None or stop - num_batches <= max(0, first - num_batches):
            return None
        if not num_batches:
            raise DataServiceError(
                f"{self._name}: the shards of rank {self._place.rank} have no batch at all, and {stop} are needed. Are "
                f"there samples for each of the {self._place.num_shards} shards (data_service.virtual_shards)?"
            )
        self._warn(num_batches)
        first, stop = max(0, first - num_batches), stop - num_batches
        return replace(position, pass_index=position.pass_index + _ROUND, first_step=first, stop_step=stop)

    def _warn(self, num_batches: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the shards of rank %d ended after %d batches, and a pass has %d (data_service.batches_per_epoch, "
                "or as they were counted): they begin anew within the pass.",
                self._name,
                self._place.rank,
                num_batches,
                self.length,
            )

    def _counted_length(self) -> int:
        place = self._place
        if place.rank == 0:
            logger.info(
                "Counting the batches of %s, as all ranks need equally many: a data host reads all of it once%s.",
                self._name,
                "; data_service.batches_per_epoch avoids that" if place.stage == "train" else "",
            )
        length, num_dropped = self._count()
        if num_dropped and place.rank == 0:
            logger.warning(
                "%s: each of %d ranks takes %d batches per pass, and %d of %d batches are left out.",
                self._name,
                place.world_size,
                length,
                num_dropped,
                length * place.world_size + num_dropped,
            )
        return length
