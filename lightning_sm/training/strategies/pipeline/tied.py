"""Parameters that several layers share, such as those of a language model's embedding and head, on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lightning_sm.training.strategies.pipeline.exchange import Replica


class TiedNames(NamedTuple):
    """The names of one parameter.

    Attributes:
        names: Its names in the LightningModule, in the module's order; torch lists the first of them only.
        stages: The stages that hold it, in order.
    """

    names: list[str]
    stages: list[int]


def find_tied(module: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> list[TiedNames]:
    """Return the parameters that have several names.

    Args:
        module: The LightningModule, as yet uncut.
        stages: The layers of each stage.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    holders: dict[int, list[int]] = {}
    for stage, layers in enumerate(stages):
        for parameter in nn.ModuleList(layers).parameters():
            holders.setdefault(id(parameter), []).append(stage)
    return [TiedNames(names[one], held) for one, held in holders.items() if len(names[one]) > 1]


class TiedWeights:
    """The parameters that layers share, on this rank and on several.

    The layers of this rank share them again, which making layers of the meta device has undone. Of several ranks, the
    first owns the parameter: it gets the sum of the gradients, and its optimizer alone has it. The others have a copy,
    which gets the new values after each step.

    Args:
        module: The LightningModule with this rank's layers.
        tied: All tied parameters, the same on all ranks.
        replica: The ranks of this replica.
    """

    def __init__(self, module: nn.Module, tied: Sequence[TiedNames], replica: Replica) -> None:
        self._replica = replica
        there = dict(module.named_parameters(remove_duplicate=False))
        self._shared: list[tuple[nn.Parameter, list[int]]] = []
        for one in tied:
            found = [name for name in one.names if name in there]
            for name in found[1:]:
                parent, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(parent), attribute, there[found[0]])
            if len(one.stages) > 1 and replica.position in one.stages:
                self._shared.append((there[found[0]], one.stages))
        copies = [parameter for parameter, (owner, *_) in self._shared if owner != replica.position]
        self._copies = set(map(id, copies))

    def without_copies(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters of which this rank is the owner."""
        return [parameter for parameter in parameters if id(parameter) not in self._copies]

    def collect_gradients(self) -> None:
        """Give the owners the sums of all gradients; a collective call of the replica."""
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
        """Give all copies the values of the owners; a collective call of the replica."""
        for parameter, (owner, *others) in self._shared:
            if owner != self._replica.position:
                with torch.no_grad():
                    parameter.copy_(self._replica.receive(owner))
                continue
            for other in others:
                self._replica.send(parameter.detach(), other)
