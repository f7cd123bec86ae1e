"""SageMakerEnvironment: Lightning's cluster environment for a SageMaker job (main address, ranks, world size)."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from typing_extensions import override

from lightning_sm._lightning import ClusterEnvironment, rank_zero_only
from lightning_sm.errors import JobConfigError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rank_starter import RankStart, RankStarter
from lightning_sm.job.rendezvous import RESOLVE_TIMEOUT_S, check_port_is_free, wait_for_host
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import RANK_ZERO_PID
from lightning_sm.training import cluster_checks
from lightning_sm.training.mpi_host import main_host_of_mpi


class RunListener(Protocol):
    """The listener that an environment notifies of the runs that Lightning makes with it."""

    def begin_run(self, environment: SageMakerEnvironment, world_size: int) -> None:
        """Note that Lightning asks for ranks: when the Trainer is made, and at the start of each run."""

    def end_run(self) -> None:
        """Note that Lightning tears down a run."""


class SageMakerEnvironment(ClusterEnvironment):
    """The cluster environment of a SageMaker training job: a description that changes nothing in the process.

    It supports one plain process per host (Lightning then starts the local ranks), ``torchrun`` on every host, and
    ``mpirun``. ``SageMakerCLI``, ``SageMakerTrainer`` and ``SageMakerFabric`` add it. Without them, write::

        environment = SageMakerEnvironment()
        prepare_process(environment)
        Trainer(plugins=[environment], num_nodes=environment.num_nodes)

    ``prepare_process`` sets what the process needs besides its ranks. Without it, ranks are the same, but rank
    variables of unknown origin are an error instead of being removed.

    Every trainer process must build one. In an mpirun script that uses mpi4py, the constructor makes a collective call:
    rank 0 tells the others its host. If a property made it on first read, it would hang when only some ranks read it.

    Args:
        job: The facts of the job. Default: read from this host.
        main_port: Port on which rank 0 listens, unless torchrun chose one. Default: ``LIGHTNING_SM_MAIN_PORT``, else
            derived from the job.
        resolve_timeout_s: Seconds to wait for the main host's name to resolve.

    Attributes:
        job: The facts of the job.
        start: How this process was started.
        topology: Roles and ranks of all hosts.
        main_host: The host of rank 0.
        listener: Notified of Lightning's runs; ``prepare_process`` sets it.

    Raises:
        JobConfigError: This is not a host of a SageMaker job, or the job's files are malformed.
        TopologyError: The hosts contradict each other or the launcher, or this host serves data.
    """

    def __init__(
        self,
        job: SageMakerJob | None = None,
        *,
        main_port: int | None = None,
        resolve_timeout_s: float = RESOLVE_TIMEOUT_S,
    ) -> None:
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
        # The port derives from the job's name, and mpirun may start ranks of other hosts without TRAINING_JOB_NAME.
        self.topology = Topology.from_job(replace(job, name=None) if is_mpi else job)
        node_rank = self.topology.node_rank  # raises on a data host, also where the launcher states a node rank
        self._node_rank = node_rank if self.start.node_rank is None else self.start.node_rank
        # torchrun's port comes first: its agent already listens there.
        self._main_port = self.start.main_port or main_port or self.topology.main_port
        self._resolve_timeout_s = resolve_timeout_s
        cluster_checks.check_launcher(self.start, job, self.topology)
        self.main_host = main_host_of_mpi(self.start, job, self.topology) if is_mpi else self.topology.main_host
        self.listener: RunListener | None = None
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
        """Processes on each trainer host if torchrun, mpirun or ``LIGHTNING_SM_DEVICES`` sets them, else None."""
        return self.start.devices or self.job.devices

    @property
    @override
    def creates_processes_externally(self) -> bool:
        """Whether the local ranks are already running: another launcher or Lightning itself started them.

        Lightning sets ``LOCAL_RANK`` when it starts them; a stray one was removed by ``prepare_process``, or is an
        error of ``set_world_size``, which Lightning calls before it starts any.
        """
        return self.start.launcher is not RankStarter.PLAIN or "LOCAL_RANK" in os.environ

    @cached_property
    @override
    def main_address(self) -> str:
        """Address of rank 0. The first access waits until the name of its host resolves.

        Raises:
            HostResolutionError: The name did not resolve in time.
            PortInUseError: This process is rank 0, and another process listens on the main port.
        """
        if self.start.main_address is not None:
            return self.start.main_address
        addresses = self.job.addresses
        is_reporter = self.local_rank() == 0
        wait_for_host(self.main_host, addresses, self._resolve_timeout_s, is_reporter=is_reporter)
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
        """Return the number of processes on all trainer hosts, without data hosts."""
        return self._world_size or self.start.world_size or 1

    @override
    def set_world_size(self, size: int) -> None:
        """Take the world size that Lightning computed.

        Lightning calls it when it makes the Trainer, and again when it has started the other local ranks.

        Args:
            size: ``num_nodes`` x ``devices``.

        Raises:
            TopologyError: The size contradicts the trainer hosts, the launcher or a variable of unknown origin; the
                message has the table of hosts.
        """
        cluster_checks.check_world_size(self, size, self._global_rank)
        # Later, and in processes that Lightning starts, such variables are Lightning's own.
        if self._world_size is None and self.listener is None and RANK_ZERO_PID.read(os.environ) != os.getpid():
            cluster_checks.check_variables(self, size, os.environ)
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
        """Take the rank that Lightning computed and, as its own environments do, set it for Lightning's log.

        Args:
            rank: node rank x devices + local rank.
        """
        self._global_rank = rank
        rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning stores it on the function itself

    @override
    def local_rank(self) -> int:
        """Return the rank of this process on its host."""
        if self.start.launcher in (RankStarter.PLAIN, RankStarter.LIGHTNING):
            # Read at each call: workers of ddp_spawn and ddp_fork inherit this object and get their ranks later.
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
        """Check the Trainer's settings against the cluster, before any process is started.

        Args:
            num_devices: Processes on each trainer host.
            num_nodes: Number of trainer hosts.

        Raises:
            TopologyError: They contradict the cluster; the message has the table of hosts.
        """
        cluster_checks.check_settings(self, num_devices, num_nodes)
