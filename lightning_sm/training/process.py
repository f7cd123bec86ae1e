"""The preparation of a process that runs the script in a job: variables, host table, failure reports, a clean exit."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from lightning_sm._collector import freeze_imports
from lightning_sm._lightning import DISTRIBUTION, rank_zero_only
from lightning_sm._log import show_log_lines
from lightning_sm._untested import GPUS
from lightning_sm._version import __version__
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.failure_file import report_failures
from lightning_sm.job.rank_starter import RankStarter, host_variables, stray_variables
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import RANK_ZERO_PID
from lightning_sm.training.environment import SageMakerEnvironment
from lightning_sm.training.group_exit import leave_at_exit, stay_at_exit

logger = logging.getLogger(__name__)


def prepare_host(job: SageMakerJob) -> tuple[Topology, SageMakerEnvironment | None]:
    """Prepare this process for its host's role.

    Args:
        job: The job.

    Returns:
        The job's layout, and the cluster environment; None on a data host.
    """
    report_failures()
    freeze_imports()
    topology = Topology.from_job(job)
    if topology.role is Role.DATA:
        show_log_lines()
        return topology, None
    environment = SageMakerEnvironment(job)
    prepare_process(environment)
    return topology, environment


def prepare_process(environment: SageMakerEnvironment) -> PreparedProcess:
    """Set up everything that a training process needs besides its ranks.

    ``SageMakerCLI``, ``SageMakerTrainer`` and ``SageMakerFabric`` call this function. If you pass the environment to a
    plain ``Trainer``, call it in every process, before you create the Trainer. The function

    - shows the log lines of ``lightning_sm``, and the host table once Lightning has asked for ranks;
    - removes rank variables that neither SageMaker nor the launcher has set, and logs a warning;
    - sets the rank that Lightning's log functions use;
    - reports to the launcher an exception that ends this process;
    - points NCCL and Gloo at the job's network interface;
    - while Lightning runs, sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK`` as torchrun would;
    - destroys the process group at exit.

    Further calls with other environments in the same process change only the rank.

    Args:
        environment: The environment to pass to the Trainer.

    Returns:
        The prepared process, the same in every call.
    """
    process = PreparedProcess.current
    if process is None:
        process = PreparedProcess.current = PreparedProcess(environment)
    process.follow(environment)
    return process


class PreparedProcess:
    """The changes that ``prepare_process`` makes in this process, immediately and while Lightning runs.

    Workers of ddp_spawn and ddp_fork get a copy of this object along with the environment. The copy sets the rank
    variables, and arranges for the process group to be destroyed at exit after a successful run.

    Args:
        environment: The first environment of the process.

    Attributes:
        current: The instance for this process.
    """

    current: ClassVar[PreparedProcess | None] = None

    def __init__(self, environment: SageMakerEnvironment) -> None:
        self._environment = environment
        self._pid = os.getpid()
        self._is_announced = False
        self._after_run = ExitStack()
        show_log_lines()
        self._report_failures()
        self._remove_stray_variables()
        self._export_interface()
        leave_at_exit()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, which has no rank variables to restore yet."""
        return {**vars(self), "_after_run": ExitStack()}

    def follow(self, environment: SageMakerEnvironment) -> None:
        """Use an environment's rank, and listen to its runs.

        Args:
            environment: The environment.
        """
        self._environment = environment
        environment.listener = self
        # Set the rank now: until the Trainer exists, Lightning derives it from LOCAL_RANK, and would log once per host.
        rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]

    def announce(self, environment: SageMakerEnvironment, devices: int) -> None:
        """Log the host table, once per process.

        With one host and one device, Lightning never asks for ranks, so this method sets the rank variables.

        Args:
            environment: The environment that the Trainer uses.
            devices: Number of processes on each trainer host.
        """
        if self._is_announced:
            return
        self._is_announced = True
        if environment.num_nodes * devices == 1:
            self._export_ranks(environment, 1)
        _report(environment, devices)

    def begin_run(self, environment: SageMakerEnvironment, world_size: int) -> None:
        """Set torchrun's rank variables after Lightning has asked for ranks.

        Args:
            environment: The environment that Lightning uses.
            world_size: The total number of processes.
        """
        if self._pid != os.getpid():
            self._report_failures()
        self.announce(environment, world_size // environment.num_nodes)
        # Set nothing before Lightning has started the other local ranks, which would inherit this process's rank.
        if environment.creates_processes_externally:
            self._export_ranks(environment, world_size)

    def end_run(self) -> None:
        """Restore the rank variables, as Lightning's own environment restores WORLD_SIZE.

        In a worker of ddp_spawn, Lightning calls this only after success, so the other ranks still run when the group
        is destroyed.
        """
        self._after_run.close()
        if self._pid != os.getpid():
            leave_at_exit()

    def _report_failures(self) -> None:
        reporter = report_failures()
        if reporter is not None:
            reporter.rank = lambda: rank_of_several(self._environment)
            reporter.on_failure = stay_at_exit

    def _remove_stray_variables(self) -> None:
        """Remove rank variables of unknown origin, which Lightning, torch and other libraries would trust."""
        environment = self._environment
        start = environment.start
        if start.launcher is RankStarter.LIGHTNING:
            return
        strays = stray_variables(os.environ, start, host_variables(environment.job, environment.topology))
        if strays:
            settings = ", ".join(f"{name}={os.environ[name]}" for name in strays)
            logger.warning("Ignoring %s: not set by SageMaker or by the launcher of this process.", settings)
        for name in strays:
            del os.environ[name]
        if start.launcher not in (RankStarter.TORCHRUN, RankStarter.LAUNCHER):
            os.environ[RANK_ZERO_PID.name] = str(os.getpid())

    def _export_interface(self) -> None:
        """Point NCCL and Gloo at the job's interface if this host has it (SDK v3 names one that never exists)."""
        interface = self._environment.job.network_interface
        if interface is None:
            return
        for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            if _has_interface(interface):
                os.environ.setdefault(variable, interface)
            elif os.environ.get(variable) == interface:
                del os.environ[variable]
                logger.warning("Ignoring %s=%s: this host has no such interface.", variable, interface)

    def _export_ranks(self, environment: SageMakerEnvironment, world_size: int) -> None:
        """Set torchrun's rank variables, for code that does not query the process group.

        Lightning sets neither RANK nor LOCAL_WORLD_SIZE, but does set LOCAL_RANK. This method must not set LOCAL_RANK:
        Lightning would conclude that the local ranks are already running.

        Source:
            Some libraries read the variables, even in DataLoader workers, which have no process group: WebDataset 1.0
            (utils.pytorch_worker_info) reads RANK and WORLD_SIZE; MosaicML Streaming 0.13 (base/distributed.py) reads
            both and LOCAL_WORLD_SIZE; LitData 0.2 (utilities/env.py) reads WORLD_SIZE. s3torchconnector 1.5 queries
            torch.distributed instead.
        """
        _set_variable(self._after_run, "RANK", str(environment.global_rank()))
        _set_variable(self._after_run, "WORLD_SIZE", str(world_size))
        _set_variable(self._after_run, "LOCAL_WORLD_SIZE", str(world_size // environment.num_nodes))
        _set_variable(self._after_run, "GROUP_RANK", str(environment.node_rank()))
        if environment.start.launcher is RankStarter.MPI:  # mpirun does not set it
            _set_variable(self._after_run, "LOCAL_RANK", str(environment.local_rank()))


def _set_variable(undo: ExitStack, name: str, value: str) -> None:
    """Set an environment variable until ``undo`` is closed."""
    undo.callback(_assign_variable, name, os.environ.get(name))
    os.environ[name] = value


def _assign_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def rank_of_several(environment: SageMakerEnvironment) -> int | None:
    """Return the rank of this process, even before the Trainer exists; None if its host runs no other training process.

    Args:
        environment: The environment of the process.
    """
    if not environment.creates_processes_externally:
        return None
    devices = environment.devices or int(os.environ.get("WORLD_SIZE", "1")) // environment.num_nodes  # set by Lightning
    return environment.node_rank() * devices + environment.local_rank() if devices > 1 else None


def _report(environment: SageMakerEnvironment, devices: int) -> None:
    start, job, topology = environment.start, environment.job, environment.topology
    launcher, host, rank = start.launcher.value, job.current_host, environment.node_rank()
    if rank != topology.node_rank and environment.local_rank() == 0:
        logger.info("%s orders the hosts differently from the table: host %s has node rank %d.", launcher, host, rank)
    if environment.global_rank() != 0:
        return
    if job.num_gpus:
        logger.warning("%s", GPUS)
    interface = job.network_interface
    if interface is not None and not _has_interface(interface):
        interface += " (not on this host)"
    logger.info(
        "%s\njob %s, %s, main address %s:%d, interface %s\nlightning_sm %s, %s %s, torch %s, python %s",
        topology.table(devices, is_short=True),
        job.name or "(no name)",
        launcher,
        start.main_address or environment.main_host,
        environment.main_port,
        interface or "(none)",
        __version__,
        DISTRIBUTION,
        sys.modules[DISTRIBUTION].__version__,
        torch.__version__,
        platform.python_version(),
    )


def _has_interface(interface: str) -> bool:
    return interface in {name for _, name in socket.if_nameindex()}
