"""Parameters that several layers share, such as those of a language model's embedding and head, on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.placement import Placement


@dataclass(frozen=True)
class TiedNames:
    """The names of one parameter.

    Args:
        names: Its names in the LightningModule, in the module's order; torch lists the first of them only.
        layers: The indices of the layers that hold it.
    """

    names: tuple[str, ...]
    layers: frozenset[int]


def find_tied(module: nn.Module, layers: Sequence[nn.Module]) -> list[TiedNames]:
    """Return the parameters that several layers share.

    Args:
        module: The LightningModule, as yet uncut.
        layers: The layers of its network.
    """
    holders: dict[int, set[int]] = {}
    for i, layer in enumerate(layers):
        for parameter in layer.parameters():
            holders.setdefault(id(parameter), set()).add(i)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [TiedNames(tuple(names[parameter]), frozenset(held)) for parameter, held in holders.items() if len(held) > 1]


def retie(module: nn.Module, tied: Iterable[TiedNames]) -> None:
    """Make the names of each tied parameter that this rank has one parameter again, which materializing them undoes.

    Args:
        module: The LightningModule with this rank's layers.
        tied: The tied parameters.
    """
    there = dict(module.named_parameters(remove_duplicate=False))
    for one in tied:
        first, *others = [name for name in one.names if name in there] or [""]
        for name in others:
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, there[first])


@dataclass(frozen=True)
class _TiedCopy:
    """A tied parameter of this rank that other ranks have, too."""

    name: str
    parameter: nn.Parameter
    group: dist.ProcessGroup
    source: int


class TiedWeights:
    """The tied parameters whose layers are on several ranks: each of these has a copy, and all copies stay equal.

    They start equal and have the same gradient, the sum of all layers', and the same optimizer group. So each rank's
    optimizer makes the same step.

    Args:
        module: The LightningModule with this rank's layers.
        tied: All tied parameters, the same on all ranks.
        stage_of: The stage of each layer.
        placement: The grid of ranks.
        replica: The ranks of this replica.
    """

    def __init__(
        self,
        module: nn.Module,
        tied: Sequence[TiedNames],
        stage_of: Sequence[int],
        placement: Placement,
        replica: Replica,
    ) -> None:
        self._replica = replica
        self._copies: list[_TiedCopy] = []
        there = dict(module.named_parameters(remove_duplicate=False))
        for one in tied:
            positions = sorted({stage_of[layer] for layer in one.layers})
            if len(positions) == 1:
                continue
            for number in range(placement.data_size):
                ranks = [placement.ranks(number)[position] for position in positions]
                group: Any = dist.new_group(ranks)  # all ranks make all groups, in the same order
                if ranks[0] in replica.ranks and replica.position in positions:
                    own = next(name for name in one.names if name in there)
                    self._copies.append(_TiedCopy(one.names[0], there[own], group, ranks[0]))

    @property
    def duplicates(self) -> list[nn.Parameter]:
        """This rank's copies that do not count, because those of an earlier position do."""
        return [copy.parameter for copy in self._copies if not self._is_source(copy)]

    def synchronize(self) -> None:
        """Give all copies the values of the first."""
        for copy in self._copies:
            dist.broadcast(copy.parameter.detach(), copy.source, group=copy.group)

    def add_gradients(self) -> None:
        """Give all copies the sum of their gradients."""
        for copy in self._copies:
            if copy.parameter.grad is None:
                copy.parameter.grad = torch.zeros_like(copy.parameter)
            dist.all_reduce(copy.parameter.grad, group=copy.group)

    def regroup(self, optimizers: Sequence[Optimizer]) -> None:
        """Move each copy to the optimizer group of the first, as scripts may choose groups by name.

        A collective call of the replica.

        Args:
            optimizers: This rank's optimizers.
        """
        place = {
            id(parameter): (i, j)
            for i, optimizer in enumerate(optimizers)
            for j, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        stated = {copy.name: place.get(id(copy.parameter)) for copy in self._copies if self._is_source(copy)}
        all_stated: list[Mapping[str, tuple[int, int] | None]] = [{}] * len(self._replica.ranks)
        dist.all_gather_object(all_stated, stated, group=self._replica.group)
        wanted = {name: where for one in all_stated for name, where in one.items()}
        for copy in self._copies:
            now, then = place.get(id(copy.parameter)), wanted[copy.name]
            if now == then:
                continue
            if now is not None:
                group = optimizers[now[0]].param_groups[now[1]]
                group["params"] = [parameter for parameter in group["params"] if parameter is not copy.parameter]
            if then is not None:
                optimizers[then[0]].param_groups[then[1]]["params"].append(copy.parameter)

    def difference(self) -> str | None:
        """Return which copies are not equal, or None; a collective call of the replica."""
        for copy in self._copies:
            values = copy.parameter.detach().double()
            sums = torch.stack([values.sum(), values.square().sum()])
            lowest, highest = sums.clone(), sums
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=copy.group)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=copy.group)
            if not torch.equal(lowest.nan_to_num(), highest.nan_to_num()):
                return (
                    f"The copies of the tied parameter {copy.name} on {len(dist.get_process_group_ranks(copy.group))} "
                    "ranks are no longer equal: something other than the optimizer has changed one of them. Change "
                    "weights in the same way on all ranks, or use strategy=fsdp."
                )
        return None

    def _is_source(self, copy: _TiedCopy) -> bool:
        return copy.source == self._replica.ranks[self._replica.position]
