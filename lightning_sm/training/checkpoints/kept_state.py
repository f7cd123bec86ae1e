"""The state that a checkpoint restores, kept while user code runs that an undisturbed fit would not run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch


@contextmanager
def keep_checkpointed_state(trainer: Any) -> Iterator[None]:
    """Undo the changes to weights, buffers, optimizers and learning rate schedulers at the end of the block.

    The copy of the weights is on the CPU, where loading the checkpoint has just needed more memory.
    """
    model = trainer.lightning_module
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _is_writable(tensor)]
    # A DTensor holds the tensor of this rank.
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    optimizers = [(one, *_state_of(one)) for one in trainer.optimizers if isinstance(one, torch.optim.Optimizer)]
    schedulers = [(one.scheduler, deepcopy(one.scheduler.state_dict())) for one in trainer.lr_scheduler_configs]
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
    """Return an optimizer's groups, without parameters, and its state. Tensors are not copied."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return deepcopy(groups), {parameter: dict(state) for parameter, state in optimizer.state.items()}
