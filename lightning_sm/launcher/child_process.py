"""A runner for a host's commands, which forwards signals to them and leaves no processes behind."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from lightning_sm._linux import ExitWatch, adopt_orphans, ended_child, handles_signal
from lightning_sm._log import command_logger
from lightning_sm.errors import ScriptError
from lightning_sm.job.control_folder import GENTLE_SIGNAL, Beat, ControlFolder
from lightning_sm.job.failure_file import read_failures
from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE
from lightning_sm.job.redaction import shown_arguments
from lightning_sm.job.variables import StopSchedule
from lightning_sm.launcher import timeline
from lightning_sm.launcher.failure import EXCEPTION_EXIT_CODE, ending_of
from lightning_sm.launcher.first_failure import EndedProcess, first_failure
from lightning_sm.launcher.pipe import DrainedPipe

_LOG = command_logger(__name__)

# Holds the tracebacks of 8 local ranks with deep stacks; SageMaker shows 1024 characters of them.
_TAIL_BYTES = 64 * 1024
# Time between log lines that name the ranks still running.
_LOG_S = 60.0
_POLL_S = 0.05
# Time between checks of a running command.
_LOOK_S = 0.1


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT: Python restores the default actions at exit, so a late one would kill the process."""
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)


class ChildProcess:
    """A runner for one command at a time, which puts each process into a new group and keeps the end of stderr.

    Only the main thread sends signals to a command, and only between checks. Signal handlers only note the signal.

    Args:
        schedule: Which signals to send to the command, and when, after this process is told to stop.
        control: The folder in which processes of the command announce themselves.

    Attributes:
        stopped_by: The last signal that told this process to stop; None if there was none.
        stopped_at: When the first such signal arrived, as a value of ``time.monotonic()``; None if there was none.
        has_late_signal: Whether a signal arrived after a command had exited.
        is_ending: Whether ``end`` was called for the command, or for good.
        was_late: Whether the last command exceeded its time limit and was terminated.
        was_killed: Whether the schedule killed the last command, because it had not exited after a stop signal.
        failed: The process that failed first, if the last command failed.
        on_look: Called periodically while a command runs.
        on_kill_is_near: Called shortly before the schedule sends SIGKILL.
    """

    def __init__(self, schedule: StopSchedule, control: ControlFolder) -> None:
        self.stopped_by: int | None = None
        self.stopped_at: float | None = None
        self.has_late_signal = self.is_ending = self.was_late = self.was_killed = False
        self.failed = EndedProcess(pid=0)
        self.on_look: Callable[[], None] = lambda: None
        self.on_kill_is_near: Callable[[], None] = lambda: None
        self._schedule = schedule
        self._control = control
        self._has_exited = self._ends_for_good = False
        self._is_pressed_again = self._is_stop_planned = self._is_end_planned = self._may_end_ranks = False
        # The exits of the script and its ranks, in order: exit code (None if unknown) and time, by process id.
        self._exits: dict[int, tuple[int | None, float]] = {}
        self._plan: list[tuple[float, Callable[[], None]]] = []  # scheduled calls, each with its time
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: dict[int, int] = {}  # global rank by process id; -1 if it is unknown
        self._groups: set[int] = set()  # process groups that still have members
        self._tail = bytearray()

    @property
    def must_exit(self) -> bool:
        """Whether no further command may start, because of a stop signal or a final ``end``."""
        return self.stopped_by is not None or self._ends_for_good

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB of stderr from the last command and its child processes."""
        return bytes(self._tail).decode("utf-8", errors="replace")

    def listen(self) -> None:
        """Install signal handlers, which forward signals to the command from now on.

        If a process can save a checkpoint when told to stop, the stop schedule applies. A second Ctrl-C (SIGINT) is
        forwarded at once.
        """
        # Install the handlers before a command starts, so that an early signal reaches it and does not kill the
        # launcher. Keep them: a late signal must neither change the exit code nor interrupt writing the failure file.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._note_signal)
            signal.signal(signal.SIGINT, self._note_signal)

    def run(
        self,
        command: Sequence[str],
        directory: Path,
        env: Mapping[str, str],
        *,
        processes: Sequence[Mapping[str, str]] = ({},),
        limit_s: float = math.inf,
    ) -> int:
        """Start a command, forward signals to its process groups, and wait until all of their processes have exited.

        If a rank fails, the other ranks started here are terminated, and ``failed`` is set to the process that failed
        first. May be called again with another command.

        Args:
            command: Program and arguments; no shell is involved.
            directory: Working directory of the command.
            env: Environment of the command.
            processes: Additional variables of each process; one process is started for each item.
            limit_s: Time limit. A command that exceeds it is terminated, and no other may start.

        Returns:
            The exit code of the first process that failed, or of a local rank that failed after the command
            succeeded; 128 + n if signal n killed it.

        Raises:
            ScriptError: The operating system refused to start the command.
        """
        adopt_orphans(True)  # local ranks that outlive the script become our children, so we can reap them
        self._has_exited = self.was_killed = self.was_late = False
        self._is_stop_planned = self._is_end_planned = False
        self._may_end_ranks = True
        self._plan = [(time.monotonic() + limit_s, self._end_late)]
        self._control.clear()
        self._exits.clear()
        tail = bytearray()  # a new buffer: a process of the previous command may still write to the old one
        self._tail = tail
        pipe = self._start(command, directory, env, processes)
        copier = threading.Thread(target=_copy_stderr, args=(pipe, tail), daemon=True)
        copier.start()
        exit_code = self._wait()
        if exit_code == 0:
            exit_code = self._wait_for_ranks()
        elif not self._is_told:
            self._wait_for_cause()
        self.failed = self._first_failure()
        self._has_exited = True
        self._end_leftovers(timeline.LEFTOVERS_GRACE_S if exit_code == 0 else 0.0)
        self._groups.clear()
        pipe.end_when_empty()  # a process that has left the group may keep the pipe open
        copier.join(timeout=self._drain_s())
        return exit_code

    def _drain_s(self) -> float:
        """Return how long to wait for the rest of stderr. The wait is long only if nobody reads our own stderr."""
        if self.stopped_at is None:
            return timeline.DRAIN_S
        remaining_s = self.stopped_at + self._schedule.kill_s - time.monotonic()
        return max(timeline.DRAIN_WHEN_STOPPED_S, min(timeline.DRAIN_S, remaining_s))

    def end(self, *, for_good: bool = True) -> None:
        """Terminate the command: send SIGTERM now, and SIGKILL 15 s later.

        Args:
            for_good: If True, no further command may start. Otherwise, one may start after ``prepare_restart``.
        """
        self.is_ending = True
        self._ends_for_good |= for_good

    def _end_late(self) -> None:
        self.was_late = True
        self.end()

    def prepare_restart(self) -> None:
        """Prepare to run the same command again, after ``run`` has returned."""
        # Kill orphans, such as the ranks of a killed torchrun: they may hold ports and GPU memory.
        strays = psutil.Process().children(recursive=True)
        for process in strays:
            with contextlib.suppress(psutil.Error):  # it has just exited
                process.kill()
        psutil.wait_procs(strays, timeout=timeline.KILL_GRACE_S)
        self.is_ending = self._ends_for_good

    def kill(self) -> None:
        """Kill the command at once."""
        self._send(signal.SIGKILL)

    @property
    def _is_told(self) -> bool:
        """Whether this process told the command to exit, which explains why ranks exit."""
        return self.must_exit or self.is_ending

    def _note_exit(self, pid: int, exit_code: int | None) -> None:
        known = self._exits.get(pid)
        if known is None or known[0] is None:
            positive = 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code
            self._exits[pid] = positive, time.monotonic() if known is None else known[1]

    def _start(
        self, command: Sequence[str], directory: Path, env: Mapping[str, str], processes: Sequence[Mapping[str, str]]
    ) -> DrainedPipe:
        """Start the processes, and return the pipe to which they all write stderr."""
        self._processes.clear()
        self._ranks.clear()
        readable, writable = os.pipe()
        pipe = DrainedPipe(os.fdopen(readable, "rb"))
        try:
            for variables in processes:
                process = subprocess.Popen(
                    list(command),
                    cwd=directory,
                    env={**env, **variables},
                    stdin=subprocess.DEVNULL,
                    stderr=writable,
                    start_new_session=True,
                )
                self._processes.append(process)
                self._ranks[process.pid] = int(variables.get("RANK", -1))
                self._groups.add(process.pid)
        except OSError as error:
            self._send(signal.SIGKILL)  # to the processes already started
            for process in self._processes:
                process.wait()
            pipe.close()
            raise ScriptError(f"{shlex.join(shown_arguments(command))} cannot be started: {error}.") from error
        finally:
            os.close(writable)
        return pipe

    def _note_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.has_late_signal |= self._has_exited
        self._is_pressed_again |= signum == signal.SIGINT and self.stopped_by is not None
        self.stopped_by = signum
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()

    def _look(self) -> None:
        """Reap processes that have exited, and make the scheduled calls that are due."""
        self.on_look()
        self._reap()
        now = time.monotonic()
        if self.stopped_by is not None and not self._is_stop_planned:
            self._is_stop_planned = True
            self._plan_stop(self.stopped_by, self.stopped_at or now)
        if self._is_pressed_again:
            self._is_pressed_again = False
            self._send(signal.SIGINT)
        if self.is_ending and not self._is_end_planned:
            self._is_end_planned = True
            # Without this mark, a rank would respond to SIGTERM by saving a checkpoint together with ranks that have
            # exited.
            self._control.say_peers_gone()
            kill_at = now + timeline.END_GRACE_S
            self._plan += [(now, partial(self._send, signal.SIGTERM)), (kill_at, partial(self._send, signal.SIGKILL))]
        if self._may_end_ranks:
            self._plan_end_of_ranks(now)
        for at, act in self._plan.copy():
            if at <= now:
                self._plan.remove((at, act))
                act()

    def _plan_stop(self, signum: int, stopped_at: float) -> None:
        kill_at = stopped_at + self._schedule.kill_s
        announced = [beat for beat in self.announced() if handles_signal(beat.pid, GENTLE_SIGNAL) is not False]
        if announced:
            term_at = stopped_at + self._schedule.term_s
            near_at = max(term_at, kill_at - timeline.STACKS_BEFORE_KILL_S)
            self._plan += [(term_at, partial(self._send, signal.SIGTERM)), (near_at, self.on_kill_is_near)]
        else:
            self._send(signum)
        self._plan.append((kill_at, self._kill_by_schedule))
        for beat in announced:
            # Exiting processes are left out: their interpreter has restored the default action, which would kill them.
            with contextlib.suppress(ProcessLookupError):  # it has just exited
                os.kill(beat.pid, GENTLE_SIGNAL)

    def _plan_end_of_ranks(self, now: float) -> None:
        """Schedule the termination of the other ranks if one has failed: they would wait for it in a collective call.

        A rank that exits with 143 has saved a checkpoint and does not count: the others may still be saving theirs.
        """
        codes = {pid: self._exits[pid][0] for pid in self._exits if pid in self._ranks}
        failed = next((pid for pid, code in codes.items() if code not in (None, 0, INTERRUPTED_EXIT_CODE)), None)
        if failed is None or len(codes) == len(self._ranks):
            return
        self._may_end_ranks = False
        how = ending_of(codes[failed] or 0)
        _LOG.warning("rank %d: %s. Terminating the other ranks on this host.", self._ranks[failed], how)
        term_at = now + timeline.CONSEQUENCE_S
        kill_at = term_at + timeline.END_GRACE_S
        for at, signum in ((term_at, signal.SIGTERM), (kill_at, signal.SIGKILL)):
            self._plan.append((at, partial(self._end_ranks, signum)))

    def _end_ranks(self, signum: int) -> None:
        self._control.say_peers_gone()
        for process in self._processes:
            process.send_signal(signum)

    def _kill_by_schedule(self) -> None:
        self.was_killed = True
        self._send(signal.SIGKILL)

    def announced(self) -> list[Beat]:
        """Return the last beat of each running descendant that has announced itself in the control folder."""
        beats = self._control.beats()
        if not beats:  # skip the next line, which reads all of /proc: the watchdog calls this every 2 s
            return []
        below = {process.pid for process in psutil.Process().children(recursive=True)}
        return [beat for beat in beats if beat.pid in below]

    def _send(self, signum: int) -> None:
        self._may_end_ranks = False  # this signal ends them
        for group in self._groups:
            _signal_group(group, signum)

    def _wait_for_ranks(self) -> int:
        """Wait for local ranks that outlive the script; return the exit code of the first that failed.

        They may take hours to write predictions. After a stop signal, the schedule applies to them.
        """
        next_log = time.monotonic() + _LOG_S
        while running := [beat for beat in self._control.beats() if self._is_in_group(beat.pid)]:
            if time.monotonic() >= next_log:
                next_log += _LOG_S
                ranks = ", ".join(f"rank {beat.rank} ({beat.doing})" for beat in running)
                _LOG.info("the script has exited. Waiting for its local ranks: %s.", ranks)
            self._look()
            time.sleep(_POLL_S)  # poll: no event announces the exit of another process's child
        codes = [self._exits[beat.pid][0] for beat in self._control.beats() if beat.pid in self._exits]
        return next(filter(None, codes), 0)

    def _wait_for_cause(self) -> None:
        """Wait for local ranks that still run after the script has failed, if one of them may be the cause."""
        deadline = time.monotonic() + timeline.OWN_CAUSE_S
        while time.monotonic() < deadline and not self._is_told:
            self._look()
            is_running = any(map(self._is_in_group, self._control.pids()))
            if not is_running or not self._first_failure().is_consequence:
                return
            time.sleep(_POLL_S)

    def _first_failure(self) -> EndedProcess:
        self._reap()
        ranks = {beat.pid: beat.rank for beat in self._control.beats()}
        failures = read_failures(self._control.path)
        for failure in filter(None, failures.values()):
            for pid, exit_code in failure.dead_children:
                self._note_exit(pid, exit_code)
        processes = []
        for pid in dict.fromkeys((*self._ranks, *ranks, *failures)):
            if pid not in self._exits and not psutil.pid_exists(pid):
                self._note_exit(pid, None)
            code, at = self._exits.get(pid, (None, None))
            report = failures.get(pid)
            # Without a failure report, the exception in stderr cannot be attributed to a rank.
            is_unknown = report is None and code == EXCEPTION_EXIT_CODE
            assigned = -1 if is_unknown else self._ranks.get(pid, -1)
            rank = ranks.get(pid, assigned) if report is None or report.rank < 0 else report.rank
            processes.append(EndedProcess(pid, rank, code, at, report, has_reporter=pid in failures))
        script = self._processes[0].pid if len(self._processes) == 1 else None
        # Ranks that were told to exit were terminated by our signals, so only the script's exit code is meaningful.
        return first_failure(processes, script, only_exceptions=self._is_told)

    def _wait(self) -> int:
        """Wait for the processes in short steps, so signal handlers run no matter which thread receives the signal.

        Meanwhile, note when ranks exit, because Lightning, for example, waits for its ranks without reporting their
        exits.
        """
        with ExitWatch() as watch:
            while any(process.returncode is None for process in self._processes):
                self._look()
                watch.add((*self._ranks, *self._control.pids()))
                for pid, exit_code in watch.wait(_LOOK_S):
                    self._note_exit(pid, exit_code)
                self._reap()
        codes = [code for pid, (code, _) in self._exits.items() if pid in self._ranks]
        return next(filter(None, codes), 0)

    def _reap(self) -> None:
        """Reap the script, ranks that outlive it, and other orphans, which would stay zombies until the job ends."""
        for process in self._processes:
            exit_code = process.poll()
            if exit_code is not None:
                self._note_exit(process.pid, exit_code)
        with contextlib.suppress(ChildProcessError):
            while (pid := ended_child()) is not None and pid not in self._ranks:
                self._note_exit(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        # Forget empty groups: their ids may soon be reused.
        self._groups = {group for group in self._groups if _signal_group(group, 0)}

    def _end_leftovers(self, grace_s: float) -> None:
        """Wait for the groups' remaining processes, then terminate those that have not exited."""
        if self._have_groups_ended(grace_s):
            return
        self._send(signal.SIGTERM)
        if not self._have_groups_ended(timeline.KILL_GRACE_S):
            self._send(signal.SIGKILL)
            self._have_groups_ended(timeline.KILL_GRACE_S)

    def _have_groups_ended(self, timeout_s: float) -> bool:
        """Reap the remaining processes; return whether all exited in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            if not self._groups:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def _is_in_group(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) in self._groups
        except ProcessLookupError:
            return False


def _copy_stderr(pipe: DrainedPipe, tail: bytearray) -> None:
    target: int | None = sys.__stderr__.fileno() if sys.__stderr__ is not None else None
    with pipe:
        while chunk := pipe.read(_TAIL_BYTES):
            tail += chunk
            del tail[:-_TAIL_BYTES]
            if target is not None and not _write_all(target, chunk):
                target = None  # nobody reads our stderr; keep draining the pipe, or the script would block


def _write_all(target: int, data: bytes) -> bool:
    try:
        while data:
            data = data[os.write(target, data) :]
    except OSError:
        return False
    return True


def _signal_group(group: int, signum: int) -> bool:
    """Send a signal to a process group; return whether it has members."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True
