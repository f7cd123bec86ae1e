"""Forward passes through the stages of a replica; if one rank fails, all ranks raise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import preserve_random_state, stage_stream
from lightning_sm.training.strategies.pipeline.rows import num_microbatches
from lightning_sm.training.strategies.pipeline.stage import Stage, as_output, as_tuple

# Largest difference between outputs that counts as rounding, relative to the largest output. It exceeds one
# kernel's rounding errors, because different numbers of rows may select different kernels.
_TOLERANCE = 1e-2
_TOLERANCE_EPS = 16


class StageShapes(NamedTuple):
    """The inputs and outputs of a stage for a microbatch, as tensors without data (device "meta").

    Attributes:
        inputs: The inputs.
        outputs: The outputs.
        changing: Class names of the stage's modules that change their buffers.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    changing: tuple[str, ...] = ()


def evaluate(stage: Stage, replica: Replica, inputs: Sequence[Any], most_microbatches: int) -> Any:
    """Run the network without gradients; a collective call within the replica.

    Args:
        stage: This rank's stage.
        replica: The ranks of this replica.
        inputs: The network's inputs. Shapes must match on all ranks; only the first rank uses the values.
        most_microbatches: Maximum number of microbatches.

    Returns:
        The network's output on the last rank, None on the others.
    """
    rows = {len(value) for value in inputs if isinstance(value, Tensor) and value.ndim}
    # Inputs of different lengths cannot be split by rows, so run them as one microbatch.
    number = num_microbatches(rows.pop(), most_microbatches) if len(rows) == 1 and 0 not in rows else 1
    split = [value.chunk(number) if isinstance(value, Tensor) and value.ndim else [value] * number for value in inputs]
    with stage_stream(replica.position), torch.no_grad():
        outputs = _run(stage, replica, list(zip(*split, strict=True)))
    if not replica.is_last:
        return None
    return as_output([torch.cat(parts) if number > 1 else parts[0] for parts in zip(*outputs, strict=True)])


def refuse_mixed_rows(stage: Stage, replica: Replica, inputs: Sequence[Tensor]) -> None:
    """Refuse a network whose output for a row depends on other rows; a collective call within the replica.

    Layers run in eval mode, in which dropout is off and BatchNorm does not mix rows; a separate warning covers
    BatchNorm.

    Args:
        stage: This rank's stage.
        replica: The ranks of this replica.
        inputs: The network's inputs for two microbatches. Shapes must match on all ranks; only the first rank uses the
            values.

    Raises:
        StrategyError: The outputs of the two microbatches differ from the output for the same rows as one batch.
    """
    training = [module for module in stage.modules() if module.training]
    stage.eval()
    # Raise together: otherwise, if the last rank fails, the others would wait for it in a step that it never begins.
    with replica.together(), preserve_random_state():
        whole, again, apart = (as_tuple(evaluate(stage, replica, inputs, number)) for number in (1, 1, 2))
        for output, repeated, parts in zip(whole, again, apart, strict=True):
            if output is None or not output.is_floating_point():
                continue
            kind, largest = output.device.type, float(output.abs().max())
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else output.dtype
            tolerance = largest * max(_TOLERANCE, _TOLERANCE_EPS * torch.finfo(dtype).eps)
            difference = float((parts - output).abs().max()) if parts.shape == output.shape else math.inf
            # Accept layers that draw random numbers even in eval mode: their outputs differ in identical runs, too.
            if difference > tolerance >= float((repeated - output).abs().max()):
                raise StrategyError(
                    f"The network's output for a row depends on other rows of its batch: for rows 0 "
                    f"to {len(inputs[0]) - 1}, the outputs of one batch and of two microbatches differ by "
                    f"{difference:.2g} (largest value {largest:.2g}). A pipeline cuts batches along dimension 0. If "
                    "dimension 0 is time, put the samples first; with nn.LSTM and nn.TransformerEncoderLayer, set "
                    "batch_first=True. If layers compare the samples of a batch, use num_microbatches=1, or "
                    "strategy=ddp or fsdp."
                )
    for module in training:
        module.training = True


def try_out(stage: Stage, replica: Replica, inputs: tuple[Tensor, ...], loss: Callable[[Any], Any]) -> StageShapes:
    """Return the shapes that this rank's stage exchanges for a microbatch; a collective call within the replica.

    torch would infer the shapes from a forward and backward pass with undefined values, in which an error on one rank
    leaves the others waiting. This pass uses real values, and changes neither buffers nor random states.

    Args:
        stage: This rank's stage.
        replica: The ranks of this replica.
        inputs: The network's inputs for a microbatch; only the first rank uses their values.
        loss: Called on the last rank with the network's output.
    """
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    shapes: list[StageShapes] = []

    def recorded(*stage_inputs: Any) -> Any:
        output = functional_call(stage, buffers, stage_inputs)
        shapes.append(StageShapes(_without_data(stage_inputs), _without_data(as_tuple(output))))
        if replica.is_last:
            loss(output)
        return output

    with preserve_random_state(), torch.enable_grad():
        _run(recorded, replica, [inputs])
    changing = {
        type(module).__name__
        for path, module in stage.named_modules()
        for name, buffer in module.named_buffers(path, recurse=False, remove_duplicate=False)
        if name in buffers and not torch.equal(buffer, buffers[name])
    }
    return StageShapes(shapes[0].inputs, shapes[0].outputs, tuple(sorted(changing)))


def _run(
    stage: Callable[..., Any], replica: Replica, microbatches: Sequence[tuple[Any, ...]]
) -> list[tuple[Tensor, ...]]:
    """Run microbatches through the stages, and return their outputs on the last rank."""
    outputs: list[tuple[Tensor, ...]] = []
    error: Exception | None = None
    for microbatch in microbatches:
        # After an error, stages send None, so that no rank waits.
        inputs = microbatch if replica.is_first else replica.receive(replica.position - 1)
        output: tuple[Tensor, ...] | None = None
        if inputs is not None and error is None:
            try:
                output = as_tuple(stage(*inputs))
            except Exception as raised:  # noqa: BLE001  # raised on all ranks below
                error = raised
        if not replica.is_last:
            replica.send(output, replica.position + 1)
        elif output is not None:
            outputs.append(output)
    replica.raise_together(error)
    return outputs


def _without_data(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
        for value in values
    )
