"""Pipeline checkpoints: a single file, whose format is the same for one process and any number of stages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import CheckpointError, StrategyError
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.rows import tensors_of
from lightning_sm.training.strategies.pipeline.tied import TiedNames


class LogicalCheckpoint:
    """The checkpoint of the whole module, joined from the stages' parts by parameter name, and split again on loading.

    Args:
        module: The LightningModule before it is cut.
        replica: The ranks of this replica.
        tied: The module's tied parameters; each is stored once, under all of its names.
    """

    def __init__(self, module: LightningModule, replica: Replica, tied: Sequence[TiedNames]) -> None:
        self._module = module
        self._replica = replica
        self._is_written = 0 in replica.ranks  # rank 0 writes checkpoints, so other replicas gather nothing
        self._entries = list(module.state_dict())
        self._order = {name: i for i, (name, _) in enumerate(module.named_parameters())}
        self._first_name = {name: names[0] for names, _ in tied for name in names}

    def weights(self) -> dict[str, Any]:
        """Return the whole module's state dict on the rank that writes checkpoints, and this stage's on other ranks.

        A collective call within the replica.
        """
        own = self._module.state_dict()
        sent = {name: value for name, value in own.items() if name == self._first_name.get(name, name)}
        parts = self._replica.gather(sent) if self._is_written else None
        if parts is None:
            return dict(own)
        merged = {name: value for part in reversed(parts) for name, value in part.items()}
        merged.update({name: merged[first] for name, first in self._first_name.items() if first in merged})
        added = [name for name in merged if name not in self._entries]  # such as the state of a callback's module
        return {name: merged[name] for name in (*self._entries, *added) if name in merged}

    def check_callbacks(self, callbacks: Mapping[str, Any]) -> None:
        """Refuse callbacks whose tensors differ between stages: a checkpoint contains only those of rank 0.

        A collective call within the replica.

        Args:
            callbacks: The states of this rank's callbacks, by name.

        Raises:
            StrategyError: On all ranks of the replica, if a tensor differs.
        """
        own = {name: list(map(_digest, tensors_of(state))) for name, state in callbacks.items()}
        first = self._replica.broadcast(own, 0)
        with self._replica.together():
            differing = [name for name, digests in own.items() if digests != first.get(name, [])]
            if differing:
                raise StrategyError(
                    f"The state of {', '.join(differing)} has other tensors on this rank than on the rank of the first "
                    "stage, and a checkpoint would hold only the latter. A callback that keeps copies of parameters, "
                    "such as their averages, needs strategy=ddp or fsdp."
                )

    def load_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Load the weights of this rank's stage from a state dict.

        Args:
            weights: The state dict of the whole module.
            strict: Whether the state dict must have exactly the module's names.

        Raises:
            CheckpointError: ``strict`` is set, and the names differ.
        """
        missing = [name for name in self._entries if name not in weights]
        unknown = [name for name in weights if name not in self._entries]
        if strict and (missing or unknown):
            raise CheckpointError(
                f"The checkpoint does not fit {type(self._module).__name__}. Missing: {', '.join(missing)}. Unknown: "
                f"{', '.join(unknown)}. Load this model's checkpoint, or set its strict_loading=False."
            )
        own = {name: weights[name] for name in self._module.state_dict() if name in weights}
        self._module.load_state_dict(own, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all parameters on the rank that writes checkpoints, and of this stage's on other ranks.

        A collective call within the replica. Parameters are numbered group by group, as in torch, and in the module's
        order within a group.

        Args:
            optimizer: This rank's optimizer.
        """
        state = optimizer.state_dict()
        groups = self._names_by_group(optimizer)
        names = _flat(groups)  # torch numbers parameters in this order
        named = {names[i]: entry for i, entry in state["state"].items()}
        parts = self._replica.gather((named, groups)) if self._is_written else None
        if parts is None:
            return state
        members = self._joined([groups for _, groups in parts])
        numbers = {name: i for i, name in enumerate(_flat(members))}
        state["state"] = {numbers[name]: entry for entries, _ in parts for name, entry in entries.items()}
        for group, names in zip(state["param_groups"], members, strict=True):
            group["params"] = [numbers[name] for name in names]
        return state

    def load_optimizer_state(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """Load the optimizer state of this rank's stage from the state for all parameters.

        A collective call within the replica.

        Args:
            optimizer: This rank's optimizer.
            whole: The result of ``optimizer_state``, or the state of a single process.

        Raises:
            CheckpointError: The state's parameter groups do not match the optimizer's.
        """
        groups = self._names_by_group(optimizer)
        members = self._joined(self._replica.broadcast(self._replica.gather(groups), 0))
        sizes = [len(group["params"]) for group in whole["param_groups"]]
        if sizes != [len(group) for group in members]:
            raise CheckpointError(
                f"The checkpoint's optimizer has groups of {sizes} parameters, but configure_optimizers returns groups "
                f"of {[len(group) for group in members]} over all stages. Resume with the same model and optimizer."
            )
        # A single process numbers a group's parameters in the order in which the script passes them to the optimizer.
        # That is the module's order, unless the script sorts them.
        numbered = (number for group in whole["param_groups"] for number in group["params"])
        numbers = dict(zip(_flat(members), numbered, strict=True))
        own = {numbers[name] for name in _flat(groups)}
        optimizer.load_state_dict(
            {
                "state": {number: entry for number, entry in whole["state"].items() if number in own},
                "param_groups": [
                    {**group, "params": [numbers[name] for name in names]}
                    for group, names in zip(whole["param_groups"], groups, strict=True)
                ],
            }
        )

    def _names_by_group(self, optimizer: Optimizer) -> list[list[str]]:
        names = {id(parameter): self._first_name.get(name, name) for name, parameter in self._module.named_parameters()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def _joined(self, parts: Sequence[list[list[str]]]) -> list[list[str]]:
        """Return the parameter names of all stages in each group of the optimizer."""
        return [sorted(_flat(part[i] for part in parts), key=self._order.__getitem__) for i in range(len(parts[0]))]


def _flat(groups: Iterable[Iterable[str]]) -> list[str]:
    return [name for group in groups for name in group]


def _digest(tensor: Tensor) -> tuple[torch.Size, bytes]:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return tensor.shape, hashlib.blake2b(content).digest()
