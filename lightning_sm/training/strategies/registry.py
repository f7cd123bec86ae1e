"""Registration of lightning_sm's strategies under the names that ``Trainer(strategy=...)`` accepts.

Lightning has entry points for callbacks, but not for strategies, and ``import lightning_sm`` loads neither torch nor
Lightning. If Lightning is already loaded, that import registers the names. Otherwise, an import hook registers them
when Lightning is loaded.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType
from typing import Any

from lightning_sm._import_hook import after_import
from lightning_sm.errors import MixedLightningError

# The modules that hold the strategy registry, one in each distribution of Lightning.
_REGISTRIES = ("pytorch_lightning.strategies", "lightning.pytorch.strategies")


def register_with_lightning() -> None:
    """Register our strategies with each Lightning distribution that this process has imported or imports later."""
    after_import(_REGISTRIES, _register)


def _register(strategies: ModuleType) -> None:
    # Load a strategy only when a Trainer asks for it by name, because most scripts use none of ours.
    register = partial(strategies.StrategyRegistry.register, override=True)
    distribution = strategies.__name__.removesuffix(".strategies")
    pipeline = partial(_pipeline, distribution)
    register("pipeline", pipeline, description="Pipeline parallelism: stages of the model on several ranks.")
    smddp = partial(_make, distribution, "smddp", "SMDDPStrategy")
    register("smddp", smddp, description="DDP over SageMaker's SMDDP library.")


def _pipeline(distribution: str) -> Any:
    choice = importlib.import_module("lightning_sm.training.strategies.choice")
    return _make(distribution, "pipeline.strategy", "PipelineParallelStrategy", **choice.pipeline_options())


def _make(distribution: str, module: str, name: str, **arguments: Any) -> Any:
    chosen = importlib.import_module("lightning_sm._lightning").DISTRIBUTION
    if distribution != chosen:
        raise MixedLightningError(
            f"The Trainer is from {distribution}, but lightning_sm was loaded with {chosen}, whose classes are "
            f"different objects. Import {distribution} before lightning_sm, and import only one of the two in a script."
        )
    return getattr(importlib.import_module(f"lightning_sm.training.strategies.{module}"), name)(**arguments)
