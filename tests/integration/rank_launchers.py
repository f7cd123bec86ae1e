"""torchrun and mpirun, which start the ranks of all hosts instead of Lightning."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_sm.job.variables import MAIN_PORT
from tests.integration.hosts import Ended, Hosts, run_together

NEEDS_MPIRUN = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian package openmpi-bin)")
# As the toolkit does: on a machine with several networks, such as Docker's, MPI's first message hangs without this.
MPI_ON_LOOPBACK = ("--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo")

_AGENT = """\
#!/bin/sh
host=$1
shift
exec env -i sh -c ". {folder}/$host/environment; $*"
"""


def torchrun(hosts: Hosts, order: Sequence[str], command: Sequence[str], *, processes: int) -> dict[str, list[str]]:
    """Build the torchrun command of each host.

    Args:
        hosts: The job.
        order: Hosts in the order of their node ranks.
        command: A Python script and its arguments, after the interpreter.
        processes: Ranks per host.
    """
    return {
        host: [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(order))),
            *("--nproc-per-node", str(processes), "--node-rank", str(rank)),
            *("--master-addr", hosts.address(order[0]), "--master-port", str(hosts.spare_port)),
            *command[1:],
        ]
        for rank, host in enumerate(order)
    }


def mpirun(
    hosts: Hosts,
    order: Sequence[str],
    command: Sequence[str],
    *,
    processes: int = 1,
    options: Sequence[str] = (),
    python_path: Sequence[Path] = (),
    derives_port: bool = False,
) -> Ended:
    """Run a command on all hosts with one mpirun, and return the result.

    mpirun reaches the hosts through an agent that replaces ssh. Like ssh, the agent starts each host's daemon with only
    that host's environment. So mpirun counts the local ranks of each host, and only variables that ``-x`` names pass
    from the first host to the others.

    Args:
        hosts: The job, in a folder whose path is short enough for Open MPI's sockets.
        order: Hosts in mpirun's order.
        command: The command.
        processes: Ranks per host.
        options: Additional options for mpirun.
        python_path: Additional folders of Python modules.
        derives_port: True to let the ranks derive the port of rank 0 from the hosts' names, which all ranks know. No
            other such job may then run on this machine. If False, the ranks use the job's port.
    """
    port = () if derives_port else ("-x", f"{MAIN_PORT.name}={hosts.main_port}")
    for host in hosts.names:
        env = hosts.env(host)
        if host != "algo-1":
            del env["TRAINING_JOB_NAME"]  # SageMaker sets it, but an ssh session does not have it
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *map(str, python_path)])
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
        (hosts.folder / host / "environment").write_text(exports)
    agent = hosts.folder / "agent"
    agent.write_text(_AGENT.format(folder=hosts.folder))
    agent.chmod(0o755)
    line = [
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *("--mca", "plm_rsh_agent", str(agent), *MPI_ON_LOOPBACK),
        *("--host", ",".join(f"{host}:{processes}" for host in order), "-np", str(processes * len(order))),
        *port,
        *options,
        *command,
    ]
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(hosts.folder), "HOME": os.environ.get("HOME", "/")}
    return run_together({"mpirun": (line, env)})["mpirun"]
