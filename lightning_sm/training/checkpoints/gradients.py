"""Gradients that a fit has accumulated when it saves a checkpoint: Lightning does not save them."""

from __future__ import annotations

import logging
from typing import Any

import torch

from lightning_sm._lightning import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.strategies.pipeline.strategy import PipelineParallelStrategy

logger = logging.getLogger(__name__)


def accumulated_gradients(trainer: Any) -> dict[str, torch.Tensor | None]:
    """Return the gradients that the next steps may add to, by parameter; None for zeros.

    With automatic optimization, there are none after an optimizer step. With manual optimization, only the user's code
    knows whether it adds to them. Ranks that accumulate without exchanging gradients (``no_sync``) return the mean over
    the ranks, which is what their next exchange makes of them.

    A collective call, if the ranks have gradients and none of them has failed.
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
        _warn_once(trainer)
        return {}
    is_exchanging = trainer.world_size > 1 and not trainer.interrupted
    if is_exchanging:
        names_of_ranks = of_all_ranks(names)
        names = [name for name in parameters if any(name in one for one in names_of_ranks)]
    are_equal = not is_exchanging or _are_equal(trainer, [parameters[name] for name in names])
    saved: dict[str, torch.Tensor | None] = {}
    for name in names:  # one after the other, because the device may have no room for a copy of all
        gradient = _gradient_of(parameters[name])
        if not are_equal:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient)
            gradient.div_(trainer.world_size)
        saved[name] = gradient.to("cpu", copy=True) if gradient.count_nonzero() else None
    return saved


def restore_gradients(trainer: Any, gradients: dict[str, torch.Tensor | None]) -> None:
    """Set the gradients that ``accumulated_gradients`` returned in another run."""
    for name, parameter in trainer.lightning_module.named_parameters():
        if name in gradients:
            saved = gradients[name]
            parameter.grad = torch.zeros_like(parameter) if saved is None else saved.to(parameter.device, copy=True)


def _has_whole_gradients(strategy: Any) -> bool:
    is_ddp = isinstance(strategy, DDPStrategy) and not isinstance(
        strategy, (DeepSpeedStrategy, PipelineParallelStrategy)
    )
    return is_ddp or isinstance(strategy, SingleDeviceStrategy)


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _are_equal(trainer: Any, parameters: list[torch.nn.Parameter]) -> bool:
    """Return whether all ranks have the same gradients; a collective call."""
    num_different = torch.zeros(1, device=trainer.strategy.root_device)
    for parameter in parameters:
        gradient = _gradient_of(parameter)
        main = gradient.clone()
        torch.distributed.broadcast(main, 0)
        num_different += not torch.equal(main, gradient)
    torch.distributed.all_reduce(num_different)
    return num_different.item() == 0


_warned: set[str] = set()


def _warn_once(trainer: Any) -> None:
    kind = type(trainer.strategy).__name__
    if kind not in _warned and trainer.is_global_zero:
        _warned.add(kind)
        logger.warning(
            "The gradients so far are not saved with the checkpoint of step %d, because %s splits them over the ranks. "
            "If gradients accumulate over several batches, training that resumes from it lacks those of the last "
            "batches.",
            trainer.global_step,
            kind,
        )
