"""The names by which ``Trainer(strategy=...)`` finds the strategies of lightning_sm.

Lightning has no entry points for strategies (its groups are for callbacks), and ``import lightning_sm`` loads neither
torch nor Lightning. So that import adds the names if Lightning is loaded already; otherwise, loading Lightning does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_sm.errors import MixedLightningError, StrategyError

# Where the two distributions of Lightning have their registries.
_REGISTRIES = ("pytorch_lightning.strategies", "lightning.pytorch.strategies")


def register_with_lightning() -> None:
    """Add our strategies to the registry of each Lightning that this process has imported, or imports later."""
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
    sys.meta_path.insert(0, _RegisteringFinder())


class _RegisteringFinder:
    """A finder that finds Lightning's strategies as the other finders do, and adds ours once that module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = partial(_execute, execute)  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    _register(module)


def _register(strategies: ModuleType) -> None:
    # Load a strategy only when a Trainer asks for it by name: most scripts use none of them.
    register = partial(strategies.StrategyRegistry.register, override=True)
    distribution = strategies.__name__.removesuffix(".strategies")
    pipeline = partial(_make, distribution, "pipeline.strategy", "PipelineParallelStrategy")
    register("pipeline", pipeline, description="Stages of the model on several ranks.")
    smddp = partial(_make, distribution, "smddp", "SMDDPStrategy")
    register("smddp", smddp, description="DDP by SageMaker's library SMDDP.")
    register("dp", _data_parallel, description="Gone since Lightning 2: use ddp.")


def _make(distribution: str, module: str, name: str) -> Any:
    chosen = importlib.import_module("lightning_sm._lightning").DISTRIBUTION
    if distribution != chosen:
        raise MixedLightningError(
            f"The Trainer is {distribution}'s, but lightning_sm was loaded with {chosen}, whose classes are different "
            f"objects. Import {distribution} before lightning_sm, and only one of the two in a script."
        )
    return getattr(importlib.import_module(f"lightning_sm.training.strategies.{module}"), name)()


def _data_parallel() -> Any:
    raise StrategyError(
        "strategy=dp (torch.nn.DataParallel: one process for all GPUs of a host) was removed in Lightning 2.0. Use "
        "strategy=ddp with the same devices: one process for each of them, also on several hosts. The batch size is "
        "then per process: divide the DataModule's by the number of devices to keep the global batch size."
    )
