"""One training script in a process group of its own: start it, pass signals on, and leave nothing of it behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from lightning_sm.errors import ScriptError
from lightning_sm.prctl import adopt_orphans

# Enough for the tracebacks of 8 local ranks with deep stacks; the service shows 1024 characters of it.
_TAIL_BYTES = 64 * 1024
# Local ranks end within moments of rank 0 when all is well: they met at the same last barrier.
_LEFTOVERS_GRACE_S = 10.0
# After SIGTERM. Only for what outlives its parent; a training script that saves a checkpoint is not hurried.
_KILL_GRACE_S = 5
# To read what a pipe still holds (64 KiB on Linux).
_DRAIN_S = 2.0
_POLL_S = 0.05


class ChildProcess:
    """One script in a process group of its own, with the end of its stderr at hand.

    Args:
        command: Program and arguments; no shell is involved.
        directory: Folder to start it in.
        env: Its environment.
        parent: Process id of the emulator, with which the script ends; None on SageMaker.
    """

    def __init__(
        self, command: Sequence[str], directory: Path, env: Mapping[str, str], parent: str | None = None
    ) -> None:
        self._command = list(command)
        self._directory = directory
        self._env = dict(env)
        self._parent = parent
        self._process: subprocess.Popen[bytes] | None = None
        self._early_signals: list[int] = []
        self._tail = bytearray()

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB that the processes of the group wrote to stderr."""
        return bytes(self._tail).decode("utf-8", errors="replace")

    def run(self) -> int:
        """Start the script, pass SIGTERM and SIGINT on to its group, and wait until the whole group is gone.

        Returns:
            The script's exit code, 128 + n if signal n killed it.

        Raises:
            ScriptError: The operating system refused to start it.
        """
        adopt_orphans(True)  # local ranks that outlive the script become ours, to wait for and to reap
        self._handle_signals()
        process = self._start()
        copier = threading.Thread(target=self._copy_stderr, args=(process,), daemon=True)
        copier.start()
        exit_code = process.wait()
        self._end_leftovers(process.pid, _LEFTOVERS_GRACE_S if exit_code == 0 else 0.0)
        self._process = None  # its number may soon belong to another process
        copier.join(timeout=_DRAIN_S)  # a process that left the group may keep the pipe open
        return 128 - exit_code if exit_code < 0 else exit_code

    def _handle_signals(self) -> None:
        # Before the child starts: a signal that comes meanwhile must reach it, not end the launcher. And for good:
        # one that comes after its end must not replace its exit code, nor prevent the failure file.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._forward)
            signal.signal(signal.SIGINT, self._forward)
            signal.signal(signal.SIGALRM, self._kill_if_orphaned)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ScriptError(f"{shlex.join(self._command)} cannot be started: {error}.") from error
        for signum in self._early_signals:
            self._send(signum)
        return self._process

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        if self._parent is not None:
            signal.alarm(_KILL_GRACE_S)
        if self._process is None:
            self._early_signals.append(signum)
        else:
            self._send(signum)

    def _kill_if_orphaned(self, _signum: int, _frame: FrameType | None) -> None:
        # Only now, not when the signal came: the kernel sends it while threads of a killed emulator still end, and
        # until they have, it is still the parent. One that lives sends SIGKILL itself.
        if self._parent != str(os.getppid()):
            self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        if self._process is not None:
            _signal_group(self._process.pid, signum)

    def _copy_stderr(self, process: subprocess.Popen[bytes]) -> None:
        if process.stderr is None:
            return
        target: int | None = sys.__stderr__.fileno() if sys.__stderr__ is not None else None
        with process.stderr as pipe:
            while chunk := os.read(pipe.fileno(), _TAIL_BYTES):
                self._tail += chunk
                del self._tail[:-_TAIL_BYTES]
                if target is not None and not _write_all(target, chunk):
                    target = None  # nobody reads any more; go on, else the script would block

    def _end_leftovers(self, group: int, grace_s: float) -> None:
        """Wait for what is left of the process group, then end it."""
        if _group_ended(group, grace_s):
            return
        _signal_group(group, signal.SIGTERM)
        if not _group_ended(group, _KILL_GRACE_S):
            _signal_group(group, signal.SIGKILL)
            _group_ended(group, _KILL_GRACE_S)


def _write_all(target: int, data: bytes) -> bool:
    try:
        while data:
            data = data[os.write(target, data) :]
    except OSError:
        return False
    return True


def _signal_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return


def _group_ended(group: int, timeout_s: float) -> bool:
    """Reap the processes of a group until none is left, or the time is over."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        try:
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return True
        if time.monotonic() >= deadline:
            return False
        pause.wait(_POLL_S)
