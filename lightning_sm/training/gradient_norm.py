"""The norm of a model's gradients under any strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sm._lightning import DeepSpeedStrategy, FSDPStrategy, LightningModule
from lightning_sm.errors import StrategyError


def gradient_norm(module: LightningModule, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients of a model, for hooks such as ``on_before_optimizer_step``.

    In a pipeline, it is the norm over all stages, and all ranks must call this function. With DDP or a single process,
    it is the norm of the module's gradients.

    Args:
        module: The LightningModule, attached to a Trainer.
        norm_type: The p of the p-norm; may be infinite.

    Returns:
        A scalar on the module's device.

    Raises:
        StrategyError: The strategy is FSDP or DeepSpeed, which shard gradients.
    """
    strategy: Any = module.trainer.strategy
    if hasattr(strategy, "gradient_norm"):
        norm: Tensor = strategy.gradient_norm(norm_type=norm_type)
        return norm
    if isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy)):
        raise StrategyError(
            f"{type(strategy).__name__} shards gradients, so gradient_norm would see only this rank's part. With FSDP, "
            "use the return value of self.trainer.model.clip_grad_norm_(...); with DeepSpeed, use "
            "get_global_grad_norm() of its engine."
        )
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(module.device)
