"""What a DataModule on a data host can ask of ``self.trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The values of the Trainer that DataModules use to build their loaders.
TRAINER_FACTS = ("current_epoch", "global_step", "max_epochs", "max_steps", "num_nodes", "num_devices", "world_size")


class TrainerFacts:
    """Stands in for the ``Trainer`` on a data host, where there is none.

    It has ``current_epoch``, ``global_step``, ``max_epochs``, ``max_steps``, ``num_nodes``, ``num_devices`` and
    ``world_size`` of the trainer that opened the loaders, and rank 0: a data host serves all ranks.

    Args:
        facts: The values.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.__dict__.update({name: facts.get(name) for name in TRAINER_FACTS})
        self.global_rank = 0
        self.local_rank = 0
        self.node_rank = 0
        self.is_global_zero = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer.{name} is not known on a data host. There are {', '.join(TRAINER_FACTS)} and rank 0. "
            "Give the DataModule what else it needs as an argument."
        )
