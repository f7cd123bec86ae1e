"""Forward passes through the stages of a replica, in which an error of one rank is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import preserve_random_state, stage_stream
from lightning_sm.training.strategies.pipeline.rows import num_microbatches
from lightning_sm.training.strategies.pipeline.stage import Stage, as_tuple


class StageShapes(NamedTuple):
    """What a stage gets and returns for a microbatch, as tensors without data (device "meta")."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def evaluate(stage: Stage, replica: Replica, inputs: Sequence[Any], most_microbatches: int) -> Any:
    """Run the network without gradients; a collective call of the replica.

    Args:
        stage: This rank's stage.
        replica: The ranks of this replica.
        inputs: The network's inputs: of the same shapes on all ranks, and used on the first.
        most_microbatches: Highest number of microbatches.

    Returns:
        The network's output on the last rank, None elsewhere.
    """
    rows = {len(value) for value in inputs if isinstance(value, Tensor) and value.ndim}
    # Inputs of different lengths cannot be split by rows.
    number = num_microbatches(rows.pop(), most_microbatches) if len(rows) == 1 and 0 not in rows else 1
    split = [value.chunk(number) if isinstance(value, Tensor) and value.ndim else [value] * number for value in inputs]
    with stage_stream(replica.position), torch.no_grad():
        outputs = _run(stage, replica, list(zip(*split, strict=True)))
    if not replica.is_last:
        return None
    joined = tuple(torch.cat(parts) if number > 1 else parts[0] for parts in zip(*outputs, strict=True))
    return joined[0] if len(joined) == 1 else joined


def try_out(stage: Stage, replica: Replica, inputs: tuple[Tensor, ...], loss: Callable[[Any], Any]) -> StageShapes:
    """Return the shapes of what this rank's stage exchanges for a microbatch; a collective call of the replica.

    torch would find them by a forward and backward pass with undefined values, in which an error on one rank leaves the
    others waiting. Here, values are real. The pass leaves no trace in buffers and random numbers.

    Args:
        stage: This rank's stage.
        replica: The ranks of this replica.
        inputs: The network's inputs for a microbatch; used on the first rank.
        loss: Called on the last rank with the network's output.
    """
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    shapes: list[StageShapes] = []

    def watched(*own: Any) -> Any:
        output = functional_call(stage, buffers, own)
        shapes.append(StageShapes(_without_data(own), _without_data(as_tuple(output))))
        if replica.is_last:
            loss(output)
        return output

    with preserve_random_state(), torch.enable_grad():
        _run(watched, replica, [inputs])
    return shapes[0]


def _run(
    stage: Callable[..., Any], replica: Replica, microbatches: Sequence[tuple[Any, ...]]
) -> list[tuple[Tensor, ...]]:
    """Return the outputs of microbatches on the last rank."""
    outputs: list[tuple[Tensor, ...]] = []
    error: Exception | None = None
    for microbatch in microbatches:
        # None after an error.
        inputs = microbatch if replica.position == 0 else replica.receive(replica.position - 1)
        made: tuple[Tensor, ...] | None = None
        if inputs is not None and error is None:
            try:
                made = as_tuple(stage(*inputs))
            except Exception as raised:  # noqa: BLE001  # raised on all ranks below
                error = raised
        if not replica.is_last:
            replica.send(made, replica.position + 1)
        elif made is not None:
            outputs.append(made)
    replica.raise_together(error)
    return outputs


def _without_data(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
        for value in values
        if isinstance(value, Tensor)
    )
