"""The stand-in for the Trainer on a data host, which also detects a DataModule that splits the data by rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed

from lightning_sm.data.protocol.spec import TRAINER_VALUES
from lightning_sm.errors import DataSettingsError

_RANKS = ("global_rank", "local_rank", "node_rank")
_SIZES = ("world_size", "num_devices", "num_nodes")


class RankReads:
    """The ranks and sizes of the Trainer that were read, and where: users split data by rank with both together."""

    def __init__(self) -> None:
        self._ranks: dict[str, str] = {}
        self._sizes: dict[tuple[str, Any], str] = {}

    def note(self, name: str, value: Any, where: str) -> None:
        """Note that an attribute was read.

        Args:
            name: The attribute.
            value: Its value; a world of one leaves nothing to split.
            where: File and line.
        """
        if name in _RANKS:
            self.note_rank(f"self.trainer.{name}={value}", where)
        elif name in _SIZES and value is not None and value > 1:
            self._sizes.setdefault((f"self.trainer.{name}", value), where)

    def note_rank(self, rank: str, where: str) -> None:
        """Note that a rank was read.

        Args:
            rank: What was read, with its value.
            where: File and line.
        """
        self._ranks.setdefault(rank, where)

    def check(self) -> None:
        """Check that the user leaves the split to the data service.

        Raises:
            DataSettingsError: Both a rank and a size were read.
        """
        if not self._ranks or not self._sizes:
            return
        rank, rank_where = next(iter(self._ranks.items()))
        (size, value), size_where = next(iter(self._sizes.items()))
        raise DataSettingsError(
            f"{rank} ({rank_where}) and {size}={value} ({size_where}) were both read, as if to split the data by rank. "
            "But a data host serves all ranks: its own rank is always 0, and the parts of the other ranks would be "
            "lost. Return loaders over all of the data: the data service splits it over the ranks, and a "
            "DistributedSampler may stay. For what only one rank should do, use self.trainer.is_global_zero. For the "
            f"batch size per rank, read {size} alone."
        )


class TrainerStandIn:
    """The stand-in for the ``Trainer``, which a data host does not have. There is one in a process: ``stand_in()``.

    It has ``current_epoch``, ``global_step``, ``max_epochs``, ``max_steps``, ``num_nodes``, ``num_devices`` and
    ``world_size`` of the Trainer that requested the loaders; 0 for ``global_rank``, ``local_rank`` and ``node_rank``,
    and True for ``is_global_zero``: a data host serves all ranks.

    Reading a rank and then a size is an error, except in the user's hooks, whose reads are checked when they end: a
    hook may pass both to a ``DistributedSampler``.

    In a worker, ``current_epoch`` is that of the batch, and reading ``global_step`` is an error: a batch is built ahead
    of its step.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._reads = RankReads()
        self._is_in_hook = False
        self._is_in_worker = False

    def __reduce__(self) -> Any:
        """Pickle it as the one of the other process."""
        return stand_in, ()

    def update(self, values: Mapping[str, Any]) -> None:
        """Take over the values of the Trainer that requests loaders."""
        self._values = {
            **{name: values.get(name) for name in TRAINER_VALUES},
            **dict.fromkeys(_RANKS, 0),
            "is_global_zero": True,
        }

    def values(self) -> dict[str, Any]:
        """Return all values, for ``update`` in a worker that is no fork."""
        return dict(self._values)

    def begin_batch(self, epoch: int) -> None:
        """Show the epoch of a batch that this worker builds."""
        self._is_in_worker = True
        self._values["current_epoch"] = epoch

    @contextmanager
    def noting_reads(self) -> Iterator[RankReads]:
        """Collect what is read, for a check at the end."""
        reads = self._reads = RankReads()
        self._is_in_hook = True
        try:
            with _noting_ranks_of_torch(reads):
                yield reads
        finally:
            self._reads = RankReads()
            self._is_in_hook = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":  # not set yet
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(
                f"self.trainer.{name} is not available on a data host, only {', '.join(self._values)}. Pass other "
                "values to the DataModule as arguments."
            )
        if name == "global_step" and self._is_in_worker:
            raise AttributeError(
                "self.trainer.global_step is not available while data hosts build batches: they build them ahead of "
                "the step. Use self.trainer.current_epoch, which is that of the batch."
            )
        value = self._values[name]
        self._reads.note(name, value, _place(sys._getframe(1)))
        if not self._is_in_hook:
            self._reads.check()
        return value


_STAND_IN = TrainerStandIn()


def stand_in() -> TrainerStandIn:
    """Return the stand-in of this process, which objects from rank 0 hold in place of their Trainer."""
    return _STAND_IN


@contextmanager
def _noting_ranks_of_torch(reads: RankReads) -> Iterator[None]:
    """Note calls of ``torch.distributed.get_rank()``, which returns 0: code may take the size from the Trainer."""
    if not torch.distributed.is_available():
        yield
        return
    get_rank = torch.distributed.get_rank

    def noted(*args: Any, **kwargs: Any) -> int:
        rank = get_rank(*args, **kwargs)
        reader = sys._getframe(1)
        # Torch's own DistributedSampler asks for rank and size there: data hosts know how to serve it.
        if not reader.f_globals.get("__name__", "").startswith("torch."):
            reads.note_rank(f"torch.distributed.get_rank()={rank}", _place(reader))
        return rank

    torch.distributed.get_rank = noted
    try:
        yield
    finally:
        torch.distributed.get_rank = get_rank


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
