"""Emulated hosts that run as processes on this machine: each is a launcher and its descendants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from lightning_sm._linux import LOOPBACK_INTERFACE, adopt_orphans, handles_signal, loopback_addresses, require_linux
from lightning_sm.emulator import own_disk
from lightning_sm.emulator.guard import guarded
from lightning_sm.emulator.hosts import EmulatedHost, HostRuntime
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.ports import reserve_ports
from lightning_sm.emulator.processes import is_alive, processes_of_job, signal_process, variable_of
from lightning_sm.emulator.script import check_script
from lightning_sm.emulator.spec import ClusterSpec, LocalHost
from lightning_sm.errors import ScriptError
from lightning_sm.job.rank_starter import RANK_VARIABLES
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import HOST_ADDRESSES, HOST_FOLDER, INSTALL_REQUIREMENTS, PREFIX, Install

# Time limit for processes to exit after SIGKILL. Only processes blocked on a disk or a network file system need it.
_KILL_S = 5.0
# Time limit for processes to stop after SIGSTOP. A process that waits for a stopped child to start a program never
# stops.
_FREEZE_S = 1.0
_POLL_S = 0.01
# Interval in seconds between checks for processes that are still alive after SIGKILL.
_LEFT_POLL_S = 0.1
# Variables that a launcher, a toolkit or another job may have left in this shell. They would mislead the hosts.
_LEAKING_PREFIXES = (PREFIX, "MASTER_", "OMPI_", "PMI", "SAGEMAKER_", "SLURM_", "SM_", "TORCHELASTIC_", "TRAINING_JOB_")
_LEAKING_NAMES = frozenset({"CURRENT_HOST", "PL_GLOBAL_SEED", *RANK_VARIABLES})


class ProcessHost(EmulatedHost):
    """A host that consists of a launcher and its descendants; see ``EmulatedHost``.

    Args:
        host: The host to start.
        command: Training script and its arguments.
        output: Receives the host's output.
        changed: Event to set when the launcher has exited.
    """

    def __init__(self, host: LocalHost, command: Sequence[str], output: Output, changed: threading.Event) -> None:
        self._frozen: list[psutil.Process] = []
        launcher = [sys.executable, "-m", "lightning_sm", "train", *command]
        on_own_disk = own_disk.command(host.folder.parent, host.folder, launcher)
        super().__init__(host, on_own_disk, host.env, output, changed)

    @property
    def was_killed(self) -> bool:
        """Whether a signal killed the launcher."""
        return (self.process.returncode or 0) < 0

    def listens(self) -> bool:
        """Return whether the launcher handles or blocks SIGTERM; see ``EmulatedHost``."""
        return handles_signal(self.process.pid, signal.SIGTERM, or_blocks=True) is not False

    def terminate(self) -> None:
        """Send SIGTERM to the launcher, whether or not it has a handler."""
        self.process.terminate()

    def kill_launcher(self) -> None:
        """Send SIGKILL to the launcher only."""
        self.process.kill()

    def kill_process(self, pid: int) -> None:
        """Send SIGKILL to one process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()

    def freeze(self) -> None:
        """Send SIGSTOP to all processes of the host, including those that are being created."""
        deadline = time.monotonic() + _FREEZE_S
        while time.monotonic() < deadline:
            new = [process for process in self._processes() if process not in self._frozen]
            for process in new:
                signal_process(process, psutil.Process.suspend)
            self._frozen += new
            # A process that was forking when the signal arrived stops only after its child exists, so look again.
            if not new and all(_is_stopped(process) for process in self._frozen):
                return
            if not new:
                time.sleep(_POLL_S)  # the kernel does not announce when other processes' children stop or die

    def thaw(self) -> None:
        """Send SIGCONT to all frozen processes."""
        for process in self._frozen:
            signal_process(process, psutil.Process.resume)
        self._frozen = []

    def kill(self) -> None:
        """Freeze all processes of the host, so that none sees another one die, then send them SIGKILL."""
        self.freeze()
        deadline = time.monotonic() + _KILL_S
        while (left := self._processes()) and time.monotonic() < deadline:
            for process in left:
                signal_process(process, psutil.Process.kill)
            time.sleep(_POLL_S)
        self.waiter.join(timeout=_KILL_S)  # wait for the exit code

    def _processes(self) -> list[psutil.Process]:
        """Return all live processes of the host, including orphans and those in other sessions."""
        below: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            if self.ended_at is None:
                below = {launcher, *launcher.children(recursive=True)}
        # Orphans belong to the host whose folder is in their environment.
        others = [process for process in processes_of_job(self.host.folder.parent) if process not in below]
        mine = [process for process in others if variable_of(process, HOST_FOLDER.name) == str(self.host.folder)]
        return [process for process in (*below, *mine) if is_alive(process)]


class ProcessRuntime(HostRuntime):
    """Runs a job's hosts as processes on this machine, which share its network and CPUs."""

    interface = LOOPBACK_INTERFACE

    def __init__(self) -> None:
        self._spared: set[int] = set()

    def check_command(self, command: Sequence[str]) -> None:
        """Reject a command whose script is missing or cannot start.

        Raises:
            ScriptError: The script is missing, has an unknown file type, or cannot be read or parsed.
        """
        if not command:
            raise ScriptError(
                "No training script was given. Example: lightning-sm local --group trainer=2 -- app/train.py fit"
            )
        check_script(command[0])

    def system_variables(self, spec: ClusterSpec) -> dict[str, str]:
        """Return this process's environment, without GPUs and variables of other jobs, plus all hosts' addresses."""
        hosts = spec.host_names
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _LEAKING_NAMES and not name.startswith(_LEAKING_PREFIXES)
        }
        return {
            **inherited,
            "CUDA_VISIBLE_DEVICES": "",
            # Turn off Apple's GPU (see Lightning's accelerators/mps.py): Lightning refuses to use it on several hosts.
            "DISABLE_MPS": "1",
            "SM_NUM_GPUS": "0",
            "PYTHONUNBUFFERED": "1",
            HOST_ADDRESSES.name: json.dumps(dict(zip(hosts, loopback_addresses(len(hosts)), strict=True))),
            # Do not install packages into this Python unless the user asks for it.
            INSTALL_REQUIREMENTS.name: Install.NEVER.value,
        }

    def host_environment(self, folder: Path) -> dict[str, str]:
        """Return the variables with the paths of a host's folder, as seen by the host and by the emulator."""
        return {"SAGEMAKER_BASE_DIR": str(self.base_dir(folder)), HOST_FOLDER.name: str(folder)}

    def base_dir(self, folder: Path) -> Path:
        """Return the path at which a host sees its folder; all hosts see the same path if they have separate disks."""
        return own_disk.base_dir(folder.parent, folder)

    def add_channel(self, path: Path, source: Path) -> None:
        """Create a symbolic link to the channel's folder."""
        path.symlink_to(source.absolute(), target_is_directory=True)

    def reserve(self, topology: Topology) -> contextlib.ExitStack:
        """Reserve the ports of a job; see ``HostRuntime``."""
        if topology.data_hosts:
            require_linux(
                f"A cluster with data hosts ({', '.join(topology.data_hosts)})",
                "Leave the data groups out, or run it in Linux containers: lightning-sm local --image IMAGE.",
            )
        return reserve_ports(topology)

    def shared_disk_reason(self) -> str:
        """Return why hosts can read each other's folders on this system, or an empty string if they cannot."""
        return own_disk.obstacle()

    @contextlib.contextmanager
    def running(self, job_dir: Path) -> Iterator[None]:
        """Run a job under its guard, and adopt the processes that its hosts leave behind, such as daemons."""
        with guarded(job_dir):
            self._spared = {process.pid for process in psutil.Process().children(recursive=True)}
            adopt_orphans(True)
            try:
                yield
            finally:
                adopt_orphans(False)

    def clear(self, job_dir: Path, hosts: Sequence[EmulatedHost]) -> None:
        """Kill all processes that the hosts left behind, until none remain or a time limit is reached."""
        launchers = {host.process.pid: host.waiter for host in hosts}  # reaped by their own threads
        deadline = time.monotonic() + _KILL_S
        while time.monotonic() < deadline:
            left = [process for process in processes_of_job(job_dir) if process.pid not in self._spared]
            if not left:
                return
            for process in left:
                signal_process(process, psutil.Process.kill)
            psutil.wait_procs([process for process in left if process.pid not in launchers], timeout=_LEFT_POLL_S)
            for process in left:
                if process.pid in launchers:
                    launchers[process.pid].join(timeout=_LEFT_POLL_S)

    def start(self, host: LocalHost, command: Sequence[str], output: Output, changed: threading.Event) -> ProcessHost:
        """Start a host's launcher; see ``HostRuntime``."""
        return ProcessHost(host, command, output, changed)


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
