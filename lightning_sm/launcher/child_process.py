"""The commands of a host, each in a process group of its own: start, pass signals on, leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from lightning_sm._linux import adopt_orphans
from lightning_sm.errors import ScriptError
from lightning_sm.job.stopping import GENTLE_SIGNAL, StopSchedule

# Enough for the tracebacks of 8 local ranks with deep stacks; the service shows 1024 characters of it.
_TAIL_BYTES = 64 * 1024
# Local ranks end within moments of rank 0 when all is well: they met at the same last barrier.
_LEFTOVERS_GRACE_S = 10.0
# After SIGTERM, for what outlives its parent.
_KILL_GRACE_S = 5
# Between SIGTERM and SIGKILL for a script of a job that has failed on another host: it may log what it knows.
_END_GRACE_S = 15.0
# To read what a pipe still holds (64 KiB on Linux).
_DRAIN_S = 2.0
_POLL_S = 0.05
# A stage that is no signal.
_KILL_IF_ORPHANED = 0


def ignore_signals() -> None:
    """Let signals change nothing any more: on its way out Python restores their default, which ends the process."""
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(signum, signal.SIG_IGN)


class ChildProcess:
    """One command after the other, each in a process group of its own, with the end of its stderr at hand.

    Args:
        schedule: What follows when this process is told to stop.
        parent: Process id of the emulator, with which the command ends; None on SageMaker.

    Attributes:
        stopped_by: The signal by which this process was told to stop; None if it was not.
        is_ended: Whether ``end`` was called.
        late_signal: Called when a signal comes after a command has ended.
    """

    def __init__(self, schedule: StopSchedule, parent: str | None = None) -> None:
        self.stopped_by: int | None = None
        self.is_ended = False
        self.late_signal: Callable[[], None] = lambda: None
        self._has_ended = self._is_ending = self._is_handling = False
        self._schedule = schedule
        self._stages: list[tuple[float, int]] = []
        self._parent = parent
        self._process: subprocess.Popen[bytes] | None = None
        self._tail = bytearray()

    @property
    def is_over(self) -> bool:
        """Whether this process was told to stop, or ``end`` was called: nothing is to be started any more."""
        return self.stopped_by is not None or self.is_ended

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB that the processes of the group of the last command wrote to stderr."""
        return bytes(self._tail).decode("utf-8", errors="replace")

    def listen(self) -> None:
        """Take note of signals from now on, and pass them on to what runs: SIGTERM by the schedule, SIGINT at once."""
        # Before a command starts: a signal that comes meanwhile must reach it, not end the launcher. And for good:
        # one that comes after its end must not replace its exit code, nor prevent the failure file.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._forward)
            signal.signal(signal.SIGINT, self._forward)
            signal.signal(signal.SIGALRM, self._next_stage)
            signal.signal(signal.SIGCHLD, self._reap_orphans)
            self._is_handling = True

    def run(self, command: Sequence[str], directory: Path, env: Mapping[str, str]) -> int:
        """Start a command, pass signals on to its group, and wait until the whole group is gone.

        When it has ended, another one may be run.

        Args:
            command: Program and arguments; no shell is involved.
            directory: Folder to start it in.
            env: Its environment.

        Returns:
            Its exit code, 128 + n if signal n killed it.

        Raises:
            ScriptError: The operating system refused to start it.
        """
        adopt_orphans(True)  # local ranks that outlive the script become ours, to wait for and to reap
        self._has_ended = False
        self._tail = tail = bytearray()  # a new one: what the last command left behind may still write to the old one
        self.listen()
        process = self._start(command, directory, env)
        copier = threading.Thread(target=_copy_stderr, args=(process, tail), daemon=True)
        copier.start()
        exit_code = process.wait()
        self._has_ended = True
        self._end_leftovers(process.pid, _LEFTOVERS_GRACE_S if exit_code == 0 else 0.0)
        self._process = None  # its number may soon belong to another process
        copier.join(timeout=_DRAIN_S)  # a process that left the group may keep the pipe open
        return 128 - exit_code if exit_code < 0 else exit_code

    def end(self) -> None:
        """Let the main thread end the command: SIGTERM, and some time later SIGKILL. May be called from any thread."""
        self.is_ended = True
        main_thread = threading.main_thread().ident
        # Without a handler the signal would end this process.
        if self._is_handling and not self._has_ended and main_thread is not None:
            # To the thread, not to the process: a thread that was stopped and goes on may be handed it instead, and the
            # main thread would wait for the script for ever.
            signal.pthread_kill(main_thread, signal.SIGALRM)

    def _reap_orphans(self, _signum: int, _frame: FrameType | None) -> None:
        """Reap what the script left to its own end: without it, PID 1 collects a zombie for each until the job ends."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if self._process is None or ended.si_pid == self._process.pid:
                    return  # ``run`` waits for the script itself
                os.waitpid(ended.si_pid, 0)

    def _start(self, command: Sequence[str], directory: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            self._process = subprocess.Popen(
                list(command),
                cwd=directory,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ScriptError(f"{shlex.join(command)} cannot be started: {error}.") from error
        if self.stopped_by is not None:  # meanwhile
            self._send(self.stopped_by)
        if self.is_ended and self._is_handling:
            os.kill(os.getpid(), signal.SIGALRM)
        return self._process

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        if self._has_ended:
            self.late_signal()
        is_repeated, self.stopped_by = self.stopped_by == signum, signum
        now = time.monotonic()
        if self._parent is not None:
            self._stages.append((now + _KILL_GRACE_S, _KILL_IF_ORPHANED))
        if signum != signal.SIGTERM:
            self._send(signum)
        elif not is_repeated:  # timeout(1), and whoever passes on what a terminal sent to all, sends it twice
            self._stop_gently(now)
        self._set_alarm()

    def _stop_gently(self, now: float) -> None:
        self._stages.append((now + self._schedule.kill_s, signal.SIGKILL))
        handling = list(self._handling(GENTLE_SIGNAL))
        if not handling:
            self._send(signal.SIGTERM)
            return
        self._stages.append((now + self._schedule.term_s, signal.SIGTERM))
        for process in handling:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                process.send_signal(GENTLE_SIGNAL)

    def _set_alarm(self) -> None:
        self._stages.sort(reverse=True)
        if self._stages:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, self._stages[-1][0] - time.monotonic()))

    def _next_stage(self, _signum: int, _frame: FrameType | None) -> None:
        if self.is_ended and self._process is not None and not self._is_ending:
            self._is_ending = True
            self._stages += [(time.monotonic(), signal.SIGTERM), (time.monotonic() + _END_GRACE_S, signal.SIGKILL)]
            self._stages.sort(reverse=True)
        while self._stages and self._stages[-1][0] <= time.monotonic():
            _, signum = self._stages.pop()
            if signum != _KILL_IF_ORPHANED:
                self._send(signum)
            # Only now, not when the signal came: the kernel sends it while threads of a killed emulator still end, and
            # until they have, it is still the parent. One that lives sends SIGKILL itself.
            elif self._parent != str(os.getppid()):
                self._send(signal.SIGKILL)
        self._set_alarm()

    def _handling(self, signum: int) -> Iterator[psutil.Process]:
        """The processes below this one that handle a signal; it would end all others."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError):  # it is gone
                # A name that the kernel cut off in the middle of a character is no text.
                fields = Path(f"/proc/{process.pid}/status").read_text(errors="replace").splitlines()
                caught = next((line.split()[1] for line in fields if line.startswith("SigCgt:")), "0")
                if int(caught, 16) >> (signum - 1) & 1:
                    yield process

    def _send(self, signum: int) -> None:
        if self._process is not None:
            _signal_group(self._process.pid, signum)

    def _end_leftovers(self, group: int, grace_s: float) -> None:
        """Wait for what is left of the process group, then end it."""
        if _group_ended(group, grace_s):
            return
        _signal_group(group, signal.SIGTERM)
        if not _group_ended(group, _KILL_GRACE_S):
            _signal_group(group, signal.SIGKILL)
            _group_ended(group, _KILL_GRACE_S)


def _copy_stderr(process: subprocess.Popen[bytes], tail: bytearray) -> None:
    if process.stderr is None:
        return
    target: int | None = sys.__stderr__.fileno() if sys.__stderr__ is not None else None
    with process.stderr as pipe:
        while chunk := os.read(pipe.fileno(), _TAIL_BYTES):
            tail += chunk
            del tail[:-_TAIL_BYTES]
            if target is not None and not _write_all(target, chunk):
                target = None  # nobody reads any more; go on, else the script would block


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
