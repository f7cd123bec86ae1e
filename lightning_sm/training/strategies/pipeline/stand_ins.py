"""Modules in place of others for the time of a forward pass, which the model's own code does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class StandIn(nn.Module):
    """A module that does something else, with the attributes of the one in whose place it is.

    Args:
        original: That module.
        call: Called in place of its ``forward``.
    """

    def __init__(self, original: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_original"] = original  # no child: its parameters are not the stand-in's
        self._call = call

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run what the stand-in does.

        Args:
            arguments: Those of the original.
            keywords: Those of the original.
        """
        return self._call(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original."""
        return getattr(self.__dict__["_original"], name)


@contextmanager
def in_place(replacements: Sequence[tuple[nn.Module, str, nn.Module]]) -> Iterator[None]:
    """Put modules in place of others.

    Args:
        replacements: The parent, the name of its child, and what replaces it.
    """
    before = [(parent, name, parent._modules[name]) for parent, name, _ in replacements]
    for parent, name, replacement in replacements:
        parent._modules[name] = replacement
    try:
        yield
    finally:
        for parent, name, original in before:
            parent._modules[name] = original


def strip(modules: Sequence[nn.Module], keep: nn.Module) -> None:
    """Replace parameters and buffers of modules by tensors without data, and leave the tensors themselves alone.

    Args:
        modules: The modules.
        keep: A module whose parts stay as they are.
    """
    kept = {id(part) for part in keep.modules()}
    for part in (part for module in modules for part in module.modules() if id(part) not in kept):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device="meta")
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device="meta")
