"""Parameters shared by layers on several ranks, such as a language model's embedding and head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lightning_sm.training.strategies.pipeline.exchange import Replica


class TiedNames(NamedTuple):
    """The names of one parameter, and the stages that hold it.

    Attributes:
        names: Its names in the LightningModule, in the module's order; torch lists only the first.
        stages: The stages that hold the parameter, in order.
    """

    names: list[str]
    stages: list[int]


def find_tied(module: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> list[TiedNames]:
    """Return the parameters that have several names.

    Args:
        module: The LightningModule before it is cut.
        stages: The layers of each stage.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    holders: dict[int, list[int]] = {}
    for stage, layers in enumerate(stages):
        for parameter in nn.ModuleList(layers).parameters():
            holders.setdefault(id(parameter), []).append(stage)
    return [TiedNames(names[key], held) for key, held in holders.items() if len(names[key]) > 1]


class TiedWeights:
    """The parameters that several layers share, within this rank or across ranks.

    The constructor ties this rank's layers again, because ``materialize`` gives each layer new tensors. If several
    ranks hold a parameter, the first owns it: the owner gets the sum of the gradients, and only the owner's optimizer
    has the parameter. The other ranks have a copy, which is updated after each step.

    Args:
        module: The LightningModule with this rank's layers.
        tied: All tied parameters, the same on all ranks.
        replica: The ranks of this replica.
    """

    def __init__(self, module: nn.Module, tied: Sequence[TiedNames], replica: Replica) -> None:
        self._replica = replica
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self._shared: list[tuple[nn.Parameter, list[int]]] = []
        for names, stages in tied:
            names_here = [name for name in names if name in parameters]
            for name in names_here[1:]:
                parent, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(parent), attribute, parameters[names_here[0]])
            if len(stages) > 1 and replica.position in stages:
                self._shared.append((parameters[names_here[0]], stages))
        copies = [parameter for parameter, (owner, *_) in self._shared if owner != replica.position]
        self._copies = set(map(id, copies))

    def without_copies(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that this rank owns."""
        return [parameter for parameter in parameters if id(parameter) not in self._copies]

    def collect_gradients(self) -> None:
        """Sum the gradients of shared parameters on their owners; a collective call within the replica."""
        for parameter, (owner, *others) in self._shared:
            if owner != self._replica.position:
                self._replica.send(parameter.grad, owner)
                parameter.grad = None
                continue
            for other in others:
                gradient = self._replica.receive(other)
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def update_copies(self) -> None:
        """Copy the values of shared parameters from their owners; a collective call within the replica."""
        for parameter, (owner, *others) in self._shared:
            if owner != self._replica.position:
                with torch.no_grad():
                    parameter.copy_(self._replica.receive(owner))
                continue
            for other in others:
                self._replica.send(parameter.detach(), other)
