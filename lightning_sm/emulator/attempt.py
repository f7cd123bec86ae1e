"""One attempt of an emulated job: it starts the hosts, injects faults, and leaves no process behind."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.faults import RESUMED, Fault, FaultPlan, Kind, Moment, host_name
from lightning_sm.emulator.hosts import EmulatedHost
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.spec import LocalHost
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.variables import REPORT_S
from lightning_sm.launcher.timeline import REPORT_LIMIT_WHEN_STOPPED_S
from lightning_sm.record.events import FOLDER

# Time from SIGTERM to SIGKILL after a failure: the other hosts' launchers give their scripts 15 s to exit, and wait
# 15 s for a lost main host.
_FAILURE_GRACE_S = 25.0
# Time from SIGTERM to SIGKILL after Ctrl-C, when someone is waiting at a terminal.
_GRACE_S = 5.0
# Time limit for copying the rest of the hosts' output to the logs and to stdout, whose reader may be slow.
_OUTPUT_S = 60.0
# A signal may arrive twice: timeout(1) sends it twice, and some wrappers forward one that the terminal has already sent
# to all processes. Signals within this time count as one.
_ONE_SIGNAL_S = 0.5
_POLL_S = 0.1
# A shorter interval, used while a fault may be due at a step: small models run hundreds of steps per second.
_FAULT_POLL_S = 0.005


@dataclass(frozen=True)
class AttemptOutcome:
    """The outcome of an attempt.

    Attributes:
        exit_code: 0 if all hosts succeeded, else the exit code of the host that failed first; 128 + n if signal n
            stopped the job.
        resumes: Whether the job resumes in another attempt, after an interruption or a restart.
        failed: The host whose failure ended the attempt.
    """

    exit_code: int
    resumes: bool = False
    failed: LocalHost | None = None


@dataclass
class _Interruption:
    """A fault that ends the attempt, its SIGTERM and SIGKILL times (``time.monotonic``), and the killed hosts."""

    fault: Fault
    sigterms: list[tuple[float, EmulatedHost]]
    kill_at: dict[EmulatedHost, float]
    killed: set[EmulatedHost] = field(default_factory=set)


class Attempt:
    """One attempt to run an emulated job.

    Args:
        cluster: The hosts.
        command: Training script and its arguments.
        output: Receives the hosts' output.
        signals: The number and time of each signal that asked this process to stop.
        plan: The faults that have not happened yet.

    Attributes:
        hosts: The hosts that were started.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        command: Sequence[str],
        output: Output,
        signals: Sequence[tuple[int, float]],
        plan: FaultPlan,
    ) -> None:
        self.hosts: list[EmulatedHost] = []
        self._cluster = cluster
        self._command = command
        self._output = output
        self._signals = signals
        # How long a stopped main host may take to write the run's report.
        self._report_s = min(REPORT_LIMIT_WHEN_STOPPED_S, REPORT_S.read(cluster.hosts[0].env))
        self._plan = plan
        self._members: dict[str, list[str]] = {}
        for host in cluster.hosts:
            self._members.setdefault(host.group, []).append(host.name)
        self._changed = threading.Event()
        self._position = (0, 0)
        self._waiting: list[tuple[float, LocalHost]] = []
        self._thaws: list[tuple[float, EmulatedHost]] = []
        self._interruption: _Interruption | None = None
        self._began_at = 0.0

    def run(self) -> AttemptOutcome:
        """Start all hosts and wait until they exit; no process outlives this call."""
        self._began_at = time.monotonic()
        delays = {self._host_name(fault): fault.seconds or 0.0 for fault in self._plan.take_late()}
        self._waiting = [(self._began_at + delays.get(host.name, 0.0), host) for host in self._cluster.hosts]
        try:
            while True:
                self._start_due()
                outcome = self._stopped() or self._ended()
                if outcome is not None:
                    return outcome
                # Inject last, so that a fault is not mistaken for the cause of an earlier event.
                self._thaw_due()
                self._inject_due()
                self._pause()
        finally:
            self._cluster.runtime.clear(self._cluster.job_dir, self.hosts)
            self._read_rest()
            self._say_lost()

    def _read_rest(self) -> None:
        """Read the rest of the hosts' output, which may take a while on a busy machine."""
        for host in self.hosts:
            host.waiter.join(timeout=_GRACE_S)
        deadline = time.monotonic() + _OUTPUT_S
        for host in self.hosts:
            if not host.read_rest(max(0.0, deadline - time.monotonic())):
                self._output.say(
                    f"The end of {host.host.name}'s output is missing here and in its log.txt: it could not be "
                    f"copied within {_OUTPUT_S:g} s."
                )

    def _start_due(self) -> None:
        if self._interruption is not None:
            return
        now = time.monotonic()
        due = [host for start_at, host in self._waiting if start_at <= now]
        self._waiting = [entry for entry in self._waiting if entry[0] > now]
        for host in due:
            self.hosts.append(self._cluster.runtime.start(host, self._command, self._output, self._changed))

    def _thaw_due(self) -> None:
        now = time.monotonic()
        due = [host for thaw_at, host in self._thaws if thaw_at <= now]
        self._thaws = [entry for entry in self._thaws if entry[0] > now]
        for host in due:
            host.thaw()
            self._output.say(f"Host {host.host.name} resumed.")

    def _inject_due(self) -> None:
        if not self._plan.pending:
            return
        self._read_position()
        moment = Moment(time.monotonic() - self._began_at, *self._position)
        for fault in self._plan.due(moment):
            wanted = None if fault.host is None else self._host_name(fault)
            targets = [host for host in self._running() if wanted in (None, host.host.name)]
            inject = self._injection(fault, targets) if targets else None
            if inject is None:
                continue
            # Announce the fault first, so that its consequences follow in the output.
            names = ", ".join(target.host.name for target in targets)
            self._output.say(f"Fault {fault.text}: {names} at {moment}.")
            inject()
            self._plan.done(fault)

    def _read_position(self) -> None:
        """Read rank 0's step and epoch at the end of its last batch; the values remain after rank 0 has exited."""
        beats = ControlFolder(self._cluster.main_host.control_dir).beats()
        if trained := [beat for beat in beats if beat.rank == 0 and beat.trained_epoch]:
            latest = max(trained, key=lambda beat: beat.at)  # ddp_spawn starts a new process for each fit
            self._position = (latest.step, latest.trained_epoch)

    def _injection(self, fault: Fault, targets: list[EmulatedHost]) -> Callable[[], object] | None:
        """Return a function that injects a fault, or None if it cannot be injected now."""
        target = targets[0]
        match fault.kind:
            case Kind.KILL:
                return target.kill
            case Kind.KILL_LAUNCHER:
                return target.kill_launcher
            case Kind.KILL_RANK:
                pid = target.pid_of_rank(fault.local_rank)
                return None if pid is None else partial(target.kill_process, pid)
            case Kind.HANG:
                return partial(self._hang, fault, target)
            case Kind.INTERRUPT | Kind.STOP if fault.at_start:
                is_possible = not self._waiting and all(target.listens() for target in targets)
            case _:
                is_possible = True
        # A second fault that ends the attempt waits for the next attempt.
        return partial(self._interrupt, fault, targets) if is_possible and self._interruption is None else None

    def _hang(self, fault: Fault, target: EmulatedHost) -> None:
        target.freeze()
        if fault.seconds is not None:
            self._thaws.append((time.monotonic() + fault.seconds, target))

    def _interrupt(self, fault: Fault, targets: list[EmulatedHost]) -> None:
        """Schedule the SIGTERM and SIGKILL signals of a fault that ends the attempt."""
        now = time.monotonic()
        if fault.kind is Kind.RESTART:
            self._interruption = _Interruption(fault, [], dict.fromkeys(self._running(), now))
            return
        order = list(targets)
        self._cluster.draw("interruption").shuffle(order)
        skew_s = fault.seconds or 0.0
        sigterms = [(now + skew_s * index, target) for index, target in enumerate(order)]
        self._interruption = _Interruption(fault, sigterms, dict.fromkeys(self._running(), math.inf))

    def _ended(self) -> AttemptOutcome | None:
        """Return the outcome if all hosts have exited, one has failed, or an interruption is complete."""
        if self._interruption is not None:
            return self._interrupted(self._interruption)
        failed = self._first_failed()
        if failed is not None:
            return self._failure(failed, f" failed with exit code {failed.exit_code}.")
        if self._waiting or any(host.exit_code != 0 for host in self.hosts):
            return None
        return AttemptOutcome(0)

    def _failure(self, failed: EmulatedHost, how: str) -> AttemptOutcome:
        """Print which host failed and how, stop the others, and return the outcome."""
        self._output.say(f"Host {failed.host.name} (group {failed.host.group}){how}")
        self._stop()
        return AttemptOutcome(failed.exit_code or 0, failed=failed.host)

    def _interrupted(self, interruption: _Interruption) -> AttemptOutcome | None:
        """Send the signals that are due; return the outcome when no host is running."""
        now = time.monotonic()
        while interruption.sigterms and interruption.sigterms[0][0] <= now:
            target = interruption.sigterms.pop(0)[1]
            if target.exit_code is None and not target.interrupt():
                self._output.say(f"Host {target.host.name} has no SIGTERM handler yet: the signal is lost.")
            # Count the grace period from the actual signal, which may be late on a busy machine.
            interruption.kill_at[target] = kill_at = (target.interrupted_at or now) + self._plan.settings.grace_s
            if not interruption.sigterms:  # hosts that get no SIGTERM are killed with the last one that does
                interruption.kill_at = {host: min(at, kill_at) for host, at in interruption.kill_at.items()}
        running = self._running()
        doomed = [host for host in running if interruption.kill_at[host] <= now]
        for host in doomed:
            host.freeze()  # freeze all of them first, so that none notices another's death
        for host in doomed:
            if interruption.fault.kind is not Kind.RESTART:
                grace_s = self._plan.settings.grace_s
                self._output.say(f"Killing host {host.host.name}: the grace period of {grace_s:g} s is over.")
            host.kill()
        interruption.killed.update(doomed)
        judged = self._judged(interruption)
        if judged is not None:
            return judged
        if running:
            return None
        failed = self._first_failed()
        return AttemptOutcome((failed.exit_code if failed else 0) or 0, resumes=interruption.fault.kind in RESUMED)

    def _judged(self, interruption: _Interruption) -> AttemptOutcome | None:
        """If only one host was interrupted, let the first host that exits with an error decide the outcome.

        If the service did not stop that host, the job has failed, and there is no further attempt. Otherwise, the
        service stops the other hosts.
        """
        first = self._first_failed()
        if interruption.fault.host is None or first is None or first in interruption.killed:
            return None
        if first.interrupted_at is None:
            how = f", which was not interrupted, exited first, with code {first.exit_code}"
            return self._failure(first, f"{how}: SageMaker counts that as a failure of the job.")
        now = time.monotonic()
        for host in self._running():
            if host.interrupted_at is None:
                interruption.kill_at[host] = now + self._plan.settings.grace_s
                host.interrupt()
        return None

    def _say_lost(self) -> None:
        """Print which checkpoint files later attempts will not find."""
        for host in self.hosts:
            if host.agent is not None and host.agent.error is not None:
                self._output.say(f"The checkpoints of {host.host.name} were not uploaded: {host.agent.error}.")
            elif host.agent is not None:
                # Leave out the record: its last lines are written after everything else has been uploaded.
                lost = [file for file in host.agent.lost if not file.startswith(f"{FOLDER}/")]
                if lost:
                    self._output.say(f"Not uploaded when {host.host.name} exited: {', '.join(lost)}.")

    def _stopped(self) -> AttemptOutcome | None:
        signum = self._signals[0][0] if self._signals else self._output.broken_by
        if not signum:
            return None
        self._output.say(f"Stopping all hosts: {signal.Signals(signum).name}.")
        for host in self.hosts:
            host.thaw()  # frozen processes do not react to SIGTERM
        self._stop()
        return AttemptOutcome(128 + signum)

    def _running(self) -> list[EmulatedHost]:
        return [host for host in self.hosts if host.exit_code is None]

    def _first_failed(self) -> EmulatedHost | None:
        failed = [host for host in self.hosts if host.exit_code]
        return min(failed, key=lambda host: host.ended_at or 0.0, default=None)

    def _host_name(self, fault: Fault) -> str:
        return host_name(fault.host or "", self._members)

    def _pause(self) -> None:
        is_watching = self._plan.pending or self._thaws or self._waiting or self._interruption is not None
        self._changed.wait(_FAULT_POLL_S if is_watching else _POLL_S)
        self._changed.clear()

    def _stop(self) -> None:
        """Send SIGTERM, and wait until hosts exit, time is up or a second signal arrives; ``run`` kills the rest."""
        running = self._running()
        for host in running:
            host.terminate()
        asked_at = time.monotonic()
        until = asked_at + (_GRACE_S if self._signals else _FAILURE_GRACE_S) + self._report_s
        while any(host.exit_code is None for host in running) and time.monotonic() < until:
            again = [signum for signum, at in self._signals if at > asked_at + _ONE_SIGNAL_S]
            if again:
                self._output.say(f"Killing all hosts: {signal.Signals(again[0]).name} again.")
                return
            self._pause()
