"""The interfaces of a running host, and of the system that runs it: processes on this machine, or containers."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import ClassVar

from lightning_sm._linux import usable_cpus
from lightning_sm.emulator.agent import UploadAgent
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.spec import ClusterSpec, LocalHost
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.host_keys import new_secret
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DEVICES, PRICES, REPORT_S
from lightning_sm.launcher.pipe import DrainedPipe


class EmulatedHost(ABC):
    """One running host, with threads that read its output and wait until it exits.

    Args:
        host: The host to start.
        command: Command of a local process that has the host's output and exit code.
        env: The environment of that local process.
        output: Receives the host's output.
        changed: Event to set when the host has exited.

    Attributes:
        host: The host's description.
        agent: Uploads the host's checkpoints while it runs, or None.
        process: The local process that has the host's exit code.
        ended_at: When the host exited, as returned by ``time.monotonic``; None while it runs.
        interrupted_at: When the launcher received the SIGTERM of an interruption, or None.
        waiter: The thread that waits until the host exits.
    """

    def __init__(
        self, host: LocalHost, command: Sequence[str], env: Mapping[str, str], output: Output, changed: threading.Event
    ) -> None:
        self.host = host
        self.agent: UploadAgent | None = None
        if host.bucket is not None:
            self.agent = UploadAgent(host.checkpoint_dir, host.bucket, host.name, host.upload_delay_s)
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # let Ctrl-C reach only the emulator, which then stops the hosts
        )
        self.ended_at: float | None = None
        self.interrupted_at: float | None = None
        self._changed = changed
        self._started_at = time.monotonic()
        assert self.process.stdout is not None  # noqa: S101 - a pipe
        self._pipe = DrainedPipe(self.process.stdout)
        self._reader = threading.Thread(target=output.copy, args=(host, self._pipe), daemon=True)
        self._reader.start()
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit code; 128 + n if signal n killed it; None while the host runs."""
        code = self.process.returncode if self.ended_at is not None else None
        return 128 - code if code is not None and code < 0 else code

    @property
    def seconds(self) -> float:
        """How long the host has run, in seconds."""
        return (self.ended_at or time.monotonic()) - self._started_at

    @property
    def seconds_to_exit(self) -> float | None:
        """Seconds from the SIGTERM of an interruption to the launcher's exit; None unless both have happened."""
        if self.interrupted_at is None or self.ended_at is None:
            return None
        return max(0.0, self.ended_at - self.interrupted_at)

    def interrupt(self) -> bool:
        """Send SIGTERM to the launcher, as the service does.

        Returns:
            False if the launcher has no handler, in which case the signal is lost.
        """
        self.interrupted_at = time.monotonic()
        if not self.listens():
            return False
        self.terminate()
        return True

    def read_rest(self, timeout_s: float) -> bool:
        """Copy the rest of the host's output, after all of its processes have exited.

        Args:
            timeout_s: Time limit in seconds, because the reader of the emulator's output may be slow.

        Returns:
            Whether everything was copied in time.
        """
        self._pipe.end_when_empty()
        self._reader.join(timeout=timeout_s)
        return not self._reader.is_alive()

    @abstractmethod
    def listens(self) -> bool:
        """Return whether SIGTERM would reach the launcher as process 1 of a container, which it is on the service.

        The kernel drops signals for which process 1 has no handler ("man 7 pid_namespaces"). If the handlers are
        unknown, the result is True.
        """

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to the launcher, whether or not it has a handler."""

    @abstractmethod
    def freeze(self) -> None:
        """Suspend all processes of the host, so that none sees another die."""

    @abstractmethod
    def thaw(self) -> None:
        """Resume all processes of a frozen host."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL to all processes of the host at once, and wait until its exit code is known."""

    @abstractmethod
    def kill_launcher(self) -> None:
        """Send SIGKILL to the launcher only."""

    @abstractmethod
    def kill_process(self, pid: int) -> None:
        """Send SIGKILL to the process with this id on the host, unless it has exited."""

    def pid_of_rank(self, local_rank: int) -> int | None:
        """Return the process id of a local rank from its heartbeat, or None if it has not reported yet.

        Local rank 0 of a data host is its main process.
        """
        beats = sorted(ControlFolder(self.host.control_dir).beats(), key=lambda beat: beat.at)
        pids = {beat.rank: beat.pid for beat in beats}
        ranks = [-1] if self.host.role is Role.DATA else sorted(rank for rank in pids if rank >= 0)
        return pids.get(ranks[local_rank]) if local_rank < len(ranks) else None

    @property
    @abstractmethod
    def was_killed(self) -> bool:
        """Whether a signal killed the launcher."""

    def _wait(self) -> None:
        # One thread per host makes the exit times exact: if several hosts fail, the first one to exit is the cause.
        self.process.wait()
        self.ended_at = time.monotonic()
        if self.agent is not None:
            # It is not documented whether the service uploads more after an interrupted job's containers have exited.
            self.agent.stop(is_over=self.interrupted_at is None and not self.was_killed)
        self._changed.set()


class HostRuntime(ABC):
    """The system that runs the hosts of an emulated job.

    Attributes:
        interface: Name of the hosts' network interface.
    """

    interface: ClassVar[str]

    @abstractmethod
    def check_command(self, command: Sequence[str]) -> None:
        """Reject a training script that the hosts cannot run.

        Raises:
            LightningSMError: The hosts cannot run it; nothing was started.
        """

    def shared_environment(self, spec: ClusterSpec) -> dict[str, str]:
        """Return the environment variables that all hosts share, including a new secret."""
        num_processes = len(spec.host_names) * (spec.devices or 1)
        return {
            # Two defaults, which the variables of this machine override.
            "AWS_REGION": "us-east-1",
            # All hosts share this machine's CPUs, and PyTorch would start one thread per CPU in every process.
            "OMP_NUM_THREADS": str(max(1, usable_cpus() // num_processes)),
            **self.system_variables(spec),
            **({} if spec.devices is None else {DEVICES.name: str(spec.devices)}),
            **new_secret(),
            # These two affect only the job's reports.
            **{setting.name: os.environ[setting.name] for setting in (REPORT_S, PRICES) if setting.name in os.environ},
            **spec.environment,
        }

    @abstractmethod
    def system_variables(self, spec: ClusterSpec) -> dict[str, str]:
        """Return the variables that this system adds for all hosts; those of the job and the user override them."""

    def host_environment(self, folder: Path) -> dict[str, str]:
        """Return additional variables for one host.

        Args:
            folder: Folder of the host, in the job's folder.
        """
        return {}

    @abstractmethod
    def base_dir(self, folder: Path) -> Path:
        """Return the path at which a host sees its folder: ``/opt/ml``, or a substitute for it."""

    @abstractmethod
    def add_channel(self, path: Path, source: Path) -> None:
        """Prepare a host's input channel.

        Args:
            path: Path of the channel in the host's folder.
            source: The folder with the channel's data.
        """

    def reserve(self, topology: Topology) -> ExitStack:
        """Reserve the ports of a job, if other jobs on this machine could take them.

        Raises:
            NeedsLinuxError: There are data hosts, which this system cannot run.
            PortInUseError: A port is taken.
        """
        return ExitStack()

    def shared_disk_reason(self) -> str:
        """Return why hosts can read each other's folders on this system, or an empty string if they cannot."""
        return ""

    @abstractmethod
    def running(self, job_dir: Path) -> AbstractContextManager[object]:
        """Return a context manager for running a job; no part of the job outlives the context or this process.

        Args:
            job_dir: Folder of the job, named after the job.
        """

    @abstractmethod
    def clear(self, job_dir: Path, hosts: Sequence[EmulatedHost]) -> None:
        """Kill all processes that the hosts of an attempt left behind.

        Args:
            job_dir: Folder of the job, named after the job.
            hosts: The hosts that were started.
        """

    @abstractmethod
    def start(self, host: LocalHost, command: Sequence[str], output: Output, changed: threading.Event) -> EmulatedHost:
        """Start a host.

        Args:
            host: The host to start.
            command: Training script and its arguments.
            output: Receives the host's output.
            changed: Event to set when the host has exited.
        """
