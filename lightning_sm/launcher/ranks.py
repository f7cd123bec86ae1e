"""The ranks that the launcher starts by itself, because the job states their number; Lightning starts all others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from lightning_sm._linux import usable_cpus
from lightning_sm._log import command_logger
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rank_starter import host_variables, rank_variables
from lightning_sm.job.topology import Role, Topology
from lightning_sm.launcher import rank_processes, timeline
from lightning_sm.launcher.user_code.script import Script

_LOG = command_logger(__name__)

_THREADS = "OMP_NUM_THREADS"


class Ranks:
    """The ranks of this host that the launcher starts.

    Args:
        job: The facts of the job.
        topology: Roles and ranks of all hosts.
        script: The script. One that is not Python is started once: what it starts on this host is its own affair.
        devices: Number of processes that the job states for each trainer host; None if it leaves that to the script.
    """

    def __init__(self, job: SageMakerJob, topology: Topology, script: Script, devices: int | None) -> None:
        self._job = job
        self._topology = topology
        self._devices = devices if topology.role is Role.TRAINER and script.is_python else None
        if devices is not None and devices > 1 and topology.role is Role.TRAINER and not script.is_python:
            _LOG.info(
                "the job asks for %d processes on each trainer host, but the script is not a Python file: starting it "
                "once. It can start them itself, for example with torchrun.",
                devices,
            )

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that all ranks of this host share, and if there is only one, also its own."""
        if self._topology.role is not Role.TRAINER:
            return {}
        variables = host_variables(self._job, self._topology)
        if self._devices is not None:
            variables |= rank_variables(self._topology, self._devices, 0)
            if self._devices > 1:
                for own in ("RANK", "LOCAL_RANK"):
                    del variables[own]
                # Otherwise, every rank would start a thread for each CPU of the host.
                variables[_THREADS] = env.get(_THREADS) or str(max(1, usable_cpus() // self._devices))
        return variables

    def command(self, command: Sequence[str], control: ControlFolder) -> list[str]:
        """Return the command that runs another one in each rank.

        Args:
            command: Program and arguments of a rank.
            control: The folder in which the ranks learn that one of them has failed.
        """
        if self._devices is None or self._devices == 1:
            return list(command)
        # -I: neither the script's folder, its working directory, nor PYTHONPATH may replace modules of this process.
        program = [sys.executable, "-I", rank_processes.__file__]
        seconds = map(str, (timeline.CONSEQUENCE_S, timeline.END_GRACE_S))
        return [*program, str(self._devices), str(control.peers_gone), *seconds, *command]
