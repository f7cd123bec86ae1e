"""The placement of stages and replicas on ranks: arithmetic only, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_sm.errors import StrategyError

PlacementOrder = Literal["cluster", "spread"]

# The dimensions of the device mesh, as in Lightning's ModelParallelStrategy.
DATA, PIPELINE, TENSOR = "data_parallel", "pipeline_parallel", "tensor_parallel"


@dataclass(frozen=True)
class Placement:
    """The grid of ranks: replicas of the model (data parallel) x positions in the pipeline x parts of layers (tensor).

    Args:
        pipeline_size: Ranks among which the layers of one replica are spread, p.
        data_size: Replicas of the model, d.
        order: "cluster": the ranks of a replica are neighbours, ``[0, 1], [2, 3]``; "spread": they are as far apart as
            possible, ``[0, 2], [1, 3]``.
        chunks: Stages on each rank, v.
        is_v_shaped: Whether every other lap of stages goes back: with p = 2 and v = 2, rank 0 has stages 0 and 3.
            Otherwise each lap begins at the first rank again: rank 0 has stages 0 and 2.
        tensor_size: Ranks among which layers are split, t: always neighbours. The world size is p x d x t.

    Source:
        The placement strategies "cluster" and "spread" of SageMaker's model parallel library v1 (SageMaker Python SDK,
        doc/api/training/smd_model_parallel_general.rst).
    """

    pipeline_size: int
    data_size: int
    order: PlacementOrder = "cluster"
    chunks: int = 1
    is_v_shaped: bool = False
    tensor_size: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of the model, p x v."""
        return self.pipeline_size * self.chunks

    @property
    def mesh(self) -> tuple[tuple[int, int, int], tuple[str, str, str]]:
        """Shape and dimension names of the device mesh, whose last dimension has neighbouring ranks."""
        if self.order == "cluster":
            return (self.data_size, self.pipeline_size, self.tensor_size), (DATA, PIPELINE, TENSOR)
        return (self.pipeline_size, self.data_size, self.tensor_size), (PIPELINE, DATA, TENSOR)

    def replica(self, rank: int) -> int:
        """Return the replica that a global rank belongs to: its data-parallel rank."""
        place = rank // self.tensor_size
        return place // self.pipeline_size if self.order == "cluster" else place % self.data_size

    def position(self, rank: int) -> int:
        """Return the position of a global rank in the pipeline of its replica."""
        place = rank // self.tensor_size
        return place % self.pipeline_size if self.order == "cluster" else place // self.data_size

    def part(self, rank: int) -> int:
        """Return which part of split layers a global rank has: its tensor-parallel rank."""
        return rank % self.tensor_size

    def ranks(self, replica: int, part: int = 0) -> list[int]:
        """Return the global ranks of a replica that have the same part of split layers, by position."""
        first, step = (replica * self.pipeline_size, 1) if self.order == "cluster" else (replica, self.data_size)
        return [(first + position * step) * self.tensor_size + part for position in range(self.pipeline_size)]

    def position_of(self, stage: int) -> int:
        """Return the position in the pipeline that holds a stage."""
        lap, place = divmod(stage, self.pipeline_size)
        return self.pipeline_size - 1 - place if self.is_v_shaped and lap % 2 else place

    @property
    def last_position(self) -> int:
        """The position in the pipeline that holds the last stage."""
        return self.position_of(self.num_stages - 1)

    def stages(self, position: int) -> list[int]:
        """Return the stages at a position in the pipeline, in the model's order."""
        return [stage for stage in range(self.num_stages) if self.position_of(stage) == position]


def grid(
    world_size: int,
    processes_per_host: int,
    pipeline_size: int | Literal["auto"],
    data_size: int | Literal["auto"],
    tensor_size: int = 1,
) -> tuple[int, int]:
    """Return the sizes of pipeline and data parallelism; the user may have stated none, one or both.

    If none is stated, the pipeline spans the processes of a host, or all hosts if each has one process.

    Args:
        world_size: Number of training processes.
        processes_per_host: How many of them each host has.
        pipeline_size: ``pipeline_parallel_size`` of the strategy.
        data_size: ``data_parallel_size`` of the strategy.
        tensor_size: ``tensor_parallel_size`` of the strategy.

    Raises:
        StrategyError: The sizes do not make up the world size, or the pipeline has fewer than 2 ranks.
    """
    stated = f"pipeline_parallel_size={pipeline_size} and data_parallel_size={data_size}"
    if tensor_size > 1:
        stated += f" and tensor_parallel_size={tensor_size}"
    places = world_size // tensor_size  # of a pipeline's stages
    processes_per_host //= tensor_size
    if pipeline_size == "auto":
        if data_size == "auto":
            pipeline_size = processes_per_host if processes_per_host > 1 else places
        else:
            pipeline_size = places // max(1, data_size)
    if data_size == "auto":
        data_size = places // max(1, pipeline_size)
    if min(pipeline_size, data_size) < 1 or pipeline_size * data_size * tensor_size != world_size:
        divisors = [size for size in range(2, places + 1) if world_size % (size * tensor_size) == 0]
        raise StrategyError(
            f"The strategy has {stated}, but the number of training processes (num_nodes x devices) is {world_size}, "
            f"which is not their product. Choose pipeline_parallel_size from {divisors}, or change the number of hosts."
        )
    if pipeline_size == 1:
        raise StrategyError(
            f"A pipeline needs at least 2 processes, but there is 1 for each replica of the model ({stated}, "
            f"{world_size} training process{'' if world_size == 1 else 'es'}). Use strategy=ddp, or more processes."
        )
    return pipeline_size, data_size
