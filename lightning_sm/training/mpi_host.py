"""The host of rank 0 under mpirun, whose order of hosts may be the service's shuffled list instead of our table."""

from __future__ import annotations

import importlib
import os
import sys

from lightning_sm.errors import TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rank_starter import RankStart
from lightning_sm.job.topology import Topology


def main_host_of_mpi(start: RankStart, job: SageMakerJob, topology: Topology) -> str:
    """Find the host of rank 0; a collective call where the script uses mpi4py.

    Args:
        start: How mpirun started this process.
        job: The facts of the job.
        topology: Roles and ranks of all hosts.

    Raises:
        TopologyError: The host is unknown.
    """
    own, hosts = job.current_host, topology.trainer_hosts
    if "mpi4py" in sys.modules:
        # Used only if the script or "python -m mpi4py" (the toolkit's command) has imported mpi4py: importing it here
        # would register MPI_Finalize at exit, where a failing rank and the others wait for each other.
        mpi = importlib.import_module("mpi4py.MPI")
        if mpi.COMM_WORLD.Get_size() == start.world_size:  # else mpi4py has loaded the library of another MPI
            return str(mpi.COMM_WORLD.bcast(own, root=0))
    if start.node_rank == 0:
        return own
    # The toolkit's mpirun passes rank 0's SM_* variables to all ranks; the job's file is each host's own.
    stated = os.environ.get("SM_CURRENT_HOST")
    if stated in hosts and (stated != own or not job.has_own_file):
        return stated
    if hosts.index(own) == start.node_rank:
        return topology.main_host
    raise TopologyError(
        f"mpirun gave host {own!r} node rank {start.node_rank}, which is not its position in the table, so the "
        f"host of rank 0 is unknown.\n{topology.table(start.devices)}\n"
        "Pass the hosts to mpirun in the order of the table, add -x SM_CURRENT_HOST, or start the script with "
        "python -m mpi4py."
    )
