"""SageMakerEnvironment: tells Lightning the main address, the ranks and the world size of a SageMaker job."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import cached_property

import torch

import lightning_sm
from lightning_sm._lightning import DISTRIBUTION, ClusterEnvironment, rank_zero_only
from lightning_sm.console import show_log_lines
from lightning_sm.errors import HostResolutionError, JobConfigError, PortInUseError, TopologyError
from lightning_sm.job import SageMakerJob
from lightning_sm.launch import PARENT_VARIABLE, Launch, Launcher, stray_variables
from lightning_sm.topology import Role, Topology

logger = logging.getLogger(__name__)

# How long sagemaker-training waits for the hosts of a job to resolve (entry_point.py): a large cluster's last host
# may start minutes after the first.
_RESOLVE_TIMEOUT_S = 15 * 60.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 30.0


class SageMakerEnvironment(ClusterEnvironment):
    """The cluster environment of a SageMaker training job.

    Right for one plain process per host (Lightning starts the local ranks), ``torchrun`` on every host, and
    ``mpirun``. ``SageMakerCLI`` puts it in by itself; without the CLI::

        environment = SageMakerEnvironment()
        Trainer(plugins=[environment], num_nodes=environment.num_nodes)

    Every trainer process builds one, because under mpirun with mpi4py building it is a collective call.

    Args:
        job: The facts of the job. Default: read from this host.
        data_groups: Names of the instance groups that serve data. Default: see ``Topology.from_job``.
        main_port: Port on which rank 0 listens. Default: ``LIGHTNING_SM_MAIN_PORT``, else derived from the job name.
        resolve_timeout_s: Seconds to wait for the main host's name to resolve.

    Raises:
        JobConfigError: This is not a host of a SageMaker job, or the job's files are malformed.
        TopologyError: The hosts contradict each other, the launcher, or this host serves data.
    """

    def __init__(
        self,
        job: SageMakerJob | None = None,
        *,
        data_groups: Sequence[str] | None = None,
        main_port: int | None = None,
        resolve_timeout_s: float = _RESOLVE_TIMEOUT_S,
    ) -> None:
        super().__init__()
        show_log_lines()
        job = job or SageMakerJob.from_environment()
        if job is None:
            raise JobConfigError(
                "This is no host of a SageMaker job: there is neither /opt/ml/input/config/resourceconfig.json "
                "(SAGEMAKER_BASE_DIR moves /opt/ml) nor SM_HOSTS. Off SageMaker, leave SageMakerEnvironment out; "
                "SageMakerEnvironment.detect() tells."
            )
        self._job = job
        self._topology = Topology.from_job(job, data_groups=data_groups)
        self._launch = Launch.detect(os.environ, os.getppid())
        self._main_port = main_port or self._launch.main_port or self._topology.main_port
        self._resolve_timeout_s = resolve_timeout_s
        self._disown_stray_variables()
        # mpirun runs on training hosts only, and may show every rank the facts of the first one.
        self._node_rank = self._topology.node_rank if self._launch.node_rank is None else self._launch.node_rank
        self._check_launcher_world()
        self._main_host = self._mpi_main_host() if self._launch.launcher is Launcher.MPI else self._topology.main_host
        self._global_rank: int | None = None
        self._world_size: int | None = None
        # Lightning counts from LOCAL_RANK alone until the Trainer is made, and so would log once per host.
        _set_logging_rank(self.global_rank())

    @staticmethod
    def detect() -> bool:
        """Whether this process runs on a host of a SageMaker job.

        Raises:
            JobConfigError: It does, but the job's files are malformed.
        """
        return SageMakerJob.from_environment() is not None

    @property
    def num_nodes(self) -> int:
        """Number of trainer hosts, for ``Trainer(num_nodes=...)``."""
        return self._topology.num_nodes

    @property
    def devices(self) -> int | None:
        """Processes on each trainer host, where torchrun, mpirun or ``LIGHTNING_SM_DEVICES`` decides it, else None."""
        return self._launch.devices or self._job.devices

    @property
    def topology(self) -> Topology:
        """Roles and ranks of all hosts."""
        return self._topology

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning must not start the local ranks: another launcher did, or Lightning did already.

        Lightning sets ``LOCAL_RANK`` when it starts them; stray values are gone since ``__init__``.
        """
        return self._launch.launcher is not Launcher.PLAIN or "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """Address of rank 0. The first access waits until the name of its host resolves.

        Raises:
            HostResolutionError: The name did not resolve in time.
            PortInUseError: This process is rank 0, and another process listens on the main port.
        """
        return self._rendezvous

    @property
    def main_port(self) -> int:
        """Port of rank 0, the same on every host."""
        return self._main_port

    def world_size(self) -> int:
        """Processes on all trainer hosts together; data hosts do not count."""
        return self._world_size or self._launch.world_size or 1

    def set_world_size(self, size: int) -> None:
        """Take the world size that Lightning computed, prepare the network variables and print the table of hosts.

        Args:
            size: ``num_nodes`` x ``devices``.

        Raises:
            TopologyError: The size does not fit the trainer hosts or the launcher; the message has the table.
        """
        first_time = self._world_size is None
        self._check_world_size(size)
        self._world_size = size
        if first_time:
            self._export_interface()
            if self.global_rank() == 0:
                logger.info("%s", self._report(size // self.num_nodes))

    def global_rank(self) -> int:
        """Rank of this process among all trainer processes."""
        if self._global_rank is not None:
            return self._global_rank
        return self._node_rank * (self._launch.devices or 1) + self._launch.local_rank

    def set_global_rank(self, rank: int) -> None:
        """Take the rank that Lightning computed from node rank and local rank.

        Args:
            rank: node rank x devices + local rank.
        """
        self._global_rank = rank
        _set_logging_rank(rank)

    def local_rank(self) -> int:
        """Rank of this process on its host."""
        return self._launch.local_rank

    def node_rank(self) -> int:
        """Position of this host among the trainer hosts."""
        return self._node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's settings against the cluster, before any process is started.

        Args:
            num_devices: Processes on each host.
            num_nodes: Trainer hosts.

        Raises:
            TopologyError: They contradict the cluster; the message has the table of hosts.
        """
        if num_nodes != self.num_nodes:
            raise TopologyError(
                f"Trainer(num_nodes={num_nodes}) does not match the job, which has {self.num_nodes} trainer host(s) "
                f"({self._topology.source}).\n{self._topology.table()}\nSet num_nodes={self.num_nodes} or leave it out."
            )
        if self.devices is not None and num_devices != self.devices:
            decided_by = self._launch.launcher.value if self._launch.devices else "LIGHTNING_SM_DEVICES"
            raise TopologyError(
                f"Trainer(devices={num_devices}) does not match the {self.devices} process(es) on each host that "
                f"{decided_by} decided on.\n{self._topology.table(self.devices)}\n"
                f"Set devices={self.devices} or leave it out."
            )

    def _disown_stray_variables(self) -> None:
        """Remove rank variables of unknown origin, which Lightning, torch and other libraries would believe."""
        own_pid = str(os.getpid())
        if self._launch.launcher is Launcher.LIGHTNING or os.environ.get(PARENT_VARIABLE) == own_pid:
            return
        strays = stray_variables(os.environ, self._launch)
        if strays:
            stated = ", ".join(f"{name}={os.environ[name]}" for name in strays)
            logger.warning("Ignoring %s: not set by SageMaker or by the launcher of this process.", stated)
        for name in strays:
            del os.environ[name]
        if self._launch.launcher is Launcher.PLAIN:
            os.environ[PARENT_VARIABLE] = own_pid

    def _check_launcher_world(self) -> None:
        devices, world_size = self._launch.devices, self._launch.world_size
        if devices is not None and world_size is not None and world_size != devices * self.num_nodes:
            raise TopologyError(
                f"{self._launch.launcher.value} started {world_size} processes, {devices} on this host, but the job "
                f"has {self.num_nodes} trainer host(s), which makes {devices * self.num_nodes} "
                f"({self._topology.source}).\n{self._topology.table(devices)}\n"
                f"Start {self._launch.launcher.value} over all trainer hosts with the same number of processes on each."
            )

    def _check_world_size(self, size: int) -> None:
        started = self._launch.world_size
        if size % self.num_nodes or (started is not None and size != started):
            by_launcher = f", and {self._launch.launcher.value} started {started} processes" if started else ""
            raise TopologyError(
                f"Trainer(num_nodes x devices) makes {size} processes, but the job has {self.num_nodes} trainer "
                f"host(s) ({self._topology.source}){by_launcher}.\n{self._topology.table(self._launch.devices)}\n"
                f"Set num_nodes={self.num_nodes} and the same number of devices on every host."
            )

    def _mpi_main_host(self) -> str:
        """The host of rank 0. mpirun's host order need not be ours: the toolkit takes the service's shuffled list."""
        own, position = self._job.current_host, self._topology.trainer_hosts.index
        try:
            mpi = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError):  # RuntimeError: mpi4py is there, but no MPI library that it can load
            pass
        else:
            return str(mpi.COMM_WORLD.bcast(own, root=0))
        # The toolkit's mpirun hands rank 0's SM_* variables to all ranks; the job's file is each host's own.
        stated = os.environ.get("SM_CURRENT_HOST")
        if stated and stated != own and self._topology.role_of(stated) is Role.TRAINER:
            return stated
        if own in self._topology.trainer_hosts and position(own) == self._node_rank:
            return self._topology.main_host
        return own

    @cached_property
    def _rendezvous(self) -> str:
        if self._launch.main_address is not None:
            return self._launch.main_address
        missing = [host for host in (self._main_host, *self._topology.trainer_hosts) if not self._resolves(host)]
        if self._main_host in missing:
            self._wait_for_main_host(missing)
        if self.global_rank() == 0 and not torch.distributed.is_initialized():
            self._check_port_is_free()
        return self._job.addresses.get(self._main_host, self._main_host)

    def _wait_for_main_host(self, missing: Sequence[str]) -> None:
        deadline = time.monotonic() + self._resolve_timeout_s
        delay_s = _FIRST_DELAY_S
        pause = threading.Event()
        while not self._resolves(self._main_host):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise HostResolutionError(
                    f"The main host {self._main_host!r} did not resolve within {self._resolve_timeout_s:.0f} s; hosts "
                    f"without an address: {sorted(set(missing))}.\n{self._topology.table()}\n"
                    "If the hosts start later than that, raise SageMakerEnvironment(resolve_timeout_s=...)."
                )
            logger.info(
                "Waiting for the names of hosts %s to resolve (main host: %s; %.0f s left).",
                ", ".join(sorted(set(missing))),
                self._main_host,
                remaining_s,
            )
            pause.wait(min(delay_s, remaining_s))
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            missing = [host for host in missing if not self._resolves(host)]

    def _resolves(self, host: str) -> bool:
        try:
            socket.getaddrinfo(self._job.addresses.get(host, host), None)
        except socket.gaierror:
            return False
        return True

    def _check_port_is_free(self) -> None:
        """Fail at once on a taken port; torch would leave the other hosts waiting for half an hour."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", self._main_port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                raise PortInUseError(
                    f"Port {self._main_port}, on which rank 0 must listen on host {self._main_host!r}, cannot be used "
                    f"({os.strerror(error.errno)}). Set LIGHTNING_SM_MAIN_PORT to a free port, the same on every host."
                ) from error

    def _export_interface(self) -> None:
        """Point NCCL and Gloo at the job's interface, if this host has it (SDK v3 names one that no host has)."""
        interface = self._job.network_interface
        if interface is None:
            return
        exists = interface in {name for _, name in socket.if_nameindex()}
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if exists:
                os.environ.setdefault(variable, interface)
            elif os.environ.get(variable) == interface:
                del os.environ[variable]
                logger.warning("Ignoring %s=%s: this host has no such interface.", variable, interface)

    def _report(self, devices: int) -> str:
        versions = {
            "lightning_sm": lightning_sm.__version__,
            DISTRIBUTION: sys.modules[DISTRIBUTION].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        return (
            f"{self._topology.table(devices)}\n"
            f"job {self._job.name or '(no name)'}, {self._launch.launcher.value}, "
            f"main address {self._main_host}:{self._main_port}, interface {self._job.network_interface or '(none)'}\n"
            f"{', '.join(f'{name} {number}' for name, number in versions.items())}"
        )


def _set_logging_rank(rank: int) -> None:
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning keeps it on the function, too
