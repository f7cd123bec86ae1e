"""torchrun and mpirun, which start the ranks of all hosts in the place of Lightning."""

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
# As the toolkit does. Where a machine has several networks (Docker's), MPI's first message hangs without it.
MPI_ON_LOOPBACK = ("--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo")

_AGENT = """\
#!/bin/sh
host=$1
shift
exec env -i sh -c ". {folder}/$host/environment; $*"
"""


def torchrun(hosts: Hosts, order: Sequence[str], command: Sequence[str], *, processes: int) -> dict[str, list[str]]:
    """The torchrun of each host.

    Args:
        hosts: The job.
        order: Hosts in the order of their node ranks.
        command: A Python script and its arguments, after the interpreter.
        processes: Ranks of each host.
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
    """Run a command on all hosts by one mpirun, and return how it ended.

    It reaches them through an agent in place of ssh, which starts each host's daemon with that host's own environment
    and nothing else, as ssh would. So mpirun counts the local ranks of each host by itself, and only what ``-x`` names
    passes from the first host to the others.

    Args:
        hosts: The job, in a folder whose path is short enough for Open MPI's sockets.
        order: Hosts in mpirun's order.
        command: The command.
        processes: Ranks of each host.
        options: Other options of mpirun.
        python_path: Other folders of Python modules.
        derives_port: Whether ranks derive the port of rank 0 from what all of them know, the names of the hosts: then
            no other such job may run on this machine. Else it is the job's.
    """
    port = () if derives_port else ("-x", f"{MAIN_PORT.name}={hosts.main_port}")
    for host in hosts.names:
        env = hosts.env(host)
        if host != "algo-1":
            del env["TRAINING_JOB_NAME"]  # set by the service, but not in the session that ssh opens
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
