"""One attempt of an emulated job: start its hosts, bring faults about, wait for the end, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from lightning_sm._linux import adopt_orphans
from lightning_sm.emulator.cluster import LocalCluster, LocalHost
from lightning_sm.emulator.faults import ENDING, RESUMED, Fault, Kind, Moment, Plan, host_name
from lightning_sm.emulator.output import Output
from lightning_sm.emulator.running_host import HostProcess
from lightning_sm.job.variables import HOST_ADDRESSES, SLOW_NAMES, STEP_FILE

# Between SIGTERM and SIGKILL. After a failure: the launchers of the other hosts give their scripts 15 s, and what they
# say of the reason counts. After Ctrl-C: who waits at a terminal has decided already.
_FAILURE_GRACE_S, _GRACE_S = 20.0, 5.0
# timeout(1) sends its signal twice, and so do wrappers that pass on what the terminal sent to all.
_ONE_SIGNAL_S = 0.5
_POLL_S = 0.1
# While a fault may be due at a step, of which small models do hundreds per second.
_FAULT_POLL_S = 0.005


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        exit_code: 0 if all hosts succeeded; else that of the host that failed first; 128 + n if signal n stopped it.
        goes_on: Whether an interruption or a restart ended it.
        failed: The host whose failure ended it.
    """

    exit_code: int
    goes_on: bool = False
    failed: LocalHost | None = None


@dataclass
class _Interruption:
    """How a fault ends the attempt: to whom SIGTERM goes when, and when what is left is killed."""

    fault: Fault
    sigterms: list[tuple[float, HostProcess]]
    kill_at: dict[HostProcess, float]


class Attempt:
    """One attempt.

    Args:
        cluster: The hosts.
        command: Training script and its arguments.
        output: Where the lines of the hosts go.
        signals: Number and time of the signals that asked this process to stop.
        plan: The faults that did not happen yet.

    Attributes:
        hosts: The hosts that were started.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        command: Sequence[str],
        output: Output,
        signals: Sequence[tuple[int, float]],
        plan: Plan,
    ) -> None:
        self.hosts: list[HostProcess] = []
        self._cluster = cluster
        self._command = command
        self._output = output
        self._signals = signals
        self._plan = plan
        self._members: dict[str, list[str]] = {}
        for host in cluster.hosts:
            self._members.setdefault(host.group, []).append(host.name)
        self._changed = threading.Event()
        self._step_file = cluster.job_dir / "step"
        self._waiting: list[tuple[float, LocalHost]] = []
        self._thaws: list[tuple[float, HostProcess]] = []
        self._interruption: _Interruption | None = None
        self._began_at = 0.0

    def run(self) -> Outcome:
        """Start all hosts and wait for them; whatever happens, no process is left."""
        spared = {process.pid for process in psutil.Process().children(recursive=True)}
        adopt_orphans(True)
        self._step_file.unlink(missing_ok=True)
        self._began_at = time.monotonic()
        delays = {self._name(fault): fault.seconds or 0.0 for fault in self._plan.take(Kind.LATE)}
        self._waiting = [(self._began_at + delays.get(host.name, 0.0), host) for host in self._cluster.hosts]
        variables = self._variables()
        try:
            return self._wait(variables)
        finally:
            self._kill_descendants(spared)
            for running in self.hosts:
                running.forget_frozen()
                running.waiter.join(timeout=_GRACE_S)
                running.reader.join(timeout=_GRACE_S)
            adopt_orphans(False)

    def _variables(self) -> dict[str, str]:
        """What the hosts are told for the sake of faults."""
        variables = {STEP_FILE.name: str(self._step_file)} if self._plan.settings.faults else {}
        slow = self._plan.take(Kind.SLOW_DNS)
        if slow:
            addresses = HOST_ADDRESSES.read(self._cluster.hosts[0].env)
            names = {self._name(fault): self._began_at + (fault.seconds or 0.0) for fault in slow}
            variables[SLOW_NAMES.name] = json.dumps({addresses.get(name, name): at for name, at in names.items()})
        return variables

    def _wait(self, variables: Mapping[str, str]) -> Outcome:
        """Wait until every host ended, or one failed, or this process is told to stop."""
        while True:
            self._start_due(variables)
            outcome = self._stopped() or self._ended()
            if outcome is not None:
                return outcome
            # Last: a fault must not pass for the reason of what happened before it.
            self._thaw_due()
            self._bring_about_due()
            self._pause()

    def _start_due(self, variables: Mapping[str, str]) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._waiting if entry[0] <= now and self._interruption is None]:
            self._waiting.remove(entry)
            self.hosts.append(HostProcess(entry[1], self._command, self._output, self._changed, variables))

    def _thaw_due(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._thaws if entry[0] <= now]:
            self._thaws.remove(entry)
            entry[1].thaw()
            self._output.say(f"Host {entry[1].host.name} goes on.")

    def _bring_about_due(self) -> None:
        moment = Moment(time.monotonic() - self._began_at, *_read_position(self._step_file))
        for fault in self._plan.due(moment):
            running = [running for running in self.hosts if running.exit_code is None]
            targets = [target for target in running if fault.host is None or target.host.name == self._name(fault)]
            strike = self._strike(fault, targets, running) if targets else None
            if strike is None:
                continue
            # Said first: in the output, what follows from the fault comes after it.
            names = ", ".join(target.host.name for target in targets)
            self._output.say(f"Fault {fault.text}: {names} at {moment}.")
            strike()
            self._plan.done(fault)

    def _strike(
        self, fault: Fault, targets: list[HostProcess], running: list[HostProcess]
    ) -> Callable[[], object] | None:
        """What brings a fault about; None if that is not possible (yet)."""
        if fault.kind in ENDING:
            return self._strike_all(fault, targets, running)
        (target,) = targets
        if fault.kind is Kind.KILL:
            return target.kill
        if fault.kind is Kind.KILL_LAUNCHER:
            return target.process.kill
        if fault.kind is Kind.KILL_RANK:
            process = target.training_process(fault.local_rank)
            return partial(_kill, process) if process is not None else None
        return partial(self._hang, fault, target)

    def _strike_all(
        self, fault: Fault, targets: list[HostProcess], running: list[HostProcess]
    ) -> Callable[[], object] | None:
        if self._interruption is not None:
            return None  # the next attempt has it
        if fault.kind is Kind.RESTART:
            return partial(self._restart, fault, running)
        if fault.at_start and (self._waiting or not all(target.listens() for target in targets)):
            return None
        return partial(self._interrupt, fault, targets, running)

    def _hang(self, fault: Fault, target: HostProcess) -> None:
        target.freeze()
        if fault.seconds is not None:
            self._thaws.append((time.monotonic() + fault.seconds, target))

    def _restart(self, fault: Fault, running: list[HostProcess]) -> None:
        self._interruption = _Interruption(fault, [], dict.fromkeys(running, 0.0))

    def _interrupt(self, fault: Fault, targets: list[HostProcess], running: list[HostProcess]) -> None:
        """Plan the end of the attempt."""
        order = list(targets)
        self._cluster.draw("interruption").shuffle(order)
        now, skew_s, grace_s = time.monotonic(), fault.seconds or 0.0, self._plan.settings.grace_s
        sigterms = [(now + skew_s * index, target) for index, target in enumerate(order)]
        # Who gets no SIGTERM is killed with the last one that does.
        kill_at = dict.fromkeys(running, sigterms[-1][0] + grace_s)
        kill_at |= {target: at + grace_s for at, target in sigterms}
        self._interruption = _Interruption(fault, sigterms, kill_at)

    def _ended(self) -> Outcome | None:
        if self._interruption is not None:
            return self._interrupted(self._interruption)
        return self._failed() or self._finished()

    def _interrupted(self, interruption: _Interruption) -> Outcome | None:
        """Send what an interruption sends next; the outcome once no host is left."""
        fault, sigterms = interruption.fault, interruption.sigterms
        while sigterms and sigterms[0][0] <= time.monotonic():
            target = sigterms.pop(0)[1]
            if target.exit_code is None and not target.interrupt():
                self._output.say(f"Host {target.host.name} does not listen to SIGTERM (yet): it is lost.")
        left = [running for running in self.hosts if running.exit_code is None]
        doomed = [running for running in left if interruption.kill_at[running] <= time.monotonic()]
        for running in doomed:
            running.freeze()  # all of them, before the first is seen to be gone
        for running in doomed:
            if fault.kind is not Kind.RESTART:
                self._output.say(f"Host {running.host.name} is killed: {self._plan.settings.grace_s:g} s are over.")
            running.kill()
        if left:
            return None
        failed = self._first_failed()
        return Outcome((failed.exit_code if failed else 0) or 0, goes_on=fault.kind in RESUMED)

    def _stopped(self) -> Outcome | None:
        signum = self._signals[0][0] if self._signals else self._output.broken_by
        if not signum:
            return None
        self._output.say(f"Stopping all hosts: {signal.Signals(signum).name}.")
        for running in self.hosts:
            running.thaw()  # else it would be waited for in vain
        self._stop()
        return Outcome(128 + signum)

    def _failed(self) -> Outcome | None:
        failed = self._first_failed()
        if failed is None:
            return None
        host, code = failed.host, failed.exit_code or 0
        self._output.say(f"Host {host.name} (group {host.group}) failed with exit code {code}.")
        self._stop()
        return Outcome(code, failed=host)

    def _finished(self) -> Outcome | None:
        return None if self._waiting or any(running.exit_code != 0 for running in self.hosts) else Outcome(0)

    def _first_failed(self) -> HostProcess | None:
        failed = [running for running in self.hosts if running.exit_code]
        return min(failed, key=lambda running: running.ended_at or 0.0, default=None)

    def _name(self, fault: Fault) -> str:
        return host_name(fault.host or "", self._members)

    def _pause(self) -> None:
        is_watching = self._plan.pending or self._thaws or self._waiting or self._interruption is not None
        self._changed.wait(_FAULT_POLL_S if is_watching else _POLL_S)
        self._changed.clear()

    def _stop(self) -> None:
        """SIGTERM and a few seconds to end, fewer if asked a second time; what is left is killed by ``run``."""
        running = [host for host in self.hosts if host.exit_code is None]
        for host in running:
            host.process.terminate()
        asked_at = time.monotonic()
        until = asked_at + (_GRACE_S if self._signals else _FAILURE_GRACE_S)
        while any(host.exit_code is None for host in running) and time.monotonic() < until:
            if any(at > asked_at + _ONE_SIGNAL_S for _, at in self._signals):
                return
            self._pause()

    def _kill_descendants(self, spared: set[int]) -> None:
        """Kill every process that the hosts left, also those that daemonised, until none is left."""
        launchers = {running.process.pid for running in self.hosts}  # their own threads reap them
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            left = [process for process in psutil.Process().children(recursive=True) if process.pid not in spared]
            if not left:
                return
            for process in left:
                _kill(process)
            psutil.wait_procs([process for process in left if process.pid not in launchers], timeout=_POLL_S)
            self._pause()


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _read_position(path: Path) -> tuple[int, int]:
    """Step and epoch; zeros while nothing, or half a line, was written."""
    try:
        step, epoch = path.read_text(encoding="ascii").split()
        return int(step), int(epoch)
    except (OSError, ValueError):
        return 0, 0
