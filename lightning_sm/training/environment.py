"""SageMakerEnvironment: Lightning's cluster environment for a SageMaker job (main address, ranks, world size)."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import platform
import socket
import sys
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from lightning_sm._lightning import DISTRIBUTION, ClusterEnvironment, rank_zero_only
from lightning_sm._log import show_log_lines
from lightning_sm._version import __version__
from lightning_sm.errors import JobConfigError, TopologyError
from lightning_sm.job.control_folder import leave_warning
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rank_starter import RankStart, RankStarter, stray_variables
from lightning_sm.job.rendezvous import RESOLVE_TIMEOUT_S, check_port_is_free, wait_for_host
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import DEVICES, RANK_ZERO_PID
from lightning_sm.training.rank_marks import mark_errors

logger = logging.getLogger(__name__)

_DEVICES_SETTING = f"{DEVICES.name} (lightning-sm local --devices)"


class SageMakerEnvironment(ClusterEnvironment):
    """The cluster environment of a SageMaker training job.

    It supports one plain process per host (Lightning then starts the local ranks), ``torchrun`` on every host, and
    ``mpirun``. ``SageMakerCLI`` adds it to the Trainer; without the CLI::

        environment = SageMakerEnvironment()
        Trainer(plugins=[environment], num_nodes=environment.num_nodes)

    Every trainer process must build one: in an mpirun script that uses mpi4py, building it is a collective call.

    Args:
        job: The facts of the job. Default: read from this host.
        main_port: Port on which rank 0 listens, unless torchrun chose one. Default: ``LIGHTNING_SM_MAIN_PORT``, else
            derived from the job.
        resolve_timeout_s: Seconds to wait for the main host's name to resolve.

    Raises:
        JobConfigError: This is not a host of a SageMaker job, or the job's files are malformed.
        TopologyError: The hosts contradict each other or the launcher, or this host serves data.
    """

    # Class variables: they hold for the process, which may build several environments and Trainers.
    _consulted: ClassVar[bool] = False  # Lightning has asked for ranks; see report_if_alone
    _announced: ClassVar[bool] = False

    def __init__(
        self,
        job: SageMakerJob | None = None,
        *,
        main_port: int | None = None,
        resolve_timeout_s: float = RESOLVE_TIMEOUT_S,
    ) -> None:
        super().__init__()
        show_log_lines()
        job = job or SageMakerJob.from_environment()
        if job is None:
            raise JobConfigError(
                "This is not a SageMaker host: found neither /opt/ml/input/config/resourceconfig.json "
                "(SAGEMAKER_BASE_DIR moves /opt/ml) nor SM_HOSTS. Use SageMakerEnvironment in SageMaker jobs only: "
                "SageMakerEnvironment.detect() returns whether this is one."
            )
        self._launch = RankStart.detect(os.environ, os.getppid())
        is_mpi = self._launch.launcher is RankStarter.MPI
        self._job = job
        # The port derives from the job's name, and mpirun may start ranks of other hosts without TRAINING_JOB_NAME.
        self._topology = Topology.from_job(replace(job, name=None) if is_mpi else job)
        node_rank = self._topology.node_rank  # raises on a data host, also where the launcher states a node rank
        self._node_rank = node_rank if self._launch.node_rank is None else self._launch.node_rank
        # torchrun's port comes first: its agent already listens there.
        self._main_port = self._launch.main_port or main_port or self._topology.main_port
        self._resolve_timeout_s = resolve_timeout_s
        self._remove_stray_variables()
        self._check_launcher_world()
        self._main_host = self._mpi_main_host() if is_mpi else self._topology.main_host
        self._global_rank: int | None = None
        self._world_size: int | None = None
        # Until the Trainer exists, Lightning derives the rank from LOCAL_RANK alone, and would log once per host.
        _set_logging_rank(self.global_rank())
        mark_errors(self._rank_of_several)
        if self.num_nodes > 1:
            atexit.register(report_if_alone, self._topology)

    @staticmethod
    def detect() -> bool:
        """Whether this process runs on a host of a SageMaker job.

        Raises:
            JobConfigError: This is a SageMaker host, but the job's files are malformed.
        """
        return SageMakerJob.from_environment() is not None

    @property
    def num_nodes(self) -> int:
        """Number of trainer hosts, for ``Trainer(num_nodes=...)``."""
        return self._topology.num_nodes

    @property
    def devices(self) -> int | None:
        """Processes on each trainer host if torchrun, mpirun or ``LIGHTNING_SM_DEVICES`` sets them, else None."""
        return self._launch.devices or self._job.devices

    @property
    def topology(self) -> Topology:
        """Roles and ranks of all hosts."""
        return self._topology

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the local ranks are already running: another launcher or Lightning itself started them.

        Lightning sets ``LOCAL_RANK`` when it starts them; ``__init__`` has removed stray values.
        """
        return self._launch.launcher is not RankStarter.PLAIN or "LOCAL_RANK" in os.environ

    @cached_property
    def main_address(self) -> str:
        """Address of rank 0. The first access waits until the name of its host resolves.

        Raises:
            HostResolutionError: The name did not resolve in time.
            PortInUseError: This process is rank 0, and another process listens on the main port.
        """
        if self._launch.main_address is not None:
            return self._launch.main_address
        wait_for_host(
            self._main_host,
            self._topology,
            self._job.addresses,
            self._resolve_timeout_s,
            is_reporter=self.local_rank() == 0,
        )
        if self.global_rank() == 0 and not torch.distributed.is_initialized():
            check_port_is_free(self._main_port, self._main_host)
        return self._job.addresses.get(self._main_host, self._main_host)

    @property
    def main_port(self) -> int:
        """Port of rank 0, the same on every host."""
        return self._main_port

    def world_size(self) -> int:
        """Total number of processes on all trainer hosts, without data hosts."""
        return self._world_size or self._launch.world_size or 1

    def set_world_size(self, size: int) -> None:
        """Take the world size that Lightning computed. The first call in a process also calls ``announce``.

        Lightning calls it when it makes the Trainer, and again when it has started the other local ranks; from then on,
        torchrun's variables tell the user's code which rank this is.

        Args:
            size: ``num_nodes`` x ``devices``.

        Raises:
            TopologyError: The size contradicts the trainer hosts or the launcher; the message has the table of hosts.
        """
        self._check_world_size(size)
        is_spawned_copy = self._world_size is not None
        self._world_size = size
        SageMakerEnvironment._consulted = True
        if not is_spawned_copy:
            self.announce(size // self.num_nodes)
        # Not before Lightning has started the other local ranks, which would inherit the rank of this process.
        if self.creates_processes_externally:
            self._export_ranks(size)

    def announce(self, devices: int) -> None:
        """Set the network variables and log the table of hosts, once per process.

        ``SageMakerCLI`` calls it, too, because with one host and one device Lightning never asks for ranks.

        Args:
            devices: Processes on each trainer host.
        """
        if SageMakerEnvironment._announced:
            return
        SageMakerEnvironment._announced = True
        leave_at_exit()
        self._export_interface()
        if self.num_nodes * devices == 1:
            self._export_ranks(1)
        self._report(devices)

    def global_rank(self) -> int:
        """Rank of this process among all training processes."""
        if self._global_rank is not None:
            return self._global_rank
        return self._node_rank * (self.devices or 1) + self.local_rank()

    def _rank_of_several(self) -> int | None:
        """The rank of this process, also before the Trainer exists; None while its host has no other."""
        if not self.creates_processes_externally:
            return None
        devices = self.devices or int(os.environ.get("WORLD_SIZE", "1")) // self.num_nodes  # set by Lightning
        return self._node_rank * devices + self.local_rank() if devices > 1 else None

    def set_global_rank(self, rank: int) -> None:
        """Take the rank that Lightning computed.

        Args:
            rank: node rank x devices + local rank.
        """
        self._global_rank = rank
        _set_logging_rank(rank)

    def local_rank(self) -> int:
        """Rank of this process on its host."""
        if self._launch.launcher in (RankStarter.PLAIN, RankStarter.LIGHTNING):
            # Read at each call: workers of ddp_spawn and ddp_fork inherit this object and get their ranks later.
            return int(os.environ.get("LOCAL_RANK", self._launch.local_rank))
        return self._launch.local_rank

    def node_rank(self) -> int:
        """Index of this host among the trainer hosts."""
        return self._node_rank

    def teardown(self) -> None:
        """Make a worker of ddp_spawn, which never calls ``announce``, leave its process group at exit.

        In such a worker, Lightning calls this after success only; after a failure, the peers may be gone.
        """
        if not SageMakerEnvironment._announced:
            leave_at_exit()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the Trainer's settings against the cluster, before any process is started.

        Args:
            num_devices: Processes on each trainer host.
            num_nodes: Number of trainer hosts.

        Raises:
            TopologyError: They contradict the cluster; the message has the table of hosts.
        """
        if num_nodes != self.num_nodes:
            raise TopologyError(
                f"Trainer(num_nodes={num_nodes}) does not match the number of trainer hosts in the job, "
                f"{self.num_nodes} ({self._topology.source}).\n{self._topology.table()}\n"
                f"Set num_nodes={self.num_nodes}, or use SageMakerCLI and leave num_nodes out."
            )
        if self.devices is not None and num_devices != self.devices:
            set_by = self._launch.launcher.value if self._launch.devices else _DEVICES_SETTING
            raise TopologyError(
                f"Trainer(devices={num_devices}) does not match the number of processes on each host, "
                f"{self.devices}, set by {set_by}.\n{self._topology.table(self.devices)}\n"
                f"Set devices={self.devices}, or use SageMakerCLI and leave devices out."
            )

    def _remove_stray_variables(self) -> None:
        """Remove rank variables of unknown origin, on which Lightning, torch and other libraries would rely."""
        own_pid = str(os.getpid())
        if self._launch.launcher is RankStarter.LIGHTNING or os.environ.get(RANK_ZERO_PID.name) == own_pid:
            return
        strays = stray_variables(os.environ, self._launch)
        if strays:
            stated = ", ".join(f"{name}={os.environ[name]}" for name in strays)
            logger.warning("Ignoring %s: not set by SageMaker or by the launcher of this process.", stated)
        for name in strays:
            del os.environ[name]
        if self._launch.launcher is not RankStarter.TORCHRUN:
            os.environ[RANK_ZERO_PID.name] = own_pid

    def _check_launcher_world(self) -> None:
        launcher = self._launch.launcher
        devices = self._launch.devices
        world_size = self._launch.world_size
        if devices is None or world_size is None or world_size == devices * self.num_nodes:
            return
        advice = ""
        groups = [group.name for group in self._job.groups if set(group.hosts) & set(self._topology.trainer_hosts)]
        is_one_group = world_size // devices == len(self._job.current_group.hosts)
        if launcher is RankStarter.TORCHRUN and len(groups) > 1 and is_one_group:
            # sagemaker 2.257.7, pytorch/estimator.py, _pytorch_distribution_configuration: with torch_distributed, the
            # names of the groups are not sent; with mpi they are.
            names = ", ".join(f'"{name}"' for name in groups)
            advice = (
                " Each instance group seems to run its own torchrun, because the SDK does not send the instance_groups "
                "of distribution with torch_distributed. Send them with "
                f'hyperparameters={{"sagemaker_distribution_instance_groups": [{names}]}}.'
            )
        raise TopologyError(
            f"{launcher.value} set world size {world_size} and local world size {devices}, but the job needs world "
            f"size {devices * self.num_nodes}: trainer hosts x local world size = {self.num_nodes} x {devices} "
            f"({self._topology.source}).\n{self._topology.table(devices)}\n"
            f"Start {launcher.value} on all trainer hosts with the same number of processes on each.{advice}"
        )

    def _check_world_size(self, size: int) -> None:
        """Raise where ranks would hang. Before ddp_spawn, and FSDP with torchrun, Lightning calls no other check."""
        per_host, rest = divmod(size, self.num_nodes)
        expected_rank = self._node_rank * per_host + self.local_rank()
        if rest or self.devices not in (None, per_host) or self._global_rank not in (None, expected_rank):
            devices = f", processes on each: {self.devices}" if self.devices else ""
            raise TopologyError(
                f"Trainer(num_nodes, devices) gives world size {size} and rank {self.global_rank()} to this process, "
                f"which contradicts the job (trainer hosts: {self.num_nodes}{devices}; {self._topology.source}).\n"
                f"{self._topology.table(self.devices)}\n"
                f"Set num_nodes={self.num_nodes} and the same number of devices on every host."
            )

    def _mpi_main_host(self) -> str:
        """Find the host of rank 0: mpirun may order the hosts as in the service's shuffled list, unlike our table."""
        own = self._job.current_host
        hosts = self._topology.trainer_hosts
        if "mpi4py" in sys.modules:
            # Used only if the script or "python -m mpi4py" (the toolkit's command) has imported it: importing it here
            # would register MPI_Finalize at exit, where a failing rank and the others wait for each other.
            mpi = importlib.import_module("mpi4py.MPI")
            if mpi.COMM_WORLD.Get_size() == self._launch.world_size:  # else it loaded the library of another MPI
                return str(mpi.COMM_WORLD.bcast(own, root=0))
        if self._node_rank == 0:
            return own
        # The toolkit's mpirun passes rank 0's SM_* variables to all ranks; the job's file is each host's own.
        stated = os.environ.get("SM_CURRENT_HOST")
        if stated in hosts and (stated != own or self._job.source.startswith("SM_")):
            return stated
        if hosts.index(own) == self._node_rank:
            return self._topology.main_host
        raise TopologyError(
            f"mpirun gave host {own!r} node rank {self._node_rank}, which is not its position in the table, so the "
            f"host of rank 0 is unknown.\n{self._topology.table(self._launch.devices)}\n"
            "Pass the hosts to mpirun in the order of the table, add -x SM_CURRENT_HOST, or start the script with "
            "python -m mpi4py."
        )

    def _export_ranks(self, world_size: int) -> None:
        """Set the variables by which torchrun tells ranks, for code that asks no process group.

        Lightning sets neither RANK nor LOCAL_WORLD_SIZE. It sets LOCAL_RANK itself, which must not be there before:
        Lightning takes it for a sign that the local ranks are running.

        Source:
            What reads them, also in DataLoader workers, which have no process group: WebDataset 1.0
            (utils.pytorch_worker_info) RANK and WORLD_SIZE, and MosaicML Streaming 0.13 (base/distributed.py) also
            LOCAL_WORLD_SIZE; LitData 0.2 (utilities/env.py) WORLD_SIZE. s3torchconnector 1.5 asks torch.distributed.
        """
        os.environ["RANK"] = str(self.global_rank())
        os.environ["WORLD_SIZE"] = str(world_size)
        os.environ["LOCAL_WORLD_SIZE"] = str(world_size // self.num_nodes)
        os.environ["GROUP_RANK"] = str(self._node_rank)
        if self._launch.launcher is RankStarter.MPI:  # nothing else sets it there
            os.environ["LOCAL_RANK"] = str(self.local_rank())

    def _export_interface(self) -> None:
        """Point NCCL and Gloo at the job's interface, if this host has it (SDK v3 names one that no host has)."""
        interface = self._job.network_interface
        if interface is None:
            return
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if _has_interface(interface):
                os.environ.setdefault(variable, interface)
            elif os.environ.get(variable) == interface:
                del os.environ[variable]
                logger.warning("Ignoring %s=%s: this host has no such interface.", variable, interface)

    def _report(self, devices: int) -> None:
        launcher = self._launch.launcher.value
        if self.local_rank() == 0 and self._node_rank != self._topology.node_rank:
            logger.info(
                "Host %s has node rank %d: %s orders the hosts differently from the table of hosts.",
                self._job.current_host,
                self._node_rank,
                launcher,
            )
        if self.global_rank() != 0:
            return
        interface = self._job.network_interface
        if interface is not None and not _has_interface(interface):
            interface += " (not on this host)"
        logger.info(
            "%s\njob %s, %s, main address %s:%d, interface %s\nlightning_sm %s, %s %s, torch %s, python %s",
            self._topology.table(devices, is_short=True),
            self._job.name or "(no name)",
            launcher,
            self._launch.main_address or self._main_host,
            self._main_port,
            interface or "(none)",
            __version__,
            DISTRIBUTION,
            sys.modules[DISTRIBUTION].__version__,
            torch.__version__,
            platform.python_version(),
        )


def _has_interface(interface: str) -> bool:
    return interface in {name for _, name in socket.if_nameindex()}


def _set_logging_rank(rank: int) -> None:
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # Lightning stores it on the function itself


def report_if_alone(topology: Topology) -> None:
    """Log an error at exit if no Trainer used the environment: with one device, Lightning drops it unread."""
    if SageMakerEnvironment._consulted or hasattr(sys, "last_value"):  # last_value: an exception ended the process
        return
    SageMakerEnvironment._consulted = True  # log it once, also with several environments
    text = (
        f"No Trainer used SageMakerEnvironment. If this process trained, host {topology.current_host} trained alone, "
        f"and so did each of the {topology.num_nodes} trainer hosts ({topology.source}).\n{topology.table()}\n"
        "Set Trainer(num_nodes=environment.num_nodes): with num_nodes=1 and one device, Lightning ignores the cluster. "
        "SageMakerCLI sets it for you."
    )
    # No handler at exit knows the exit code. The launcher does, and shows the text after a success.
    if not leave_warning(text):
        logger.error("%s", text)


def leave_at_exit() -> None:
    """Destroy this process's process group, if it has one by then, before the interpreter shuts down.

    A Gloo thread that drops its last tensor during the shutdown aborts the process (PyTorch pull request 179291; seen
    in 1 of 8 runs of two hosts, and in 1 of 72 with ddp_spawn), and a finished training would count as failed.
    Lightning destroys NCCL's groups itself (``_init_dist_connection``), but not Gloo's.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    # Not after an exception: destroying the group joins Gloo's threads, which wait for peers that may be gone.
    if torch.distributed.is_initialized() and not hasattr(sys, "last_value"):
        torch.distributed.destroy_process_group()
