"""The lifecycle of a host in a job: a state machine without a clock or I/O, driven by ``train``.

``step`` maps a launcher's state and an event to its next state and the actions to take at once. Each phase is one piece
of work, which ends with an event (``End``). News can arrive at any time, from other threads. News never changes the
phase: it may terminate the script, or be what the phase's work is waiting for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE, JobOutcome, Outcome, OutcomeKind
from lightning_sm.job.topology import Role, Topology
from lightning_sm.launcher.failure import not_started_reason
from lightning_sm.launcher.peers.outcome import Restart

# Pauses before a data host's script is started again: memory may be short only for a moment, and training continues
# meanwhile. Give up after three restarts: a script killed four times would be killed again.
_PAUSES_S = (1.0, 2.0, 4.0)
# Exit codes of a script that was killed rather than asked to exit.
_KILLED = frozenset(128 + number for number in signal.valid_signals() - {signal.SIGTERM, signal.SIGINT})


class LauncherPhase(Enum):
    """What a launcher is currently doing."""

    PREPARING = "fetching the code, and installing its requirements"
    RUNNING = "running the script"
    PAUSING = "waiting to start a data host's script again after it was killed"
    JUDGING = "finding out why the script exited"
    UPLOADING = "waiting for the upload of an interrupted script's checkpoint"
    AWAITING_TRAINERS = "waiting until the scripts of all trainer hosts have exited"
    AWAITING_DECISION = "waiting until the other hosts, including late ones, know that the script has failed"
    AWAITING_STOP = "waiting, with a saved checkpoint, for the other hosts and for the signal that stops this one"
    AWAITING_RESTART = "waiting until the scripts of all trainer hosts have exited for a restart"
    AWAITING_FIRST_EXIT = "letting the host that failed first exit first"
    REPORTING = "writing the report of the run, on the main host"
    OVER = "exiting"


class Stop(Enum):
    """Whether this host was stopped, and if so, before or after a failure on another host."""

    NONE = "it was not stopped"
    FIRST = "it was stopped before any host failed"
    AFTER_FAILURE = "it was stopped because another host had failed"


@dataclass(frozen=True)
class HostState:
    """The state of a launcher.

    Attributes:
        topology: The layout of the job, as seen from this host.
        phase: What the launcher is currently doing.
        stop: Whether the host was stopped, and when.
        stopped_by: The signal that stopped it; None if there was none.
        job: The outcome of the job; None until it is known.
        restart: The last restart of the job that was ordered, if any.
        attempt: The number of the last restart in which this host took part; 0 before the first.
        num_kills: How often this data host's script was killed and started again.
        exit_code: Exit code of the script's last run.
        own: The outcome of this host; None until its script has exited.
        is_saved: Whether the script was interrupted and saved a checkpoint.
    """

    topology: Topology
    phase: LauncherPhase = LauncherPhase.PREPARING
    stop: Stop = Stop.NONE
    stopped_by: int | None = None
    job: JobOutcome | None = None
    restart: Restart | None = None
    attempt: int = 0
    num_kills: int = 0
    exit_code: int = 0
    own: Outcome | None = None
    is_saved: bool = False

    @property
    def is_stopped(self) -> bool:
        """Whether this host was stopped."""
        return self.stop is not Stop.NONE

    @property
    def is_data_host(self) -> bool:
        """Whether this is a data host."""
        return self.topology.role is Role.DATA

    @property
    def pending_restart(self) -> Restart | None:
        """The restart that this host's script must join; None if there is none."""
        restart = self.restart
        return restart if restart is not None and restart.number > self.attempt and not self.is_data_host else None

    @property
    def must_end(self) -> bool:
        """Whether the script must not be started again."""
        return self.is_stopped or self._does_job_end_script

    @property
    def pause_s(self) -> float:
        """Seconds to wait before a data host's script is started again."""
        return _PAUSES_S[self.num_kills - 1]

    @property
    def is_first_failure_elsewhere(self) -> bool:
        """Whether this trainer host exits with the reason of another host that failed first.

        Such a host never exits with 0. A host that was stopped first and did not succeed keeps its own reason.
        """
        own, job, name = self.own, self.job, self.topology.current_host
        if own is None or job is None or self.is_data_host or not job.is_failure or job.host == name:
            return False
        return self.stop is not Stop.FIRST or own.exit_code == 0

    @property
    def outcome(self) -> Outcome:
        """The outcome with which this host exits, once its script has exited for good."""
        own, job = self.own, self.job
        if own is None:
            raise ValueError(f"A launcher that is {self.phase.value} has no outcome.")
        if job is None:
            return own
        if self.is_data_host and not job.is_failure:
            return Outcome.of_exit_code(0)  # training succeeded without this host
        if self.is_first_failure_elsewhere:
            return Outcome.of_exit_code(own.exit_code or 1, job.reason)
        if job.host == self.topology.current_host and own.kind is not OutcomeKind.SUCCESS:
            return replace(own, reason=job.reason)  # the job's reason names the restarts, too
        return own

    @property
    def known_job(self) -> JobOutcome | None:
        """The outcome of the job; None if it is unknown, or if this host was stopped first and did not succeed."""
        own, job = self.own, self.job
        is_stop_first = self.stop is Stop.FIRST and own is not None and own.kind is not OutcomeKind.SUCCESS
        return None if is_stop_first else job

    @property
    def _does_job_end_script(self) -> bool:
        """Whether the script must exit because of the job's outcome.

        A data host's script must exit when training ends, successfully or not. A trainer host that was stopped keeps
        its whole schedule to save a checkpoint, even if another host exits earlier.
        """
        job = self.job
        if job is None or job.host == self.topology.current_host:
            return False
        if self.is_data_host:
            return True
        has_first_host_left = job.kind in (OutcomeKind.LOST, OutcomeKind.INTERRUPTION)
        return job.is_failure and not (self.is_stopped and has_first_host_left)


# ---- Events


@dataclass(frozen=True)
class Done:
    """The phase's work is done, or no longer needed."""


@dataclass(frozen=True)
class Exited:
    """The script has exited.

    Attributes:
        exit_code: Its exit code; 128 + n if signal n killed it.
    """

    exit_code: int


@dataclass(frozen=True)
class Judged:
    """The launcher knows why the script exited, or why it cannot or must not be started.

    Attributes:
        outcome: The outcome.
        has_saved: Whether a rank has announced that it saved a checkpoint.
    """

    outcome: Outcome
    has_saved: bool = False


@dataclass(frozen=True)
class Restarted:
    """The scripts of all trainer hosts have exited and may start again.

    Attributes:
        attempt: The number of the restart.
    """

    attempt: int


@dataclass(frozen=True)
class HostStopped:
    """News: this host was told to stop.

    Attributes:
        signum: The signal.
    """

    signum: int


@dataclass(frozen=True)
class JobEnded:
    """News: the outcome of the job is known.

    Attributes:
        job: The outcome.
    """

    job: JobOutcome


@dataclass(frozen=True)
class RestartOrdered:
    """News: the scripts of all trainer hosts must restart.

    Attributes:
        restart: The order.
    """

    restart: Restart


End = Done | Exited | Judged | Restarted
News = HostStopped | JobEnded | RestartOrdered


# ---- Actions


@dataclass(frozen=True)
class EndScript:
    """Terminate the script, without waiting for its exit.

    Attributes:
        kind: The outcome that requires this. After a hang elsewhere, the script's stacks are saved first.
        restart: The number of the restart that requires this; None if the script must not run again.
    """

    kind: OutcomeKind
    restart: int | None = None


@dataclass(frozen=True)
class SendReport:
    """Send the outcome of this host to the other hosts.

    Attributes:
        outcome: The outcome.
    """

    outcome: Outcome


Action = EndScript | SendReport
Transition = tuple[HostState, tuple[Action, ...]]


def step(state: HostState, event: End | News) -> Transition:
    """Return the next state and the actions to take at once."""
    if isinstance(event, News):
        return _on_news(state, event)
    match event:
        case Exited(exit_code):
            return _on_exit(state, exit_code)
        case Judged(outcome, has_saved):
            is_interrupted = outcome.kind is OutcomeKind.INTERRUPTION and not outcome.may_restart
            return _ended(replace(state, own=outcome, is_saved=is_interrupted and has_saved))
        case Restarted(attempt):
            return _run(replace(state, attempt=attempt, own=None))
        case Done():
            return _AFTER[state.phase](state)


def _on_news(state: HostState, news: News) -> Transition:
    has_script = state.phase in (LauncherPhase.PREPARING, LauncherPhase.RUNNING, LauncherPhase.PAUSING)
    match news:
        case HostStopped(signum):
            job = state.job
            # A stop after a failure is SageMaker's response to it, unless the failure was itself an interruption.
            is_response = job is not None and job.kind is not OutcomeKind.INTERRUPTION
            stop = state.stop if state.is_stopped else Stop.AFTER_FAILURE if is_response else Stop.FIRST
            return replace(state, stop=stop, stopped_by=signum), ()  # the stop schedule signals the script
        case JobEnded(job):
            state = replace(state, job=job)
            return state, (EndScript(job.kind),) if has_script and state._does_job_end_script else ()
        case RestartOrdered(restart):
            state = replace(state, restart=restart)
            ends = state.pending_restart is not None and state.phase is LauncherPhase.RUNNING
            return state, (EndScript(restart.kind, restart.number),) if ends else ()


def _on_exit(state: HostState, exit_code: int) -> Transition:
    """Restart a data host's script if it was killed, since the cause may pass; its own errors would recur."""
    is_killed = state.is_data_host and exit_code in _KILLED
    if is_killed and state.num_kills < len(_PAUSES_S) and not state.must_end:
        return replace(state, phase=LauncherPhase.PAUSING, exit_code=exit_code, num_kills=state.num_kills + 1), ()
    return replace(state, phase=LauncherPhase.JUDGING, exit_code=exit_code), ()


def _run(state: HostState) -> Transition:
    restart = state.pending_restart
    if restart is None:
        return replace(state, phase=LauncherPhase.RUNNING), ()
    why = "The job restarted before the script was started."
    return _ended(replace(state, own=Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, why, may_restart=True)))


def _run_again(state: HostState) -> Transition:
    if state.must_end:  # this data host's work is over
        return _ended(replace(state, own=Outcome.of_exit_code(0)))
    return replace(state, phase=LauncherPhase.RUNNING), ()


def _ended(state: HostState) -> Transition:
    """Report the script's outcome, and wait as that outcome requires."""
    own = state.own
    if state.is_saved:
        return replace(state, phase=LauncherPhase.UPLOADING), ()  # report later: the report lets other hosts exit
    if own is not None and own.kind is OutcomeKind.SUCCESS:
        # A stopped data host has served all ranks, so it does not wait for a main host that may be dead.
        must_wait = not (state.is_data_host and state.is_stopped)
        phase = LauncherPhase.AWAITING_TRAINERS
    elif state.is_data_host and len(state.topology.data_hosts) > 1:
        # SageMaker stops a job as soon as one of its hosts exits with an error.
        must_wait = not state.is_stopped
        phase = LauncherPhase.AWAITING_TRAINERS
    else:
        # Exit as soon as the others have this host's report, so that SageMaker shows its reason rather than theirs. If
        # this host was stopped, the others were too, and need no report.
        must_wait = not state.is_stopped
        phase = LauncherPhase.AWAITING_DECISION
    if must_wait:
        return replace(state, phase=phase), _report(state)
    after, actions = _after_report(state)
    return after, (*_report(state), *actions)


def _report_saved(state: HostState) -> Transition:
    return replace(state, phase=LauncherPhase.AWAITING_STOP), _report(state)


def _report(state: HostState) -> tuple[Action, ...]:
    return () if state.own is None else (SendReport(state.own),)


def _after_report(state: HostState) -> Transition:
    own = state.own
    has_failed_for_good = own is not None and own.kind is not OutcomeKind.SUCCESS and not own.may_restart
    if state.pending_restart is None or (state.is_stopped and has_failed_for_good):
        return _close(state)
    return replace(state, phase=LauncherPhase.AWAITING_RESTART), ()


def _close_without_restart(state: HostState) -> Transition:
    """Exit without the restart that this host waited for."""
    job, restart = state.job, state.pending_restart
    if restart is None or (job is not None and job.kind is not OutcomeKind.INTERRUPTION):
        return _close(state)
    # A stop while waiting counts as an interruption, so that SageMaker starts the job again, and not as the failure
    # that the restart was meant to overcome. Another host may have been stopped first.
    if state.stopped_by is None:
        if job is None:
            return _close(state)
        return _close(replace(state, own=Outcome.of_exit_code(INTERRUPTED_EXIT_CODE, job.reason)))
    doing = f"waiting for restart {restart.number} of {restart.most}. Its cause: {restart.cause}"
    own = Outcome.of_exit_code(128 + state.stopped_by, not_started_reason(state.stopped_by, doing))
    after, actions = _close(replace(state, own=own))
    return after, (SendReport(own), *actions)


def _close(state: HostState) -> Transition:
    if state.is_first_failure_elsewhere:
        return replace(state, phase=LauncherPhase.AWAITING_FIRST_EXIT), ()
    return _write_report(state)


def _write_report(state: HostState) -> Transition:
    is_main = state.topology.current_host == state.topology.main_host
    return replace(state, phase=LauncherPhase.REPORTING if is_main else LauncherPhase.OVER), ()


def _exit(state: HostState) -> Transition:
    return replace(state, phase=LauncherPhase.OVER), ()


# Transitions after ``Done``, by phase.
_AFTER: Mapping[LauncherPhase, Callable[[HostState], Transition]] = MappingProxyType(
    {
        LauncherPhase.PREPARING: _run,
        LauncherPhase.PAUSING: _run_again,
        LauncherPhase.UPLOADING: _report_saved,
        LauncherPhase.AWAITING_TRAINERS: _after_report,
        LauncherPhase.AWAITING_DECISION: _after_report,
        LauncherPhase.AWAITING_STOP: _after_report,
        LauncherPhase.AWAITING_RESTART: _close_without_restart,
        LauncherPhase.AWAITING_FIRST_EXIT: _write_report,
        LauncherPhase.REPORTING: _exit,
    }
)
