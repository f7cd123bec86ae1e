"""A watch for hooks that compute the norm of gradients, of which each rank of a pipeline has only a part."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_sm._lightning import LightningModule, rank_zero_only

logger = logging.getLogger(__name__)

_warn = rank_zero_only(logger.warning)
_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
# What torch.nn.utils.clip_grad_norm_, Lightning's grad_norm and scripts call.
_NORMS = frozenset({torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm})


class NormWatch:
    """Warns once if a hook of the LightningModule computes a norm of gradients by torch's functions.

    Such a norm is that of this rank's stages: clipping by it scales the stages differently, and a log shows the first
    rank's.
    """

    def __init__(self) -> None:
        self._is_paused = False
        self._is_told = False

    def wrap_hooks(self, module: LightningModule) -> None:
        """Watch the hooks in which gradients are complete, where the module has its own.

        Args:
            module: The LightningModule.
        """
        for name in _HOOKS:
            if getattr(type(module), name) is not getattr(LightningModule, name):
                setattr(module, name, self._watched(getattr(module, name), name, module))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not warn of norms that are computed in the meantime."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _watched(self, hook: Callable[..., Any], name: str, module: LightningModule) -> Callable[..., Any]:
        @functools.wraps(hook)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            if self._is_told:
                return hook(*arguments, **keywords)
            gradients = {p.grad.data_ptr() for p in module.parameters() if p.grad is not None}
            with _Mode(lambda tensors: self._see(name, module, gradients, tensors)):
                return hook(*arguments, **keywords)

        return watched

    def _see(self, name: str, module: LightningModule, gradients: set[int], tensors: list[Tensor]) -> None:
        if self._is_paused or self._is_told or not any(tensor.data_ptr() in gradients for tensor in tensors):
            return
        self._is_told = True
        _warn(
            "%s.%s computes a norm of gradients, of which this rank has only those of its stages. In a pipeline, "
            "lightning_sm.gradient_norm(self) returns the norm over all stages, and gradient_clip_val of the Trainer, "
            "or self.clip_gradients, clips by it; torch.nn.utils.clip_grad_norm_ scales each stage differently.",
            type(module).__name__,
            name,
        )


class _Mode(TorchFunctionMode):
    """Calls back with the tensors of each norm."""

    def __init__(self, see: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NORMS:
            self._see([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))
