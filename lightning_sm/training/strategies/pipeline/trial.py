"""A trial of the stages with one microbatch: the shapes of what they exchange, and errors that every rank learns of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.placement import Placement
from lightning_sm.training.strategies.pipeline.random_state import preserve_random_state
from lightning_sm.training.strategies.pipeline.stage import as_tuple


@dataclass(frozen=True)
class StageShapes:
    """What a stage gets and returns for a microbatch.

    Args:
        inputs: Its inputs, as tensors without data (device "meta").
        outputs: Its outputs, likewise.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class TrialResult:
    """What a trial has found on this rank.

    Args:
        shapes: Shapes by the number of this rank's stages; incomplete after an error.
        error: The error that happened on this rank.
    """

    shapes: Mapping[int, StageShapes]
    error: Exception | None


class Trial:
    """A forward pass of a microbatch through the stages, one after the other, when shapes are used for the first time.

    torch would infer shapes by a forward and backward pass with undefined values, in which an error on one rank leaves
    the others waiting. Here, values are real, and an error passes through the later stages. The pass leaves no trace in
    buffers and random numbers.

    Args:
        stages: This rank's modules by the number of the stage.
        placement: The grid of ranks.
        replica: The ranks of this replica.
        loss: Called on the rank of the last stage with its output.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], placement: Placement, replica: Replica, loss: Callable[[Any], None]
    ) -> None:
        self._stages = stages
        self._placement = placement
        self._replica = replica
        self._loss = loss

    def __call__(self, inputs: tuple[Tensor, ...], error: Exception | None) -> TrialResult:
        """Run the pass; a collective call of the replica.

        Args:
            inputs: The network's inputs for a microbatch on the rank of stage 0, else nothing.
            error: An error in getting them: then nothing runs.
        """
        owner = self._placement.position_of
        shapes: dict[int, StageShapes] = {}
        # The values for the next stage, and which of them need gradients; None after an error.
        values: tuple[tuple[Tensor, ...], list[bool]] | None = None
        if error is None and 0 in self._stages:
            values = (inputs, [value.requires_grad for value in inputs])
        last = self._placement.num_stages - 1
        with preserve_random_state(), self._preserved_buffers(), torch.enable_grad():
            for stage in range(last + 1):
                here, before = owner(stage), owner(max(0, stage - 1))
                if here != before and self._replica.position == before:
                    self._replica.send(values, here)
                if self._replica.position != here:
                    continue
                if here != before:
                    values = self._replica.receive(before)
                if values is None:
                    continue
                try:
                    values, shapes[stage] = self._run(stage, *values)
                except Exception as raised:  # noqa: BLE001  # the caller raises it on all ranks
                    values, error = None, raised
        return TrialResult(shapes, error)

    def _run(
        self, stage: int, inputs: tuple[Tensor, ...], trained: list[bool]
    ) -> tuple[tuple[tuple[Tensor, ...], list[bool]], StageShapes]:
        leaves = tuple(value.detach().requires_grad_(grad) for value, grad in zip(inputs, trained, strict=True))
        output = self._stages[stage](*leaves)
        if stage == self._placement.num_stages - 1:
            self._loss(output)
        outputs = as_tuple(output)
        shapes = StageShapes(_without_data(leaves), _without_data(outputs))
        return (tuple(value.detach() for value in outputs), [value.requires_grad for value in outputs]), shapes

    @contextmanager
    def _preserved_buffers(self) -> Iterator[None]:
        saved = [(buffer, buffer.clone()) for module in self._stages.values() for buffer in module.buffers()]
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
