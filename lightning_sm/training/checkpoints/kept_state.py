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
    tensors = [_KeptTensor(tensor) for tensor in (*model.parameters(), *model.buffers())]
    optimizers = [_KeptOptimizer(one) for one in trainer.optimizers if isinstance(one, torch.optim.Optimizer)]
    schedulers = [(one.scheduler, deepcopy(one.scheduler.state_dict())) for one in trainer.lr_scheduler_configs]
    yield
    for tensor in tensors:
        tensor.restore()
    for scheduler, state in schedulers:
        scheduler.load_state_dict(state)
    for optimizer in optimizers:
        optimizer.restore()


class _KeptTensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        # A DTensor holds the tensor of this rank.
        self._tensor: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        self._mark = self._marked()
        self._copy = None if torch.nn.parameter.is_lazy(tensor) else self._tensor.detach().to("cpu", copy=True)

    def _marked(self) -> tuple[int, int]:
        """Return what changes when something is written to the tensor."""
        if torch.nn.parameter.is_lazy(self._tensor):
            return 0, 0
        return 0 if self._tensor.is_inference() else self._tensor._version, self._tensor.data_ptr()

    def restore(self) -> None:
        if self._copy is not None and self._marked() != self._mark:
            with torch.no_grad():
                self._tensor.copy_(self._copy)


class _KeptOptimizer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in optimizer.param_groups
        ]
        self._state = {parameter: dict(state) for parameter, state in optimizer.state.items()}

    def restore(self) -> None:
        groups = self._optimizer.param_groups
        del groups[len(self._groups) :]
        for group, kept in zip(groups, self._groups, strict=True):
            group.update(kept)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
