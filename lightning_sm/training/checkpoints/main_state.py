"""Rank 0's checkpoint on other ranks, which have the same weights: only what differs is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from lightning_sm.errors import CheckpointError
from lightning_sm.training.checkpoints.host_copy import PickledCheckpoint, num_bytes, tensors_of

# Where buffers are larger in all, each rank keeps its own: each state would send as much over the network.
_MAX_SENT_BYTES = 64_000_000


@dataclass(frozen=True)
class _Shared:
    """The place of a tensor among those that all ranks have."""

    place: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _SentState:
    """A ``PickledCheckpoint``, without the tensors that all ranks have."""

    content: bytes
    tensors: list[_Shared | torch.Tensor]
    needs_gradients: list[bool]

    @classmethod
    def of(cls, checkpoint: PickledCheckpoint, shared: list[torch.Tensor]) -> _SentState:
        places = {(one.data_ptr(), one.shape): place for place, one in enumerate(shared) if one.numel()}
        tensors: list[_Shared | torch.Tensor] = []
        for one in checkpoint.tensors:
            place = places.get((one.data_ptr(), one.shape)) if one.layout is torch.strided else None
            tensors.append(one.detach().cpu() if place is None else _Shared(place, one.shape, one.dtype))
        return cls(checkpoint.content, tensors, list(checkpoint.needs_gradients))

    def with_own(self, shared: list[torch.Tensor]) -> PickledCheckpoint:
        tensors = []
        for one in self.tensors:
            if isinstance(one, _Shared):
                own = shared[one.place] if one.place < len(shared) else None
                if own is None or (own.shape, own.dtype) != (one.shape, one.dtype):
                    found = None if own is None else f"{own.dtype} of shape {list(own.shape)}"
                    raise CheckpointError(
                        f"weights and states of optimizers differ between ranks: rank 0 has {one.dtype} of shape "
                        f"{list(one.shape)} as number {one.place}, and this rank {found}"
                    )
                tensors.append(own.detach())
            else:
                tensors.append(one)
        return PickledCheckpoint(self.content, tensors, self.needs_gradients)


def main_checkpoint(trainer: Any, checkpoint: PickledCheckpoint | None) -> PickledCheckpoint | None:
    """Return rank 0's checkpoint with this rank's weights and states of optimizers; a collective call of all ranks.

    The ranks differ in buffers and in the states of callbacks. Those of rank 0 count, as in any checkpoint. Where they
    are larger than 64 MB in all, this rank's checkpoint is returned.

    Args:
        trainer: The Trainer, of a strategy whose ranks have the same weights.
        checkpoint: This rank's checkpoint; None if it needs none, or if it cannot be made.

    Returns:
        The checkpoint; None if this rank needs none, or if rank 0 has none.

    Raises:
        CheckpointError: A tensor of this rank is not like that of rank 0.
    """
    shared = list(_of_all_ranks(trainer))
    box: list[_SentState | bool] = [checkpoint is not None]
    if trainer.global_rank == 0 and checkpoint is not None:
        sent = _SentState.of(checkpoint, shared)
        if num_bytes(sent.tensors) <= _MAX_SENT_BYTES:
            box = [sent]
    distributed.broadcast_object_list(box, 0)
    (main,) = box
    if trainer.global_rank == 0 or checkpoint is None or main is True:
        return checkpoint
    return main.with_own(shared) if isinstance(main, _SentState) else None


def _of_all_ranks(trainer: Any) -> Iterator[torch.Tensor]:
    """Yield the weights, and the states of optimizers in an order that is the same on all ranks."""
    yield from trainer.lightning_module.parameters()
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                yield weight
                state = optimizer.state.get(weight, {})
                yield from tensors_of([state[name] for name in sorted(state)])
