"""Forward passes through the stages of a replica; if one rank fails, all ranks raise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import preserve_random_state, stage_stream
from lightning_sm.training.strategies.pipeline.stage import Stage, as_output, as_tuple

# Largest difference between outputs that counts as rounding, relative to the largest output. It exceeds one
# kernel's rounding errors, because different numbers of rows may select different kernels.
_TOLERANCE = 1e-2
_TOLERANCE_EPS = 16


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
    number = min(*rows, most_microbatches) if len(rows) == 1 and 0 not in rows else 1
    with stage_stream(replica.position), torch.no_grad():
        return run_forward(replica, cut(inputs, number), lambda _, values: as_tuple(stage(*values)))


def cut(inputs: Sequence[Any], number: int) -> list[tuple[Any, ...]]:
    """Return the network's inputs for each microbatch.

    Args:
        inputs: The network's inputs: tensors with equal numbers of rows. All else is for every microbatch.
        number: Number of microbatches, at most the number of rows.
    """
    parts = [
        value.tensor_split(number) if isinstance(value, Tensor) and value.ndim else [value] * number for value in inputs
    ]
    return list(zip(*parts, strict=True))


def run_forward(replica: Replica, microbatches: Sequence[Any], run: Callable[[int, Any], Any]) -> Any:
    """Run microbatches through the stages; a collective call within the replica.

    Args:
        replica: The ranks of this replica.
        microbatches: The network's inputs for each microbatch; used on the first rank.
        run: Called with the number and the inputs of a microbatch; runs this rank's stage, and returns its outputs.

    Returns:
        The network's output for the whole batch on the last rank, None on the others.

    Raises:
        Exception: On all ranks, if a rank fails.
    """
    with replica.together():
        outputs = replica.relay(microbatches, run)
        # There are fewer if another rank has failed, and none on other ranks than the last.
        return _joined(outputs) if len(outputs) == len(microbatches) else None


def _joined(outputs: Sequence[tuple[Tensor, ...]]) -> Any:
    """Return the network's output for the whole batch."""
    if len(outputs) == 1:
        return as_output(outputs[0])
    for parts in zip(*outputs, strict=True):
        shapes = [tuple(part.shape) for part in parts]
        if () in shapes or len({shape[1:] for shape in shapes}) > 1:
            raise StrategyError(
                f"The network's outputs for microbatches have the shapes {', '.join(map(str, shapes))}, which "
                "cannot be joined along dimension 0. Return tensors with one row per sample, or use num_microbatches=1."
            )
    return as_output([torch.cat(parts) for parts in zip(*outputs, strict=True)])


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
