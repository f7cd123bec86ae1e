"""Saving and restoring accumulated gradients, which Lightning's checkpoints lack."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from lightning_sm._lightning import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.strategies.pipeline.strategy import PipelineParallelStrategy

logger = logging.getLogger(__name__)


def accumulated_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the gradients that the next steps may add to, by parameter name. A collective call.

    With automatic optimization, there are none after an optimizer step. With manual optimization, the user's code may
    always add to them. The result is the mean over the ranks: if ranks accumulate gradients without exchanging them
    (``no_sync``), their next exchange averages them anyway; otherwise, their gradients are equal.
    """
    model = trainer.lightning_module
    progress = trainer.fit_loop.epoch_loop.batch_progress
    num_batches = progress.current.processed
    is_accumulating = num_batches % trainer.accumulate_grad_batches != 0 and not progress.is_last_batch
    if model.automatic_optimization and not is_accumulating:
        return {}
    parameters = dict(model.named_parameters())
    names = [name for name, parameter in parameters.items() if parameter.grad is not None]
    if names and not _has_whole_gradients(trainer.strategy):
        if trainer.is_global_zero:
            _warn_once(type(trainer.strategy).__name__)
        return {}
    names_of_ranks = of_all_ranks(names)
    names = [name for name in parameters if any(name in names_of_rank for names_of_rank in names_of_ranks)]
    saved: dict[str, torch.Tensor] = {}
    for name in names:  # one at a time: the device may not have enough memory to copy them all
        grad = parameters[name].grad
        gradient = torch.zeros_like(parameters[name]) if grad is None else grad.detach().clone()
        if trainer.world_size > 1:
            torch.distributed.all_reduce(gradient)
            gradient.div_(trainer.world_size)
        saved[name] = gradient.cpu()
    return saved


def restore_gradients(trainer: Any, gradients: dict[str, torch.Tensor]) -> None:
    """Set the gradients that ``accumulated_gradients`` returned in another run."""
    for name, parameter in trainer.lightning_module.named_parameters():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device, copy=True)


def _has_whole_gradients(strategy: Any) -> bool:
    is_split = isinstance(strategy, (DeepSpeedStrategy, PipelineParallelStrategy))
    return isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)) and not is_split


@cache
def _warn_once(strategy: str) -> None:
    logger.warning(
        "Gradients are not saved in checkpoints, because %s splits them across ranks. If gradients accumulate over "
        "several batches, a resumed run lacks the gradients of earlier batches.",
        strategy,
    )
