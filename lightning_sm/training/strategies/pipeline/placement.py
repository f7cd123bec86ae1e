"""The placement of stages and replicas on ranks: arithmetic only, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_sm.errors import StrategyError

PlacementOrder = Literal["cluster", "spread"]

# The dimensions of the device mesh, as in Lightning's ModelParallelStrategy.
DATA, PIPELINE = "data_parallel", "pipeline_parallel"


@dataclass(frozen=True)
class Placement:
    """The grid of ranks: replicas of the model (data parallel) x stages of the pipeline.

    Args:
        pipeline_size: Ranks among which the layers of one replica are spread, p: one stage on each.
        data_size: Replicas of the model, d. The world size is p x d.
        order: "cluster": the ranks of a replica are neighbours, ``[0, 1], [2, 3]``; "spread": they are as far apart as
            possible, ``[0, 2], [1, 3]``.

    Source:
        The placement strategies "cluster" and "spread" of SageMaker's model parallel library v1 (SageMaker Python SDK,
        doc/api/training/smd_model_parallel_general.rst).
    """

    pipeline_size: int
    data_size: int
    order: PlacementOrder = "cluster"

    @property
    def mesh(self) -> tuple[tuple[int, int], tuple[str, str]]:
        """Shape and dimension names of the device mesh, whose last dimension has neighbouring ranks."""
        if self.order == "cluster":
            return (self.data_size, self.pipeline_size), (DATA, PIPELINE)
        return (self.pipeline_size, self.data_size), (PIPELINE, DATA)

    def replica(self, rank: int) -> int:
        """Return the replica that a global rank belongs to: its data-parallel rank."""
        return rank // self.pipeline_size if self.order == "cluster" else rank % self.data_size

    def ranks(self, replica: int) -> list[int]:
        """Return the global ranks of a replica, by their stages."""
        first, step = (replica * self.pipeline_size, 1) if self.order == "cluster" else (replica, self.data_size)
        return [first + stage * step for stage in range(self.pipeline_size)]


def grid(
    world_size: int,
    processes_per_host: int,
    pipeline_size: int | Literal["auto"],
    data_size: int | Literal["auto"],
) -> tuple[int, int]:
    """Return the sizes of pipeline and data parallelism; the user may have stated none, one or both.

    If none is stated, the pipeline spans the processes of a host, or all hosts if each has one process.

    Args:
        world_size: Number of training processes.
        processes_per_host: How many of them each host has.
        pipeline_size: ``pipeline_parallel_size`` of the strategy.
        data_size: ``data_parallel_size`` of the strategy.

    Raises:
        StrategyError: The sizes do not make up the world size, or the pipeline has fewer than 2 ranks.
    """
    stated = f"pipeline_parallel_size={pipeline_size} and data_parallel_size={data_size}"
    if pipeline_size == "auto":
        if data_size == "auto":
            pipeline_size = processes_per_host if processes_per_host > 1 else world_size
        else:
            pipeline_size = world_size // max(1, data_size)
    if data_size == "auto":
        data_size = world_size // max(1, pipeline_size)
    if min(pipeline_size, data_size) < 1 or pipeline_size * data_size != world_size:
        divisors = [size for size in range(2, world_size + 1) if world_size % size == 0]
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
