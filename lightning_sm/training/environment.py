"""SageMakerEnvironment: Lightning's cluster environment for a SageMaker job (main address, ranks, world size)."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from lightning_sm._lightning import ClusterEnvironment, rank_zero_only
from lightning_sm.errors import JobConfigError, TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rank_starter import RankStart, RankStarter
from lightning_sm.job.reachability import RESOLVE_TIMEOUT_S, check_port_is_free, wait_for_host
from lightning_sm.job.topology import Topology
from lightning_sm.training import cluster_checks

if TYPE_CHECKING:
    from lightning_sm.training.process import PreparedProcess


class SageMakerEnvironment(ClusterEnvironment):
    """The cluster environment of a SageMaker training job; it describes the job, but does not change the process.

    It supports one plain process per host (Lightning then starts the local ranks), ``torchrun`` on every host, and
    ``mpirun``. ``SageMakerCLI``, ``SageMakerTrainer`` and ``SageMakerFabric`` add it. Without them, write::

        environment = SageMakerEnvironment()
        prepare_process(environment)
        Trainer(plugins=[environment], num_nodes=environment.num_nodes)

    ``prepare_process`` sets up the process, except for its ranks. It also removes rank variables of unknown origin,
    which Lightning would otherwise trust.

    Every trainer process must create an instance. In an mpirun script that uses mpi4py, the constructor makes a
    collective call, in which rank 0 sends its host name. Properties make no such call, because it would hang if only
    some ranks read them.

    Args:
        job: The facts about the job. By default, they are read from this host.

    Attributes:
        job: The facts about the job.
        start: How this process was started.
        topology: Roles and ranks of all hosts.
        main_host: The host of rank 0.
        listener: The object that is notified of Lightning's runs, set by ``prepare_process``.

    Raises:
        JobConfigError: This is not a host of a SageMaker job, or the job's files are malformed.
        TopologyError: The hosts contradict each other or the launcher, or this host serves data.
    """

    def __init__(self, job: SageMakerJob | None = None) -> None:
        super().__init__()
        job = job or SageMakerJob.from_environment()
        if job is None:
            raise JobConfigError(
                "This is not a SageMaker host: found neither /opt/ml/input/config/resourceconfig.json "
                "(SAGEMAKER_BASE_DIR moves /opt/ml) nor SM_HOSTS. Use SageMakerEnvironment in SageMaker jobs only: "
                "SageMakerEnvironment.detect() returns whether this is one."
            )
        self.job = job
        self.start = RankStart.detect(os.environ, os.getppid())
        is_mpi = self.start.launcher is RankStarter.MPI
        # The port is derived from the job's name. Ignore the name under mpirun, which may start ranks on other hosts
        # without TRAINING_JOB_NAME.
        self.topology = Topology.from_job(replace(job, name=None) if is_mpi else job)
        node_rank = self.topology.node_rank  # raises on a data host, even if the launcher sets a node rank
        self._node_rank = node_rank if self.start.node_rank is None else self.start.node_rank
        # torchrun's port takes precedence: its agent already listens there.
        self._main_port = self.start.main_port or self.topology.main_port
        cluster_checks.check_launcher(self.start, self.topology)
        self.main_host = _main_host_of_mpi(self.start, job, self.topology) if is_mpi else self.topology.main_host
        self.listener: PreparedProcess | None = None
        self._global_rank: int | None = None
        self._world_size: int | None = None

    @staticmethod
    @override
    def detect() -> bool:
        """Return whether this process runs on a host of a SageMaker job.

        Raises:
            JobConfigError: This is a SageMaker host, but the job's files are malformed.
        """
        return SageMakerJob.from_environment() is not None

    @property
    def num_nodes(self) -> int:
        """Number of trainer hosts, for ``Trainer(num_nodes=...)``."""
        return self.topology.num_nodes

    @property
    def devices(self) -> int | None:
        """Number of processes per trainer host if torchrun, mpirun or ``LIGHTNING_SM_DEVICES`` sets it, else None."""
        return self.start.devices or self.job.devices

    @property
    @override
    def creates_processes_externally(self) -> bool:
        """True if another launcher, or Lightning itself, has already started the local ranks.

        Lightning sets ``LOCAL_RANK`` when it starts these ranks; ``prepare_process`` removes a stray ``LOCAL_RANK``.
        """
        return self.start.launcher is not RankStarter.PLAIN or "LOCAL_RANK" in os.environ

    @cached_property
    @override
    def main_address(self) -> str:
        """Address of rank 0. The first access waits until the host's name resolves.

        Raises:
            HostResolutionError: The name did not resolve in time.
            PortInUseError: This process is rank 0, and another process listens on the main port.
        """
        if self.start.main_address is not None:
            return self.start.main_address
        addresses = self.job.addresses
        is_reporter = self.local_rank() == 0
        wait_for_host(self.main_host, addresses, RESOLVE_TIMEOUT_S, is_reporter=is_reporter)
        if self.global_rank() == 0 and not torch.distributed.is_initialized():
            check_port_is_free(self._main_port, self.main_host)
        return addresses.get(self.main_host, self.main_host)

    @property
    @override
    def main_port(self) -> int:
        """Port of rank 0, the same on every host."""
        return self._main_port

    @override
    def world_size(self) -> int:
        """Return the total number of processes on trainer hosts; data hosts do not count."""
        return self._world_size or self.start.world_size or 1

    @override
    def set_world_size(self, size: int) -> None:
        """Set the world size that Lightning has computed.

        Lightning calls this when it makes the Trainer, and again when it has started the other local ranks.

        Args:
            size: ``num_nodes`` x ``devices``.

        Raises:
            TopologyError: The size contradicts the trainer hosts or the launcher; the message includes the host table.
        """
        cluster_checks.check_world_size(self, size, self._global_rank)
        self._world_size = size
        if self.listener is not None:
            self.listener.begin_run(self, size)

    @override
    def global_rank(self) -> int:
        """Return the rank of this process among all training processes."""
        if self._global_rank is not None:
            return self._global_rank
        return self._node_rank * (self.devices or 1) + self.local_rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        """Set the rank that Lightning has computed, also for Lightning's logging, as Lightning's own environments do.

        Args:
            rank: node rank x devices + local rank.
        """
        self._global_rank = rank
        rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning stores it on the function itself

    @override
    def local_rank(self) -> int:
        """Return the rank of this process on its host."""
        if self.start.launcher in (RankStarter.PLAIN, RankStarter.LIGHTNING):
            # Read this on each call: workers of ddp_spawn and ddp_fork inherit this object, and get their ranks later.
            return int(os.environ.get("LOCAL_RANK", self.start.local_rank))
        return self.start.local_rank

    @override
    def node_rank(self) -> int:
        """Return the index of this host among the trainer hosts."""
        return self._node_rank

    @override
    def teardown(self) -> None:
        """Tell the listener that a run has ended."""
        if self.listener is not None:
            self.listener.end_run()

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's settings against the cluster, before any process starts.

        Args:
            num_devices: Number of processes on each trainer host.
            num_nodes: Number of trainer hosts.

        Raises:
            TopologyError: The settings contradict the cluster; the message includes the host table.
        """
        cluster_checks.check_settings(self, num_devices, num_nodes)


def _main_host_of_mpi(start: RankStart, job: SageMakerJob, topology: Topology) -> str:
    """Find the host of rank 0; a collective call if the script uses mpi4py.

    The result may differ from our host table, because mpirun may order the hosts by the service's shuffled list.
    """
    own, hosts = job.current_host, topology.trainer_hosts
    if "mpi4py" in sys.modules:
        # Use mpi4py only if the script or "python -m mpi4py" (the toolkit's command) has imported it. Importing it here
        # would register MPI_Finalize at exit, in which a failing rank and the others would wait for each other.
        mpi = importlib.import_module("mpi4py.MPI")
        if mpi.COMM_WORLD.Get_size() == start.world_size:  # otherwise, mpi4py has loaded another MPI library
            return str(mpi.COMM_WORLD.bcast(own, root=0))
    if start.node_rank == 0:
        return own
    # The toolkit's mpirun passes rank 0's SM_* variables to all ranks, whereas the job's file names the current host.
    passed_host = os.environ.get("SM_CURRENT_HOST")
    if passed_host in hosts and (passed_host != own or not job.has_own_file):
        return passed_host
    if hosts.index(own) == start.node_rank:
        return topology.main_host
    raise TopologyError(
        f"mpirun gave host {own!r} node rank {start.node_rank}, which is not its position in the table, so the "
        f"host of rank 0 is unknown.\n{topology.table(start.devices)}\n"
        "Pass the hosts to mpirun in this order, add -x SM_CURRENT_HOST, or start the script with python -m mpi4py."
    )
