"""What a dataset on a data host sees of the Trainer: plain values, as they were when the iterator began."""

from __future__ import annotations

from typing import Any

_VALUES = (
    *("current_epoch", "global_step", "max_epochs", "max_steps", "num_nodes", "num_devices", "world_size"),
    *("global_rank", "local_rank", "node_rank", "is_global_zero"),
)


class TrainerView:
    """Stands in for the ``Trainer`` of an iterator, from which its dataset can be reached.

    Args:
        values: Values of the Trainer, by name.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @classmethod
    def of(cls, trainer: Any) -> TrainerView:
        """Return the view of a Trainer as it is now.

        Args:
            trainer: The Trainer.
        """
        return cls({name: getattr(trainer, name) for name in _VALUES})

    def __getattr__(self, name: str) -> Any:
        """Return a value, or explain that there is none."""
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError as error:
            raise AttributeError(
                f"self.trainer.{name} is not available on a data host, only {', '.join(self._values)}. Pass other "
                "values to the dataset as arguments."
            ) from error
