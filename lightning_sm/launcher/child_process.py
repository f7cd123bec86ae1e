"""The commands of a host, each in its own process group: starts them, forwards signals, leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from lightning_sm._linux import ExitWatch, adopt_orphans, ended_child, handles_signal
from lightning_sm._log import command_logger
from lightning_sm.errors import ScriptError
from lightning_sm.job.control_folder import Beat, ControlFolder
from lightning_sm.job.failure_file import read_failures
from lightning_sm.job.redaction import shown_arguments
from lightning_sm.job.stopping import GENTLE_SIGNAL, StopSchedule
from lightning_sm.launcher import timeline
from lightning_sm.launcher.first_failure import EndedProcess, first_failure
from lightning_sm.launcher.pipe import DrainedPipe

_LOG = command_logger(__name__)

# Enough for the tracebacks of 8 local ranks with deep stacks; SageMaker shows 1024 characters of them.
_TAIL_BYTES = 64 * 1024
# Between two log lines that name the ranks that are waited for.
_LOG_S = 60.0
# In the place of a signal's number.
_SAVE_STACKS = 0
_POLL_S = 0.05
# How soon the exit of a process that has just announced itself is watched for.
_NEW_RANKS_S = 0.1


def ignore_signals() -> None:
    """Ignore all signals from now on: at exit Python restores their defaults, so a late one would kill the process."""
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(signum, signal.SIG_IGN)


class ChildProcess:
    """A runner of one command after another, each in its own process group, which keeps the end of its stderr.

    Args:
        schedule: Which signals to send to the command, and when, after this process was told to stop.
        control: The folder in which processes of the command announce themselves.

    Attributes:
        stopped_by: The signal that told this process to stop; None if there was none.
        stopped_at: When the first such signal came, in seconds of ``time.monotonic``.
        end_requested: Whether ``end`` was called.
        end_run_requested: Whether ``end_run`` was called since ``prepare_restart``.
        failed: If the last command failed: the process with which the failure began.
        was_killed: Whether the last command got SIGKILL by the schedule, because it had not exited after a stop.
        on_kill_is_near: Called by the main thread before that.
        on_late_signal: Called when a signal arrives after a command has exited.
    """

    def __init__(self, schedule: StopSchedule, control: ControlFolder) -> None:
        self.stopped_by: int | None = None
        self.stopped_at: float | None = None
        self.end_requested = False  # any thread may write these two; only the main thread writes those below
        self.end_run_requested = False
        self.was_killed = False
        self.on_kill_is_near: Callable[[], None] = lambda: None
        self._is_kill_near = False
        self.on_late_signal: Callable[[], None] = lambda: None
        self._end_stages: list[tuple[float, int]] = []
        self._is_listening = False
        self._has_exited = False
        self._schedule = schedule
        self._control = control
        self._restart = 0
        self._restarting = threading.Lock()
        # Of the script and its ranks, by process id, in this order: exit code (None: unknown), and when.
        self._exits: dict[int, tuple[int | None, float]] = {}
        self._stages: list[tuple[float, int]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._tail = bytearray()
        self.failed = EndedProcess(pid=0)

    @property
    def must_exit(self) -> bool:
        """Whether this process was told to stop, or ``end`` was called, so that no further command may start."""
        return self.stopped_by is not None or self.end_requested

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB that the last command and its processes wrote to stderr."""
        return bytes(self._tail).decode("utf-8", errors="replace")

    @property
    def left_out(self) -> str:
        """The tracebacks that processes of the last command did not print: another process may have ended before."""
        failures = read_failures(self._control.path).values()
        return "".join(failure.traceback for failure in failures if failure is not None)

    def listen(self) -> None:
        """Forward signals to the command from now on: by the schedule, or at once if nothing saves on a gentle signal.

        A repeated SIGINT is forwarded at once: Ctrl-C for the second time.
        """
        # Called before a command starts: a signal that arrives meanwhile must reach the command, and must not kill the
        # launcher. The handlers stay: a signal after the command's exit must neither replace its exit code nor prevent
        # the failure file.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._forward)
            signal.signal(signal.SIGINT, self._forward)
            signal.signal(signal.SIGALRM, self._next_stage)
            signal.signal(signal.SIGCHLD, self._reap_orphans)
            self._is_listening = True

    def run(self, command: Sequence[str], directory: Path, env: Mapping[str, str]) -> int:
        """Start a command, forward signals to its process group, and wait until the whole group has exited.

        After a failure, ``failed`` is the process that failed first. May be called again, for another command.

        Args:
            command: Program and arguments; no shell is involved.
            directory: Folder to start the command in.
            env: Environment of the command.

        Returns:
            The command's exit code, or that of a local rank that failed after the command had succeeded; 128 + n if
            signal n killed the process.

        Raises:
            ScriptError: The operating system refused to start the command.
        """
        adopt_orphans(True)  # local ranks that outlive the script become our children, which we wait for and reap
        self._has_exited = self.was_killed = False
        self._control.clear()
        self._exits.clear()
        tail = bytearray()  # a new buffer: a process of the previous command may still write to the old one
        self._tail = tail
        self.listen()
        process = self._start(command, directory, env)
        assert process.stderr is not None  # noqa: S101 - a pipe, see _start
        pipe = DrainedPipe(process.stderr)
        copier = threading.Thread(target=_copy_stderr, args=(pipe, tail), daemon=True)
        copier.start()
        exit_code = self._wait(process)
        if exit_code == 0:
            exit_code = self._wait_for_ranks(process.pid)
        elif not (self.must_exit or self.end_run_requested):
            self._wait_for_cause(process.pid)
        self.failed = self._first_failure(process.pid)
        self._has_exited = True
        self._end_leftovers(process.pid, timeline.LEFTOVERS_GRACE_S if exit_code == 0 else 0.0)
        self._process = None  # its process id may soon belong to another process
        pipe.end_when_empty()  # a process that has left the group may keep it open
        copier.join(timeout=self._drain_s())
        return 128 - exit_code if exit_code < 0 else exit_code

    def _drain_s(self) -> float:
        """Return how long to wait until the rest of stderr is read. Only who does not read ours can make that wait."""
        if self.stopped_at is None:
            return timeline.DRAIN_S
        remaining_s = self.stopped_at + self._schedule.kill_s - time.monotonic()
        return max(timeline.DRAIN_WHEN_STOPPED_S, min(timeline.DRAIN_S, remaining_s))

    def end(self) -> None:
        """Make the main thread end the command: SIGTERM, and 15 s later SIGKILL. Any thread may call this."""
        self.end_requested = True
        self._wake_main_thread()

    def end_run(self, restart: int) -> None:
        """End the command like ``end``, but allow another one after ``prepare_restart``.

        Args:
            restart: The number of the restart for which it ends. If the command runs again by now, nothing is done.
        """
        with self._restarting:
            if restart <= self._restart:
                return
            self.end_run_requested = True
        self._wake_main_thread()

    def prepare_restart(self, number: int) -> None:
        """Prepare to run the same command again, after ``run`` has returned.

        Args:
            number: The number of the restart.
        """
        # Kill orphans, too, such as the ranks of a killed torchrun: they may hold ports and GPU memory.
        strays = psutil.Process().children(recursive=True)
        for process in strays:
            with contextlib.suppress(psutil.Error):  # it has just exited
                process.kill()
        psutil.wait_procs(strays, timeout=timeline.KILL_GRACE_S)
        with self._restarting:
            self._restart = number
            self.end_run_requested = False
        # One by one, because the handler of a stop signal adds to the same list.
        for stage in self._end_stages:
            if stage in self._stages:
                self._stages.remove(stage)
        self._end_stages = []

    def _wake_main_thread(self) -> None:
        main_thread = threading.main_thread().ident
        # Without a handler, SIGALRM would kill this process.
        if self._is_listening and not self._has_exited and main_thread is not None:
            # Signal the thread, not the process: after a SIGSTOP, the kernel might deliver the signal to another thread
            # that resumes, and the main thread would wait for the script forever.
            signal.pthread_kill(main_thread, signal.SIGALRM)

    def kill(self) -> None:
        """Kill the command at once; this process goes on with its work. Any thread may call this."""
        self._send(signal.SIGKILL)

    def _reap_orphans(self, _signum: int, _frame: FrameType | None) -> None:
        """Reap orphans that the script started, which would otherwise stay zombies until the job ends."""
        with contextlib.suppress(ChildProcessError):
            while (pid := ended_child()) is not None:
                if self._process is None or pid == self._process.pid:
                    return  # ``run`` waits for the script itself
                self._note_exit(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _note_exit(self, pid: int, exit_code: int | None) -> None:
        known = self._exits.get(pid)
        if known is None or known[0] is None:
            positive = 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code
            self._exits[pid] = positive, time.monotonic() if known is None else known[1]

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
            raise ScriptError(f"{shlex.join(shown_arguments(command))} cannot be started: {error}.") from error
        if self.stopped_by is not None:  # the signal came while the command was starting
            self._send(self.stopped_by)
        if (self.end_requested or self.end_run_requested) and self._is_listening:
            os.kill(os.getpid(), signal.SIGALRM)
        return self._process

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        if self._has_exited:
            self.on_late_signal()
        is_first = self.stopped_by is None
        is_repeated = self.stopped_by == signum
        now = time.monotonic()
        self.stopped_by = signum
        if self.stopped_at is None:
            self.stopped_at = now
        if signum == signal.SIGINT and not (is_first and self._handling_gentle_signal()):
            self._send(signum)
        elif not is_repeated:  # timeout(1) sends SIGTERM twice, as do programs that forward what a terminal sent to all
            self._stop_gently(now)
        self._set_alarm()

    def _stop_gently(self, now: float) -> None:
        self._stages.append((now + self._schedule.kill_s, signal.SIGKILL))
        announced = self._handling_gentle_signal()
        if not announced:
            self._send(signal.SIGTERM)
            return
        self._stages.append((now + self._schedule.term_s, signal.SIGTERM))
        near_s = max(self._schedule.term_s, self._schedule.kill_s - timeline.STACKS_BEFORE_KILL_S)
        self._stages.append((now + near_s, _SAVE_STACKS))
        for beat in announced:
            with contextlib.suppress(ProcessLookupError):  # it has just exited
                os.kill(beat.pid, GENTLE_SIGNAL)

    def _handling_gentle_signal(self) -> list[Beat]:
        """Return the beats of the processes that save on the gentle signal.

        A process that is exiting does not: its interpreter has restored the default action, which would kill it.
        """
        return [beat for beat in self.announced() if handles_signal(beat.pid, GENTLE_SIGNAL) is not False]

    def _set_alarm(self) -> None:
        self._stages.sort(reverse=True)
        if self._stages:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, self._stages[-1][0] - time.monotonic()))

    def _next_stage(self, _signum: int, _frame: FrameType | None) -> None:
        is_ending = self.end_requested or self.end_run_requested
        if is_ending and self._process is not None and not self._end_stages:
            now = time.monotonic()
            # On SIGTERM, a rank would otherwise try to save a checkpoint together with ranks that are gone.
            self._control.say_peers_gone()
            self._end_stages = [(now, signal.SIGTERM), (now + timeline.END_GRACE_S, signal.SIGKILL)]
            self._stages += self._end_stages
            self._stages.sort(reverse=True)
        while self._stages and self._stages[-1][0] <= time.monotonic():
            stage = self._stages.pop()
            if stage[1] == _SAVE_STACKS:
                self._is_kill_near = True  # a handler must not save them: it may have interrupted anything
                continue
            self.was_killed |= stage[1] == signal.SIGKILL and stage not in self._end_stages
            self._send(stage[1])
        self._set_alarm()

    def _prepare_kill(self) -> None:
        if self._is_kill_near:
            self._is_kill_near = False
            self.on_kill_is_near()

    @property
    def has_announced(self) -> bool:
        """Whether a process of the command has announced itself, running or not."""
        return bool(self._control.beats())

    def announced(self) -> list[Beat]:
        """Return the beats of the running processes that handle the gentle signal, which would kill any other."""
        beats = self._control.beats()
        if not beats:  # the watchdog calls this every two seconds, and the next line reads all of /proc
            return []
        below = {process.pid for process in psutil.Process().children(recursive=True)}
        return [beat for beat in beats if beat.pid in below]

    def _send(self, signum: int) -> None:
        if self._process is not None:
            _signal_group(self._process.pid, signum)

    def _wait_for_ranks(self, group: int) -> int:
        """Wait for local ranks that outlive the script; return the exit code of the first that failed.

        They may take hours to write predictions. After a stop signal, the schedule ends them.
        """
        next_log = time.monotonic() + _LOG_S
        while running := [beat for beat in self._control.beats() if _is_in_group(beat.pid, group)]:
            if time.monotonic() >= next_log:
                next_log += _LOG_S
                ranks = ", ".join(f"rank {beat.rank} ({beat.doing})" for beat in running)
                _LOG.info("the script has exited. Waiting for its local ranks: %s.", ranks)
            self._prepare_kill()
            self._reap(group)
            time.sleep(_POLL_S)  # nothing announces the exit of a process that this one did not start
        codes = [self._exits[beat.pid][0] for beat in self._control.beats() if beat.pid in self._exits]
        return next(filter(None, codes), 0)

    def _wait_for_cause(self, group: int) -> None:
        """Wait, after the script has failed, for local ranks that still run, if one of them may be the cause."""
        deadline = time.monotonic() + timeline.OWN_CAUSE_S
        while time.monotonic() < deadline and not (self.must_exit or self.end_run_requested):
            self._reap(group)
            is_running = any(_is_in_group(pid, group) for pid in self._control.pids())
            if not is_running or not self._first_failure(group).is_consequence:
                return
            time.sleep(_POLL_S)

    def _first_failure(self, script: int) -> EndedProcess:
        self._reap(script)
        ranks = {beat.pid: beat.rank for beat in self._control.beats()}
        failures = read_failures(self._control.path)
        for failure in filter(None, failures.values()):
            for pid, exit_code in failure.dead_children:
                self._note_exit(pid, exit_code)
        processes = []
        for pid in {script, *ranks, *failures}:
            if pid not in self._exits and not psutil.pid_exists(pid):
                self._note_exit(pid, None)
            code, at = self._exits.get(pid, (None, None))
            own = failures.get(pid)
            rank = ranks.get(pid, -1) if own is None or own.rank < 0 else own.rank
            processes.append(EndedProcess(pid, rank, code, at, own, has_reporter=pid in failures))
        # Told to end, ranks exit by our own signals: then only the script's exit code says something.
        are_told = self.must_exit or self.end_run_requested
        return first_failure(processes, script, only_exceptions=are_told)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a process in short waits, between which signal handlers run, whichever thread received the signal.

        Notice when its ranks exit meanwhile: Lightning, for one, waits for its ranks itself, and tells nobody.
        """
        with ExitWatch() as watch:
            while True:
                self._prepare_kill()
                watch.add((process.pid, *self._control.pids()))
                for pid, exit_code in watch.wait(_NEW_RANKS_S):
                    if pid != process.pid:
                        self._note_exit(pid, exit_code)
                exit_code = process.poll()
                if exit_code is not None:
                    self._note_exit(process.pid, exit_code)
                    return exit_code

    def _reap(self, group: int) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-group, os.WNOHANG))[0]:
                self._note_exit(ended[0], os.waitstatus_to_exitcode(ended[1]))

    def _end_leftovers(self, group: int, grace_s: float) -> None:
        """Wait for the remaining processes of the group, then terminate them."""
        if self._has_group_ended(group, grace_s):
            return
        _signal_group(group, signal.SIGTERM)
        if not self._has_group_ended(group, timeline.KILL_GRACE_S):
            _signal_group(group, signal.SIGKILL)
            self._has_group_ended(group, timeline.KILL_GRACE_S)

    def _has_group_ended(self, group: int, timeout_s: float) -> bool:
        """Reap the processes of a group; return whether all exited before the time was up."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._reap(group)
            try:
                os.killpg(group, 0)
            except (ProcessLookupError, PermissionError):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)


def _copy_stderr(pipe: DrainedPipe, tail: bytearray) -> None:
    target: int | None = sys.__stderr__.fileno() if sys.__stderr__ is not None else None
    with pipe:
        while chunk := pipe.read(_TAIL_BYTES):
            tail += chunk
            del tail[:-_TAIL_BYTES]
            if target is not None and not _write_all(target, chunk):
                target = None  # nobody reads our stderr; keep emptying the pipe, or the script would block


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


def _is_in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False
