"""Forward passes of the network in validation, test and prediction, with any number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.placement import Placement
from lightning_sm.training.strategies.pipeline.random_state import drawn_seed, stage_stream
from lightning_sm.training.strategies.pipeline.rows import num_microbatches
from lightning_sm.training.strategies.pipeline.sharding import free_gathered
from lightning_sm.training.strategies.pipeline.stage import as_tuple

_Tensors = tuple[Tensor, ...]


class Evaluation:
    """A forward pass through the network's stages.

    torch's schedules cannot run it for every number of rows, and the V-shaped ones not at all. Here, the microbatches
    pass through the stages in waves: in wave t, stage s has microbatch t - s. All transfers between two ranks in a wave
    are one batch, so that NCCL, which keeps the order of calls, cannot block.

    Args:
        stages: This rank's modules by the number of the stage.
        placement: The grid of ranks.
        replica: The ranks of this replica.
        microbatches: Highest number of microbatches.
        device: This rank's device.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        placement: Placement,
        replica: Replica,
        microbatches: int,
        device: torch.device,
    ) -> None:
        self._stages = stages
        self._placement = placement
        self._replica = replica
        self._microbatches = microbatches
        self._device = device

    def __call__(self, *inputs: Any) -> Any:
        """Run the network; a collective call of the replica.

        Args:
            inputs: The network's inputs, the same on all ranks of the replica.

        Returns:
            The network's output, on every rank.
        """
        output = self.output_of_last(inputs, self.num_microbatches(inputs), drawn_seed())
        return self._replica.broadcast(output, self._placement.last_position)

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
        with stage_stream(seed, self._replica.position):
            return self._output_of_last(inputs, number)

    def _output_of_last(self, inputs: tuple[Any, ...], number: int) -> Any:
        batches = _split(inputs, number)
        last = self._placement.num_stages - 1
        arrived: dict[int, _Tensors] = {}
        shapes: dict[int, _Tensors] = {}
        outputs: list[_Tensors] = []
        for wave in range(len(batches) + last):
            made: dict[int, _Tensors] = {}
            for stage, module in self._stages.items():
                if 0 <= wave - stage < len(batches):
                    values = batches[wave - stage] if stage == 0 else arrived.pop(stage)
                    # Lightning evaluates in inference mode (but on gloo), in which the buffers for gathered shards
                    # would become inference tensors, which a later training step cannot fill.
                    with torch.inference_mode(mode=False), torch.no_grad():
                        made[stage] = as_tuple(module(*values))
            if last in made:
                outputs.append(made.pop(last))
            self._pass_on(wave, len(batches), made, arrived, shapes)
        free_gathered(self._stages)
        if not outputs:
            return None
        joined = tuple(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*outputs, strict=True))
        return joined[0] if len(joined) == 1 else joined

    def _pass_on(
        self,
        wave: int,
        number: int,
        made: dict[int, _Tensors],
        arrived: dict[int, _Tensors],
        shapes: dict[int, _Tensors],
    ) -> None:
        """Pass the outputs of a wave on to the next stages."""
        owner = self._placement.position_of
        transfers = []
        for stage in range(max(0, wave - number + 1), min(wave + 1, self._placement.num_stages - 1)):
            here, there = owner(stage), owner(stage + 1)
            if self._replica.position not in (here, there):
                continue
            if here == there:
                arrived[stage + 1] = made[stage]
            elif stage == wave:  # the first microbatch, whose shapes are those of all
                if here == self._replica.position:
                    self._replica.send(made[stage], there)
                else:
                    arrived[stage + 1] = shapes[stage + 1] = self._replica.receive(here)
            elif here == self._replica.position:
                transfers += [self._transfer(dist.isend, tensor.contiguous(), there) for tensor in made[stage]]
            else:
                arrived[stage + 1] = tuple(torch.empty_like(tensor) for tensor in shapes[stage + 1])
                transfers += [self._transfer(dist.irecv, tensor, here) for tensor in arrived[stage + 1]]
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()

    def _transfer(self, call: Any, tensor: Tensor, position: int) -> dist.P2POp:
        return dist.P2POp(call, tensor, self._replica.ranks[position], group=self._replica.group)


def _split(inputs: tuple[Any, ...], number: int) -> list[tuple[Any, ...]]:
    split = {id(value): value.chunk(number) for value in inputs if isinstance(value, Tensor) and value.ndim}
    return [tuple(split[id(value)][i] if id(value) in split else value for value in inputs) for i in range(number)]
