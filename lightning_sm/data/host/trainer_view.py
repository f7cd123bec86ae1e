"""The Trainer that user code on a data host sees: plain values from the start of an iterator or hook."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_sm.data.host.rank_reads import RanksRead

_VALUES = ("current_epoch", "global_step", "max_epochs", "max_steps", "num_nodes", "num_devices", "world_size")
_RANKS = ("global_rank", "local_rank", "node_rank", "is_global_zero")


class TrainerView:
    """A stand-in for the ``Trainer`` that a dataset or a DataModule on a data host refers to.

    It does not store a rank, but shows the one for which this process currently works (see ``RankWorld``). Views are
    therefore equal on all ranks.

    Args:
        values: Values of the Trainer, by name.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._reads: RanksRead | None = None

    @classmethod
    def of(cls, trainer: Any) -> TrainerView:
        """Return a view of the current values of a Trainer.

        Args:
            trainer: The Trainer.
        """
        return cls({name: getattr(trainer, name) for name in _VALUES})

    def update(self, other: TrainerView) -> None:
        """Replace the values with those of another view."""
        self._values = other._values

    @contextmanager
    def noting_reads(self) -> Iterator[RanksRead]:
        """Record which ranks and world sizes are read from this view and from torch."""
        self._reads = RanksRead()
        try:
            with self._reads.noting_torch():
                yield self._reads
        finally:
            self._reads = None

    def __getattr__(self, name: str) -> Any:
        """Return a value, or raise an error that lists the available ones."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _RANKS:
            rank, per_node = int(os.environ["RANK"]), max(1, self._values["num_devices"])
            value = dict(zip(_RANKS, (rank, rank % per_node, rank // per_node, rank == 0), strict=True))[name]
        elif name in self._values:
            value = self._values[name]
        else:
            raise AttributeError(
                f"self.trainer.{name} is not available on a data host, only {', '.join([*self._values, *_RANKS])}. "
                "Pass other values to the dataset as arguments."
            )
        if self._reads is not None:
            self._reads.note(name, value, sys._getframe(1))
        return value
