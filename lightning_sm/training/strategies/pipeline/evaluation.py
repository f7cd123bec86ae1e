"""Forward passes of the network in validation, test and prediction, with any number of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import drawn_seed, stage_stream
from lightning_sm.training.strategies.pipeline.rows import num_microbatches
from lightning_sm.training.strategies.pipeline.stage import Stage, as_tuple


class Evaluation:
    """A forward pass through the network's stages: each rank passes one microbatch after the other on to the next.

    Args:
        stage: This rank's stage.
        replica: The ranks of this replica.
        microbatches: Highest number of microbatches.
    """

    def __init__(self, stage: Stage, replica: Replica, microbatches: int) -> None:
        self._stage = stage
        self._replica = replica
        self._microbatches = microbatches

    def __call__(self, *inputs: Any) -> Any:
        """Run the network; a collective call of the replica.

        Args:
            inputs: The network's inputs, the same on all ranks of the replica.

        Returns:
            The network's output, on every rank.
        """
        output = self.output_of_last(inputs, self.num_microbatches(inputs), drawn_seed())
        return self._replica.broadcast(output, self._replica.last)

    def num_microbatches(self, inputs: tuple[Any, ...]) -> int:
        """Return how many microbatches pass through the stages.

        Args:
            inputs: The network's inputs.
        """
        rows = {len(value) for value in inputs if isinstance(value, Tensor) and value.ndim}
        # Inputs of different lengths cannot be split by rows.
        return num_microbatches(rows.pop(), self._microbatches) if len(rows) == 1 and 0 not in rows else 1

    def output_of_last(self, inputs: tuple[Any, ...], number: int, seed: int) -> Any:
        """Run the network; a collective call of the replica.

        Args:
            inputs: The network's inputs; used on the rank of the first stage.
            number: How many microbatches they are split into, the same on all ranks of the replica.
            seed: The seed of the stages' random numbers, also the same.

        Returns:
            The network's output on the rank of the last stage, None elsewhere.
        """
        position = self._replica.position
        batches = _split(inputs, number) if position == 0 else [()] * number
        outputs: list[tuple[Tensor, ...]] = []
        with stage_stream(seed, position):
            for batch in batches:
                values = batch if position == 0 else self._replica.receive(position - 1)
                with torch.no_grad():
                    made = as_tuple(self._stage(*values))
                if self._replica.is_last:
                    outputs.append(made)
                else:
                    self._replica.send(made, position + 1)
        if not outputs:
            return None
        joined = tuple(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*outputs, strict=True))
        return joined[0] if len(joined) == 1 else joined


def _split(inputs: tuple[Any, ...], number: int) -> list[tuple[Any, ...]]:
    split = {id(value): value.chunk(number) for value in inputs if isinstance(value, Tensor) and value.ndim}
    return [tuple(split[id(value)][i] if id(value) in split else value for value in inputs) for i in range(number)]
