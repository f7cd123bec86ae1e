"""Gradients that a fit has accumulated when it saves a checkpoint: Lightning does not save them."""

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
    """Return the gradients that the next steps may add to, by parameter.

    With automatic optimization, there are none after an optimizer step. With manual optimization, only the user's code
    knows whether it adds to them. The mean over the ranks is what the next exchange makes of gradients that ranks
    accumulate without exchanging them (``no_sync``); others are equal.

    A collective call.
    """
    model = trainer.lightning_module
    progress = trainer.fit_loop.epoch_loop.batch_progress
    num_batches = progress.current.processed
    is_accumulating = num_batches % trainer.accumulate_grad_batches != 0 and not progress.is_last_batch
    if model.automatic_optimization and not is_accumulating:
        return {}
    parameters = dict(model.named_parameters())
    names = [name for name, one in parameters.items() if one.grad is not None]
    if names and not _has_whole_gradients(trainer.strategy):
        if trainer.is_global_zero:
            _warn_once(type(trainer.strategy).__name__)
        return {}
    names_of_ranks = of_all_ranks(names)
    names = [name for name in parameters if any(name in one for one in names_of_ranks)]
    saved: dict[str, torch.Tensor] = {}
    for name in names:  # one after the other, because the device may have no room for a copy of all
        own = parameters[name].grad
        gradient = torch.zeros_like(parameters[name]) if own is None else own.detach().clone()
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
    is_ddp = isinstance(strategy, DDPStrategy) and not isinstance(
        strategy, (DeepSpeedStrategy, PipelineParallelStrategy)
    )
    return is_ddp or isinstance(strategy, SingleDeviceStrategy)


@cache
def _warn_once(strategy: str) -> None:
    logger.warning(
        "Gradients are not saved with checkpoints, because %s splits them over the ranks. If they accumulate over "
        "several batches, training that resumes lacks those of the batches before.",
        strategy,
    )
