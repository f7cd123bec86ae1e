"""What user code on a data host sees of the Trainer: plain values, as they were when an iterator or a hook began."""

from __future__ import annotations

import os
from typing import Any

_VALUES = ("current_epoch", "global_step", "max_epochs", "max_steps", "num_nodes", "num_devices", "world_size")
_RANKS = ("global_rank", "local_rank", "node_rank", "is_global_zero")


class TrainerView:
    """Stands in for the ``Trainer`` from which a dataset or a DataModule on a data host can be reached.

    Its rank is the one for which this process works just now, see ``RankWorld``: views are equal on all ranks.

    Args:
        values: Values of the Trainer, by name.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._reads: set[str] = set()

    @classmethod
    def of(cls, trainer: Any) -> TrainerView:
        """Return the view of a Trainer as it is now.

        Args:
            trainer: The Trainer.
        """
        return cls({name: getattr(trainer, name) for name in _VALUES})

    def update(self, other: TrainerView) -> None:
        """Show the values of another view."""
        self._values = other._values
        self._reads = set()

    def splits_by_rank(self) -> bool:
        """Return whether code has read both its rank and how many ranks there are, as if to split the data."""
        return "global_rank" in self._reads and "world_size" in self._reads and self._values["world_size"] > 1

    def __getattr__(self, name: str) -> Any:
        """Return a value, or explain that there is none."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._reads.add(name)
        if name in _RANKS:
            rank, per_node = int(os.environ["RANK"]), max(1, self._values["num_devices"])
            return dict(zip(_RANKS, (rank, rank % per_node, rank // per_node, rank == 0), strict=True))[name]
        if name in self._values:
            return self._values[name]
        raise AttributeError(
            f"self.trainer.{name} is not available on a data host, only {', '.join([*self._values, *_RANKS])}. "
            "Pass other values to the dataset as arguments."
        )
