"""One running host of an emulated job: its launcher and all descendants, which can be frozen and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import psutil

from lightning_sm._linux import handles_signal
from lightning_sm.emulator.agent import UploadAgent
from lightning_sm.emulator.cluster import LocalHost
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.processes import is_alive, processes_of_job, signal_process, variable_of

# Time for processes to exit after SIGKILL; only one that waits for a disk or a network folder needs it.
_KILL_S = 5.0
# Time for processes to stop after SIGSTOP. Limited, because a process never stops while it waits for a stopped child to
# start a program.
_FREEZE_S = 1.0
_POLL_S = 0.01


class EmulatedHost:
    """One running host: its launcher, and threads that read its output and wait until it exits.

    Args:
        host: The host.
        command: Training script and its arguments.
        output: Receives the host's lines.
        changed: Set when the launcher has exited.
        variables: Environment variables in addition to those of the host.
        agent: Uploads the host's checkpoints while the launcher runs.

    Attributes:
        host: The host.
        agent: Uploads the host's checkpoints, or None.
        process: The launcher.
        ended_at: When the launcher exited, by ``time.monotonic()``; None while it runs.
        interrupted_at: When the launcher received the SIGTERM of an interruption, or None.
        reader: The thread that copies the host's output.
        waiter: The thread that waits until the launcher exits.
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
        self._started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_sm", "train", *command],
            env={**host.env, **variables},
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
        """The launcher's exit code; 128 + n if signal n killed it; None while the host runs."""
        code = self.process.returncode if self.ended_at is not None else None
        return 128 - code if code is not None and code < 0 else code

    @property
    def seconds(self) -> float:
        """How long the host ran."""
        return (self.ended_at or time.monotonic()) - self._started_at

    @property
    def seconds_to_exit(self) -> float | None:
        """Seconds from the SIGTERM of an interruption to the launcher's exit; None unless both have happened."""
        if self.interrupted_at is None or self.ended_at is None:
            return None
        return max(0.0, self.ended_at - self.interrupted_at)

    def listens(self) -> bool:
        """Return whether the launcher would receive SIGTERM as process 1 of a container, as on the service.

        The kernel drops every signal to process 1 for which it has no handler ("man 7 pid_namespaces"). True if the
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

        Local rank 0 is the script itself, even on a host that does not train.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            for script in psutil.Process(self.process.pid).children():
                if not is_alive(script) or not self._is_script(script):
                    continue
                if local_rank == 0:
                    return script
                # Children of the rank inherit the variable; the rank itself is the oldest.
                processes = script.children(recursive=True)
                ranks = [process for process in processes if variable_of(process, "LOCAL_RANK") == str(local_rank)]
                return min(ranks, key=psutil.Process.create_time, default=None)
        return None

    def freeze(self) -> None:
        """Send SIGSTOP to all processes of the host, including those that are just starting."""
        deadline = time.monotonic() + _FREEZE_S
        while time.monotonic() < deadline:
            new = [process for process in self._processes() if process not in self._frozen]
            for process in new:
                signal_process(process, psutil.Process.suspend)
            self._frozen += new
            # A process that was forking when the signal came is stopped only after its child exists, so look again.
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
        self.waiter.join(timeout=_KILL_S)  # so that its exit code is known

    def _wait(self) -> None:
        # One thread per host, so that the times are exact: of hosts that fail together, the first one has the cause.
        self.process.wait()
        self.ended_at = time.monotonic()
        if self.agent is not None:
            self.agent.stop()
        self._changed.set()

    def _processes(self) -> list[psutil.Process]:
        """Return all live processes of the host, including those that lost their parents or left their session."""
        below: set[psutil.Process] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            if self.ended_at is None:
                below = {launcher, *launcher.children(recursive=True)}
        # Orphans belong to the host whose folder is in their environment.
        others = [process for process in processes_of_job(self.host.base_dir.parent) if process not in below]
        mine = [process for process in others if variable_of(process, "SAGEMAKER_BASE_DIR") == str(self.host.base_dir)]
        return [process for process in (*below, *mine) if is_alive(process)]

    def _is_script(self, process: psutil.Process) -> bool:
        try:
            return any(argument.endswith(self._script) for argument in process.cmdline())
        except psutil.Error:
            return False


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
