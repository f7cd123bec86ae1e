"""The starts and ends of passes over a loader, and how they continue when shards end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec.structs import replace

from lightning_sm.data.ipc.feeder_messages import LoaderPlace, Position
from lightning_sm.data.plan.shards import check_shards
from lightning_sm.errors import DataServiceError

logger = logging.getLogger(__name__)

# In units of this, pass_index counts the rounds over the shards within one pass.
_ROUND = 1 << 32


class ShardPasses:
    """The passes over one rank's shards of an iterable dataset: where they start and end.

    Args:
        name: Name of the loader, for messages.
        place: Where the loader belongs.
        count: Has a data host count the batches; returns those of each rank, and the number that all ranks leave out.

    Raises:
        DataSettingsError: The shards do not divide evenly among the ranks.
    """

    def __init__(self, name: str, place: LoaderPlace, count: Callable[[], tuple[int, int]]) -> None:
        check_shards(place.num_shards, place.world_size)
        self._name = name
        self._place = place
        self._count = count
        self._counted: int | None = None
        self._has_warned = False
        # Passes of this epoch that have ended.
        self._epoch = -1
        self._num_ended = 0
        self._num_batches_ended = 0

    @property
    def length(self) -> int | None:
        """Batches in a pass. None: unknown, which only a single rank permits; several ranks need the same number."""
        place = self._place
        if place.batches_per_pass is not None or place.world_size == 1:
            return place.batches_per_pass
        if self._counted is None:
            hint = " To avoid that, set data_service.batches_per_epoch." if place.stage == "train" else ""
            if place.rank == 0:
                logger.info(
                    "Counting the batches of %s, because all ranks need the same number: the data hosts read the whole "
                    "dataset once.%s",
                    self._name,
                    hint,
                )
            self._counted, num_dropped = self._count()
            if num_dropped and place.rank == 0:
                logger.warning(
                    "%s: leaving out %d of %d batches. All %d ranks need the same number per pass: %d.",
                    self._name,
                    num_dropped,
                    self._counted * place.world_size + num_dropped,
                    place.world_size,
                    self._counted,
                )
        return self._counted

    def whole(self, position: Position) -> Position:
        """Return the position of a pass that leaves nothing out, and does not count as one of the Trainer's."""
        return replace(position, first_step=0, stop_step=self.length)

    def begin(self, position: Position) -> Position:
        """Return where a pass starts, and where it ends if it has a length.

        Args:
            position: The position from the Trainer's progress.
        """
        first = position.first_step
        stop = position.stop_step
        length = self.length
        if length is not None:
            return replace(position, stop_step=length if stop is None else min(stop, length))
        if position.epoch != self._epoch or first < self._num_batches_ended:
            return position
        # A CombinedLoader that cycles has restarted this loader; the Trainer counts all batches of the epoch.
        if stop is not None:
            stop -= self._num_batches_ended
        first -= self._num_batches_ended
        return replace(position, pass_index=self._num_ended, first_step=first, stop_step=stop)

    def after(self, position: Position, num_batches: int) -> Position | None:
        """Return where a pass continues when all shards have ended; None if it is over.

        Args:
            position: Where it started.
            num_batches: Batches in the shards.

        Raises:
            DataServiceError: The pass has a length, but the shards have no batches.
        """
        if self.length is None and position.is_manual_iteration:
            return None
        if self.length is None:
            if position.epoch != self._epoch:
                self._epoch = position.epoch
                self._num_ended = 0
                self._num_batches_ended = 0
            self._num_ended += 1
            self._num_batches_ended += num_batches
            return None
        if position.stop_step is None:
            return None
        first = max(0, position.first_step - num_batches)
        stop = position.stop_step - num_batches
        if stop <= first:
            return None
        if not num_batches:
            raise DataServiceError(
                f"{self._name}: the shards of rank {self._place.rank} have no batches, but {stop} are needed. Check "
                f"that each of the {self._place.num_shards} shards (data_service.virtual_shards) has samples."
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the shards of rank %d ended at batch %d, but the length of a pass is %d "
                "(data_service.batches_per_epoch, or as counted). They restart within the pass.",
                self._name,
                self._place.rank,
                num_batches,
                self.length,
            )
        return replace(position, pass_index=position.pass_index + _ROUND, first_step=first, stop_step=stop)
