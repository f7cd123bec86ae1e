"""The names by which ``--trainer.strategy=...`` finds the strategies of lightning_sm."""

from __future__ import annotations

from typing import NoReturn

from lightning_sm._lightning import StrategyRegistry
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.strategy import PipelineParallelStrategy
from lightning_sm.training.strategies.smddp import SMDDPStrategy


def register_strategies() -> None:
    """Add our strategies to Lightning's registry. Lightning has no entry points for strategies (since 2.5.6).

    Call it before a Trainer is made; to call it again changes nothing.
    """
    StrategyRegistry.register(
        "pipeline", PipelineParallelStrategy, description="Stages of the model on several ranks.", override=True
    )
    StrategyRegistry.register("smddp", SMDDPStrategy, description="DDP by SageMaker's library SMDDP.", override=True)
    StrategyRegistry.register("dp", _data_parallel, description="Gone since Lightning 2: use ddp.", override=True)


def _data_parallel() -> NoReturn:
    raise StrategyError(
        "strategy=dp (torch.nn.DataParallel: one process for all GPUs of a host) was removed in Lightning 2.0. Use "
        "strategy=ddp with the same devices: one process for each of them, also on several hosts. The batch size is "
        "then per process: divide the DataModule's by the number of devices to keep the global batch size."
    )
