"""The exchange of values of any structure between the ranks of a replica: tensors as they are, all else pickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


@dataclass(frozen=True)
class _Gap:
    """The place of a tensor in the pickled rest of a value."""

    shape: torch.Size
    dtype: torch.dtype


class Replica:
    """The process group of a replica of the model.

    Args:
        group: The group.
        ranks: Its global ranks, by position in the pipeline.
        device: This rank's device.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], device: torch.device) -> None:
        self.group = group
        self.ranks = ranks
        self.position = ranks.index(dist.get_rank())
        self._device = device

    def broadcast(self, value: Any, position: int) -> Any:
        """Return the value of one position, on all ranks of the replica.

        Args:
            value: Anything; only that of the given position is used.
            position: The position in the pipeline.
        """
        source = self.ranks[position]
        tensors: list[Tensor] = []
        around = [self._without_tensors(value, tensors) if self.position == position else None]
        dist.broadcast_object_list(around, source, group=self.group, device=self._device)
        return self._with_tensors(around[0], tensors, lambda tensor: dist.broadcast(tensor, source, group=self.group))

    def send(self, value: Any, position: int) -> None:
        """Send a value to a position, which calls ``receive``."""
        target = self.ranks[position]
        tensors: list[Tensor] = []
        around = [self._without_tensors(value, tensors)]
        dist.send_object_list(around, target, group=self.group, device=self._device)
        for tensor in tensors:
            dist.send(tensor, target, group=self.group)

    def receive(self, position: int) -> Any:
        """Return the value that a position sends."""
        source = self.ranks[position]
        around: list[Any] = [None]
        dist.recv_object_list(around, source, group=self.group, device=self._device)
        return self._with_tensors(around[0], [], lambda tensor: dist.recv(tensor, source, group=self.group))

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all positions at position 0, one after the other in host memory, and None elsewhere."""
        if self.position != 0:
            self.send(value, 0)
            return None
        others = [self.receive(position) for position in range(1, len(self.ranks))]
        return [value, *apply_to_collection(others, Tensor, lambda tensor: tensor.cpu())]

    def _without_tensors(self, value: Any, tensors: list[Tensor]) -> Any:
        def take(tensor: Tensor) -> Any:
            # NCCL sends tensors of its device only; others travel in the pickled rest.
            if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
                return tensor.cpu()
            tensors.append(tensor.detach().contiguous())
            return _Gap(tensor.shape, tensor.dtype)

        return apply_to_collection(value, Tensor, take)

    def _with_tensors(self, around: Any, tensors: list[Tensor], transfer: Callable[[Tensor], Any]) -> Any:
        own = iter(tensors)

        def fill(gap: _Gap) -> Tensor:
            tensor = next(own, None)
            if tensor is None:
                tensor = torch.empty(gap.shape, dtype=gap.dtype, device=self._device)
            transfer(tensor)
            return tensor

        return apply_to_collection(around, _Gap, fill)
