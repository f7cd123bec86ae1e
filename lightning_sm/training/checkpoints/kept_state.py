"""Preservation of the restored state while a resumed fit repeats hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch


@contextmanager
def keep_checkpointed_state(trainer: Any) -> Iterator[None]:
    """Undo the block's changes to weights, buffers, optimizers and learning rate schedulers.

    The weights are copied to main memory, which is large enough: loading the checkpoint has just needed more.
    """
    model = trainer.lightning_module
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _is_writable(tensor)]
    # For a DTensor, copy only the part that this rank holds.
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    optimizers = [(item, *_state_of(item)) for item in trainer.optimizers if isinstance(item, torch.optim.Optimizer)]
    schedulers = [(item.scheduler, deepcopy(item.scheduler.state_dict())) for item in trainer.lr_scheduler_configs]
    yield
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
    for scheduler, scheduler_state in schedulers:
        scheduler.load_state_dict(scheduler_state)
    for optimizer, groups, state in optimizers:
        del optimizer.param_groups[len(groups) :]
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update(kept)
        optimizer.state.clear()
        optimizer.state.update(state)


def _is_writable(tensor: torch.Tensor) -> bool:
    return not (torch.nn.parameter.is_lazy(tensor) or tensor.is_inference())


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return an optimizer's groups without their parameters, and its state, whose tensors are not copied."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return deepcopy(groups), {parameter: dict(state) for parameter, state in optimizer.state.items()}
