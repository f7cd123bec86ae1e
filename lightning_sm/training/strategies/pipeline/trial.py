"""A trial of the stages with one microbatch: the shapes of what they exchange, and errors that every rank learns of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import preserve_random_state
from lightning_sm.training.strategies.pipeline.stage import Stage, as_tuple


@dataclass(frozen=True)
class StageShapes:
    """What a stage gets and returns for a microbatch.

    Args:
        inputs: Its inputs, as tensors without data (device "meta").
        outputs: Its outputs, likewise.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def try_out(
    stage: Stage,
    replica: Replica,
    loss: Callable[[Any], None],
    inputs: tuple[Tensor, ...],
    error: Exception | None,
) -> StageShapes:
    """Pass a microbatch through the stages, when shapes are used for the first time; a collective call of the replica.

    torch would infer shapes by a forward and backward pass with undefined values, in which an error on one rank leaves
    the others waiting. Here, values are real, and an error passes through the later stages. The pass leaves no trace in
    buffers and random numbers.

    Args:
        stage: This rank's stage.
        replica: The ranks of this replica.
        loss: Called on the rank of the last stage with its output.
        inputs: The network's inputs for a microbatch on the first rank, else nothing.
        error: An error in getting them: then nothing runs.

    Raises:
        Exception: A stage or the loss fails; on all ranks of the replica.
    """
    # Values and whether they need gradients; None after an error.
    values: list[tuple[Tensor, bool]] | None = None
    if replica.position > 0:
        values = replica.receive(replica.position - 1)
    elif error is None:
        values = [(value, value.requires_grad) for value in inputs]
    shapes = StageShapes((), ())
    if values is not None:
        leaves = tuple(value.detach().requires_grad_(is_trained) for value, is_trained in values)
        values = None
        try:
            with preserve_random_state(), _preserved_buffers(stage), torch.enable_grad():
                output = stage(*leaves)
                if replica.is_last:
                    loss(output)
            values = [(value.detach(), value.requires_grad) for value in as_tuple(output)]
            shapes = StageShapes(_without_data(leaves), _without_data(as_tuple(output)))
        except Exception as raised:  # noqa: BLE001  # raised on all ranks below
            error = raised
    if not replica.is_last:
        replica.send(values, replica.position + 1)
    replica.raise_together(error)
    return shapes


@contextmanager
def _preserved_buffers(module: nn.Module) -> Iterator[None]:
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)


def _without_data(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
        for value in values
    )
