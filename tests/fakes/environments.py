"""Cluster environments of a job with two hosts, and the variables that launchers set for a process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sm.training.environment import SageMakerEnvironment
from tests.fakes.job_folder import make_job
from tests.unit.job.test_rank_starter import TORCHRUN

GROUP = {"gpu": ("algo-2", "algo-1")}
MIXED = {"data": ("algo-1",), "gpu": ("algo-3", "algo-2")}


def make_environment(
    host: str = "algo-1",
    groups: Mapping[str, Sequence[str]] = GROUP,
    *,
    variables: Mapping[str, str] | None = None,
    **facts: Any,
) -> SageMakerEnvironment:
    """Return the cluster environment of a process of the job.

    Args:
        host: Name of the process's host.
        groups: Hosts by instance group.
        variables: Environment variables to set first.
        facts: Arguments of ``make_job``.
    """
    os.environ.update(variables or {})
    return SageMakerEnvironment(make_job(groups, host, **facts))


def mpi(rank: int, devices: int = 1, size: int = 2) -> dict[str, str]:
    """Return the variables that mpirun sets.

    Args:
        rank: The rank.
        devices: Number of ranks per host.
        size: Total number of ranks.
    """
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % devices),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(devices),
    }


def torchrun(node_rank: int, devices: int = 2, size: int = 4) -> dict[str, str]:
    """Return the variables that torchrun sets for the second local rank.

    Args:
        node_rank: Index of the host.
        devices: Number of ranks per host.
        size: Total number of ranks.
    """
    return {**TORCHRUN, "GROUP_RANK": str(node_rank), "LOCAL_WORLD_SIZE": str(devices), "WORLD_SIZE": str(size)}
