"""The ranks that the launcher starts by itself, because the job states their number; Lightning starts all others."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_sm._linux import usable_cpus
from lightning_sm._log import command_logger
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rank_starter import host_variables, rank_variables
from lightning_sm.job.topology import Role, Topology
from lightning_sm.launcher.user_code.script import Script

_LOG = command_logger(__name__)

_THREADS = "OMP_NUM_THREADS"


def variables_of_processes(
    job: SageMakerJob, topology: Topology, script: Script, devices: int | None, env: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the variables of each process that the launcher starts on this host, besides those that all share.

    A script that is not Python is started once: what it starts on this host is its own affair.

    Args:
        job: The facts of the job.
        topology: Roles and ranks of all hosts.
        script: The script.
        devices: Number of processes that the job states for each trainer host; None if it leaves that to the script.
        env: The variables that all share.
    """
    if topology.role is not Role.TRAINER:
        return [{}]
    variables = host_variables(job, topology)
    if devices is None or not script.is_python:
        if devices is not None and devices > 1:
            _LOG.info(
                "the job asks for %d processes on each trainer host, but the script is not a Python file: starting it "
                "once. It can start them itself, for example with torchrun.",
                devices,
            )
        return [variables]
    if devices > 1:
        # Otherwise, every rank would start a thread for each CPU of the host.
        variables[_THREADS] = env.get(_THREADS) or str(max(1, usable_cpus() // devices))
    return [{**variables, **rank_variables(topology, devices, local_rank)} for local_rank in range(devices)]
