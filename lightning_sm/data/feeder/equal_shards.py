"""Notices an iterable dataset that yields the same in several virtual shards. No I/O."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from zlib import crc32

from lightning_sm.data.feeder.pass_buffer import LoaderKey, PassBuffer
from lightning_sm.data.feeder.range_buffer import InFlightRange
from lightning_sm.data.plan.shards import ShardSteps
from lightning_sm.data.protocol.frames import unpack_batches
from lightning_sm.data.settings import Verify
from lightning_sm.errors import DataSettingsError

logger = logging.getLogger(__name__)

# Shards whose first batches are equal may differ later, as where all begin with padding: compare so many of each.
_NUM_COMPARED = 2
# Batches of a few labels may be equal by chance: judge at least so many shards, of which half begin like earlier ones.
_NUM_JUDGED = 4


@dataclass
class _Begun:
    """What a pass has delivered of the beginnings of its shards."""

    pass_id: int
    checksums: dict[int, dict[int, int]] = field(default_factory=dict)  # of batches, by shard and offset
    shards: dict[tuple[int, ...], int] = field(default_factory=dict)  # by their beginning
    num_compared: int = 0
    num_equal: int = 0  # that begin like an earlier one


class EqualShards:
    """The comparison of one rank's shards with each other, in one pass over each loader.

    Args:
        mode: What follows if shards are equal.
    """

    def __init__(self, mode: Verify) -> None:
        self._mode = mode
        # None: all has been compared.
        self._begun: dict[LoaderKey, _Begun | None] = {}

    def offer(self, buffer: PassBuffer, answer: InFlightRange) -> DataSettingsError | None:
        """Compare batches that have arrived with those at the same offsets of other shards.

        Args:
            buffer: The pass.
            answer: The batches.

        Returns:
            The error that ends the training: shards begin alike.
        """
        plan = buffer.plan
        if self._mode == "off" or not isinstance(plan, ShardSteps) or plan.num_shards == 1:
            return None
        total, shard, first, _ = plan.batch(answer.step_range.first).tolist()
        begun = self._begun.setdefault(buffer.loader, _Begun(buffer.pass_id))
        if first >= _NUM_COMPARED or begun is None:
            return None
        if begun.pass_id != buffer.pass_id:
            begun = self._begun[buffer.loader] = _Begun(buffer.pass_id)
        own = begun.checksums.setdefault(shard, {})
        batches = unpack_batches(answer.header.encoded_batches, answer.header.num_bytes)
        memory = buffer.ring.slot(answer.slot)
        for offset, batch in enumerate(batches[: _NUM_COMPARED - first], first):
            # Equal batches have equal bytes: see ``Arena.allocate``.
            own[offset] = crc32(memory[batch.start : batch.start + batch.num_bytes].data, crc32(batch.structure))
        if len(own) < _NUM_COMPARED:
            return None
        begin = tuple(own[offset] for offset in range(_NUM_COMPARED))
        other = begun.shards.setdefault(begin, shard)
        begun.num_compared += 1
        begun.num_equal += other != shard and len(set(begin)) > 1  # a constant says nothing
        is_judged = begun.num_compared >= min(_NUM_JUDGED, plan.num_shards)
        is_equal = is_judged and other != shard and 2 * begun.num_equal >= begun.num_compared
        if is_equal or begun.num_compared == plan.num_shards:
            self._begun[buffer.loader] = None
        if not is_equal:
            return None
        text = (
            f"Shards {other} and {shard} of {total} of {buffer.name} (data_service.virtual_shards) begin with the same "
            f"{_NUM_COMPARED} batches, and {begun.num_equal} of {begun.num_compared} compared shards begin like an "
            "earlier one. The dataset asks for its part of the data, but yields the same in several shards: samples "
            "are used several times in an epoch. Split the data by id and num_workers of "
            "torch.utils.data.get_worker_info(), as for several workers of a DataLoader. Or set "
            "data_service.virtual_shards=1, if there is a single trainer rank: then one worker reads all."
        )
        if self._mode == "error":
            return DataSettingsError(f"{text} If shards are meant to be equal, set data_service.verify=warn.")
        logger.warning("%s", text)
        return None
