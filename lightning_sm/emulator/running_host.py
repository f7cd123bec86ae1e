"""One running host of an emulated job: its launcher and all descendants, which can be frozen and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from lightning_sm._linux import ADOPTS_ORPHANS, handles_signal
from lightning_sm.emulator.agent import UploadAgent
from lightning_sm.emulator.cluster import LocalHost
from lightning_sm.emulator.output import Output
from lightning_sm.job.variables import PARENT_PID

# Time for processes to end after SIGKILL; only one that waits for a disk or a network folder needs it.
_KILL_S = 5.0
# Time for processes to stop after SIGSTOP. A process that waits for a stopped child to start a program never stops.
_FREEZE_S = 1.0
_POLL_S = 0.01
# Kills frozen processes if the emulator dies, because they do not react to the SIGTERM that they receive then. Reads
# process ids, and kills them at the end of its input, unless _END comes first.
_END = "end"
_WATCHDOG = f'while read -r line; do [ "$line" = {_END} ] && exit; pids="$pids $line"; done; kill -KILL $pids'


class EmulatedHost:
    """One running host: its launcher, and threads that read its output and wait until it ends.

    Args:
        host: The host.
        command: Training script and its arguments.
        output: Receives the host's lines.
        changed: Set when the launcher has ended.
        variables: Environment variables in addition to those of the host.
        agent: Uploads the host's checkpoints while the launcher runs.

    Attributes:
        host: The host.
        agent: Uploads the host's checkpoints, or None.
        process: The launcher.
        ended_at: When the launcher ended, by ``time.monotonic()``; None while it runs.
        interrupted_at: When the launcher received the SIGTERM of an interruption, or None.
        reader: Copies the host's output.
        waiter: Waits until the launcher ends.
    """

    def __init__(
        self,
        host: LocalHost,
        command: Sequence[str],
        output: Output,
        changed: threading.Event,
        variables: Mapping[str, str],
        *,
        agent: UploadAgent | None,
    ) -> None:
        self.host = host
        self.agent = agent
        self.ended_at: float | None = None
        self.interrupted_at: float | None = None
        self._script = os.path.basename(command[0])
        self._changed = changed
        self._frozen: list[psutil.Process] = []
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_sm", "train", *command],
            env={**host.env, **variables, PARENT_PID.name: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches only the emulator, which decides the order
        )
        self.reader = threading.Thread(target=output.copy, args=(host, self.process.stdout), daemon=True)
        self.reader.start()
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()

    @property
    def exit_code(self) -> int | None:
        """128 + n if signal n killed it; None while the host runs."""
        code = self.process.returncode if self.ended_at is not None else None
        return 128 - code if code is not None and code < 0 else code

    @property
    def seconds(self) -> float:
        """How long the host ran."""
        return (self.ended_at or time.monotonic()) - self._started_at

    @property
    def seconds_to_exit(self) -> float | None:
        """Seconds from the SIGTERM of an interruption to the end of the launcher."""
        if self.interrupted_at is None or self.ended_at is None:
            return None
        return max(0.0, self.ended_at - self.interrupted_at)

    def listens(self) -> bool:
        """Whether the launcher would receive SIGTERM as process 1 of a container, as on the service.

        The kernel drops every signal to process 1 for which it has no handler ("man 7 pid_namespaces"). True where the
        kernel does not say.
        """
        return handles_signal(self.process.pid, signal.SIGTERM, or_blocks=True) is not False

    def interrupt(self) -> bool:
        """Send SIGTERM to the launcher, as the service does.

        Returns:
            False if the launcher has no handler, so that the signal is lost.
        """
        self.interrupted_at = time.monotonic()
        if not self.listens():
            return False
        self.process.send_signal(signal.SIGTERM)
        return True

    def training_process(self, local_rank: int) -> psutil.Process | None:
        """Return the process of a local rank, or None if it does not run (yet).

        Local rank 0 is the script itself, also on a host that does not train.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            for script in psutil.Process(self.process.pid).children():
                if not _is_alive(script) or not self._is_script(script):
                    continue
                if local_rank == 0:
                    return script
                # Children of the rank inherit the variable; the rank itself is the oldest.
                processes = script.children(recursive=True)
                ranks = [process for process in processes if _variable(process, "LOCAL_RANK") == str(local_rank)]
                return min(ranks, key=psutil.Process.create_time, default=None)
        return None

    def freeze(self) -> None:
        """Send SIGSTOP to all processes of the host, including those that are just starting."""
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHDOG],
                env={},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        deadline = time.monotonic() + _FREEZE_S
        while time.monotonic() < deadline:
            new = [process for process in self._processes() if process not in self._frozen]
            for process in new:
                _write_line(self._watchdog, str(process.pid))
                signal_process(process, psutil.Process.suspend)
            self._frozen += new
            # A process that was forking when the signal came has its child by the time it is stopped.
            if not new and all(_is_stopped(process) for process in self._frozen):
                return
            if not new:
                time.sleep(_POLL_S)  # the kernel announces neither stopped nor killed processes of others

    def thaw(self) -> None:
        """Send SIGCONT to all frozen processes."""
        for process in self._frozen:
            signal_process(process, psutil.Process.resume)
        self.forget_frozen()

    def forget_frozen(self) -> None:
        """Stop the watchdog of frozen processes."""
        self._frozen = []
        if self._watchdog is not None:
            _write_line(self._watchdog, _END)
            self._watchdog.communicate()
            self._watchdog = None

    def kill(self) -> None:
        """Send SIGKILL to all processes of the host, which are frozen first, so that none sees another one die."""
        self.freeze()
        deadline = time.monotonic() + _KILL_S
        while (left := self._processes()) and time.monotonic() < deadline:
            for process in left:
                signal_process(process, psutil.Process.kill)
            time.sleep(_POLL_S)
        self.forget_frozen()
        self.waiter.join(timeout=_KILL_S)  # so that its exit code is known

    def _wait(self) -> None:
        # One thread per host, so that the times are exact: of hosts that fail together, the first has the reason.
        self.process.wait()
        self.ended_at = time.monotonic()
        if self.agent is not None:
            self.agent.stop()
        self._changed.set()

    def _processes(self) -> list[psutil.Process]:
        """All live processes of the host, including those that lost their parents or left their session."""
        below: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            if self.ended_at is None:
                below = {launcher, *launcher.children(recursive=True)}
        # Orphans: the host's folder in their environment shows where they belong.
        others = [process for process in processes_of_job(self.host.base_dir.parent) if process not in below]
        mine = [process for process in others if _variable(process, "SAGEMAKER_BASE_DIR") == str(self.host.base_dir)]
        return [process for process in (*below, *mine) if _is_alive(process)]

    def _is_script(self, process: psutil.Process) -> bool:
        try:
            return any(argument.endswith(self._script) for argument in process.cmdline())
        except psutil.Error:
            return False


def processes_of_job(job_dir: Path) -> list[psutil.Process]:
    """The descendants of this process, orphans included.

    Args:
        job_dir: Where orphans are not adopted, they are known by a host's folder in this one, in their environment.
    """
    found = psutil.Process().children(recursive=True)
    if not ADOPTS_ORPHANS:
        others = (process for process in psutil.process_iter() if process not in found)
        found += [one for one in others if Path(_variable(one, "SAGEMAKER_BASE_DIR") or "/").parent == job_dir]
    return found


def _write_line(process: subprocess.Popen[bytes], line: str) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # the watchdog was killed
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()


def signal_process(process: psutil.Process, send: Callable[[psutil.Process], None]) -> None:
    """Call ``psutil.Process.kill``, ``suspend`` or ``resume``, unless the process has already ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        send(process)


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
