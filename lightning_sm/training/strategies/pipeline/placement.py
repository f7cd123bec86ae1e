"""The placement of stages and replicas on ranks, as pure arithmetic without torch."""

from __future__ import annotations

from typing import Literal

from lightning_sm.errors import StrategyError

PlacementOrder = Literal["cluster", "spread"]


def replicas_of(world_size: int, pipeline_size: int, order: PlacementOrder) -> list[list[int]]:
    """Return the ranks of each replica of the model, in the order of its stages.

    Args:
        world_size: Number of training processes.
        pipeline_size: Number of stages.
        order: "cluster": the ranks of a replica are neighbours, ``[0, 1], [2, 3]``. "spread": they are as far apart as
            possible, ``[0, 2], [1, 3]``.

    Source:
        The placement strategies "cluster" and "spread" of SageMaker's model parallel library v1 (SageMaker Python SDK,
        doc/api/training/smd_model_parallel_general.rst).
    """
    if order == "cluster":
        return [list(range(first, first + pipeline_size)) for first in range(0, world_size, pipeline_size)]
    data_size = world_size // pipeline_size
    return [list(range(first, world_size, data_size)) for first in range(data_size)]


def num_stages(
    world_size: int, processes_per_host: int, pipeline_size: int | Literal["auto"], data_size: int | Literal["auto"]
) -> int:
    """Return the number of stages, given the sizes that the user set.

    If both are "auto", the pipeline spans the processes of a host, or all hosts if each has one process.

    Args:
        world_size: Number of training processes.
        processes_per_host: Number of training processes on each host.
        pipeline_size: ``pipeline_parallel_size`` of the strategy.
        data_size: ``data_parallel_size`` of the strategy.

    Raises:
        StrategyError: The product of the sizes is not the world size, or the pipeline has fewer than 2 ranks.
    """
    settings = f"pipeline_parallel_size={pipeline_size} and data_parallel_size={data_size}"
    if pipeline_size == "auto":
        if data_size == "auto":
            pipeline_size = processes_per_host if processes_per_host > 1 else world_size
        else:
            pipeline_size = world_size // max(1, data_size)
    if data_size == "auto":
        data_size = world_size // max(1, pipeline_size)
    if pipeline_size < 2 or pipeline_size * data_size != world_size:  # noqa: PLR2004  # one stage is no pipeline
        raise StrategyError(
            f"The strategy has {settings}, but the number of training processes (num_nodes x devices) is {world_size}. "
            "It must be the product of both sizes, with at least 2 processes for each replica of the model: choose "
            f"pipeline_parallel_size from {[size for size in range(2, world_size + 1) if world_size % size == 0]}, "
            "change the number of hosts, or use strategy=ddp."
        )
    return pipeline_size
