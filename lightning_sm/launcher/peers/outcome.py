"""The outcome of a job, derived from the states of its hosts. Rules without I/O.

The main host's launcher keeps this record for the job. Events are ordered by when their messages arrive there, so
that no clocks need to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lightning_sm._text import listed, shortened, times
from lightning_sm.job.outcomes import MAX_REASON_CHARS, JobOutcome, Outcome, OutcomeKind, Reason
from lightning_sm.launcher import timeline

# The cause of a failure may last a while, for example until memory is freed or a file server comes back.
_LONGEST_PAUSE_S = 30.0
# Causes are truncated to this length, to leave room for the job's reason.
_MAX_CAUSE_CHARS = 300
# A launcher whose last update is this old was itself suspended, so the silence of other hosts means nothing.
_SUSPENDED_S = 5.0


@dataclass(frozen=True)
class Timings:
    """The limits and intervals of the launchers' communication, in seconds.

    Attributes:
        peers_timeout_s: How long a host whose script has exited waits for hosts that never connected.
        after_failure_s: How long to wait, after a failure, for hosts whose scripts still run.
        lost_s: How long a host may be silent before it counts as lost.
        unreached_s: After how long a host logs that it has never reached the main host's launcher, and the main host
            logs which hosts have never connected.
        poll_s: The time between a host's requests.
    """

    peers_timeout_s: float = timeline.ABSENT_HOSTS_S
    after_failure_s: float = timeline.AFTER_FAILURE_S
    lost_s: float = timeline.LOST_S
    unreached_s: float = 60.0
    poll_s: float = 0.5


class _HostPhase(Enum):
    ABSENT = "has not connected yet"
    RUNNING = "its script runs"
    ENDED = "has reported how its script exited"
    LOST = "has been silent for too long"


@dataclass
class _TrackedHost:
    state: _HostPhase = _HostPhase.ABSENT
    heard_at: float = 0.0
    has_failed: bool = False
    has_succeeded: bool = False


@dataclass(frozen=True)
class Restart:
    """An order to all trainer hosts: terminate the script, and start it again once all scripts have exited.

    Attributes:
        number: The number of this restart of the job, from 1.
        most: The maximum number of restarts.
        kind: The outcome of the script that failed first since the last start.
        cause: The failure of that script, in one line.
        may_start: Whether all scripts have exited and the subsequent pause is over.
    """

    number: int
    most: int
    kind: OutcomeKind
    cause: str
    may_start: bool = False

    def __str__(self) -> str:
        return f"Restart {self.number} of {self.most}"

    def next_attempt(self, attempt: int) -> int | None:
        """Return the number of the attempt that a host may start now; None if it must wait.

        A host that missed a start, because another restart was ordered meanwhile, takes part in both restarts.

        Args:
            attempt: The number of the last attempt that the host started.
        """
        if self.may_start:
            return self.number
        return self.number - 1 if self.number > attempt + 1 else None


@dataclass(frozen=True)
class _Pending:
    """A restart that has not started, and the failure that it is meant to overcome."""

    restart: Restart
    failure: JobOutcome
    ordered_at: float


def pause_s(number: int) -> float:
    """Return the pause in seconds between the exit of all scripts and a restart; 0 before the first restart.

    Args:
        number: The number of the restart, from 1.
    """
    return 0.0 if number == 1 else min(2.0 ** (number - 2), _LONGEST_PAUSE_S)


class JobOutcomeTracker:
    """The record of a job's hosts. All times are in seconds, on the main host's clock.

    Args:
        trainers: Trainer hosts, whose success or failure decides the job's.
        data_hosts: Data hosts. Training continues as long as one of them is left.
        timings: How long to wait for hosts.
        max_restarts: How often the scripts of the trainer hosts may be restarted.

    Attributes:
        job_outcome: The job's outcome; None until it is known. It never changes after that.
        restart: The last restart that was ordered; None if there was none.
        is_over: Whether no host needs to wait any longer, because the script of each trainer host has exited or the
            host is lost.
    """

    def __init__(self, trainers: Sequence[str], data_hosts: Sequence[str], timings: Timings, max_restarts: int) -> None:
        self.job_outcome: JobOutcome | None = None
        self.restart: Restart | None = None
        self.is_over = False
        self._trainers = {name: _TrackedHost() for name in trainers}
        self._data_hosts = {name: _TrackedHost() for name in data_hosts}
        self._hosts = {**self._trainers, **self._data_hosts}
        self._timings = timings
        self._max_restarts = max_restarts
        self._num_restarts = 0  # restarts that have started
        self._first_cause = ""
        self._pending: _Pending | None = None
        self._looked_at = math.inf
        self._changed_at = math.inf  # no host has joined yet
        self._decided_at = math.inf

    @property
    def awaited(self) -> list[str]:
        """Trainer hosts that are not lost and whose scripts have not exited."""
        return [name for name, host in self._trainers.items() if host.state not in (_HostPhase.ENDED, _HostPhase.LOST)]

    @property
    def absent(self) -> list[str]:
        """Hosts that have never connected."""
        return [name for name, host in self._hosts.items() if host.state is _HostPhase.ABSENT]

    def has(self, name: str) -> bool:
        """Return whether a host belongs to the job."""
        return name in self._hosts

    def has_ended(self, name: str) -> bool:
        """Return whether the script of a host has exited."""
        return self._hosts[name].state is _HostPhase.ENDED

    @property
    def is_restarting(self) -> bool:
        """Whether a restart was ordered but has not started, so that all scripts are being terminated."""
        return self.job_outcome is None and self._pending is not None

    def heard(self, name: str, now: float) -> None:
        """Note that a host is alive; a lost host that is heard from before the job is over is awaited again."""
        host = self._hosts[name]
        host.heard_at = now
        if host.state in (_HostPhase.ABSENT, _HostPhase.LOST):
            self._change(host, _HostPhase.RUNNING, now)

    def reported(self, name: str, outcome: Outcome, now: float, attempt: int = 0) -> None:
        """Note the outcome of a host's script.

        Only the first report of an attempt counts, unless the host was told to stop while it waited for a restart.

        Args:
            name: Name of the host.
            outcome: The outcome of its script.
            now: The current time.
            attempt: How many restarts of the job preceded this start of the script; relevant for trainer hosts only.
        """
        host, is_trainer = self._hosts[name], name in self._trainers
        if is_trainer and attempt != self._num_restarts:
            return  # the report is from an attempt that is over
        is_final = outcome.kind is not OutcomeKind.SUCCESS and not outcome.may_restart
        ends_restart = self.is_restarting and is_trainer and is_final
        if self.has_ended(name) and not ends_restart:
            return
        self._change(host, _HostPhase.ENDED, now)
        if outcome.kind is OutcomeKind.SUCCESS:
            host.has_succeeded = True
            return
        host.has_failed = True
        others_can_serve = not is_trainer and not all(host.has_failed for host in self._data_hosts.values())
        if not others_can_serve:
            self._fail(JobOutcome(outcome.kind, name, outcome.exit_code, outcome.reason), outcome, now)

    def update(self, now: float) -> None:
        """Enforce the time limits that have expired: on silence, on restarts, and on waiting for missing hosts."""
        unheard_s = now - self._looked_at
        self._looked_at = now
        # A restart also needs the launchers of hosts whose scripts have exited.
        needed = (_HostPhase.RUNNING, _HostPhase.ENDED) if self.is_restarting else (_HostPhase.RUNNING,)
        for name, host in self._hosts.items():
            if unheard_s >= _SUSPENDED_S:
                host.heard_at += unheard_s
            if host.state in needed and now - host.heard_at >= self._timings.lost_s:
                self._change(host, _HostPhase.LOST, now)
                if name in self._trainers:
                    why = f"its launcher has sent nothing for {self._timings.lost_s:g} s"
                    self._decide(JobOutcome.lost(name, why), now)
        if self._pending is not None and self.job_outcome is None:
            self._continue_restart(self._pending, now)
        elif not self.is_over and self._may_all_leave(now):
            self.is_over = True
            self._decide(JobOutcome(OutcomeKind.SUCCESS), now)

    def _fail(self, failure: JobOutcome, outcome: Outcome, now: float) -> None:
        if self.is_restarting and outcome.may_restart:
            return  # the host terminated its script for the restart
        if self.job_outcome is not None or not outcome.may_restart or self._num_restarts >= self._max_restarts:
            self._decide(failure, now)
            return
        cause = shortened(outcome.reason.headline, _MAX_CAUSE_CHARS)
        self._first_cause = self._first_cause or cause
        self.restart = Restart(self._num_restarts + 1, self._max_restarts, outcome.kind, cause)
        self._pending = _Pending(self.restart, failure, now)

    def _continue_restart(self, pending: _Pending, now: float) -> None:
        """Start all scripts again, after a pause, once they have exited; fail the job if one does not exit in time."""
        states = {host.state for host in self._trainers.values()}
        if states == {_HostPhase.ENDED}:
            if now - self._changed_at >= pause_s(pending.restart.number):
                self.restart = replace(pending.restart, may_start=True)
                self._num_restarts = pending.restart.number
                self._pending = None
                for host in self._trainers.values():
                    host.has_succeeded = False
                    self._change(host, _HostPhase.RUNNING, now)
            return
        timings = self._timings
        limit_s = timings.peers_timeout_s if _HostPhase.ABSENT in states else timings.after_failure_s
        if now - pending.ordered_at >= limit_s:
            awaited = listed(self.awaited)
            note = f"{pending.restart} was abandoned: after {limit_s:g} s, it was still waiting for {awaited}."
            self._decide(pending.failure, now, note)

    def _may_all_leave(self, now: float) -> bool:
        has_failed = self.job_outcome is not None
        if has_failed and now - self._decided_at >= self._timings.after_failure_s:
            return True
        states = {host.state for host in self._trainers.values()}
        if has_failed:
            # Wait for late data hosts, which would otherwise wait for trainers that never come. After a success, nobody
            # needs to wait: the trainers reached all data hosts that they needed.
            states |= {host.state for host in self._data_hosts.values()} & {_HostPhase.ABSENT}
        if states <= {_HostPhase.ENDED, _HostPhase.LOST}:
            return True
        may_end = states <= {_HostPhase.ENDED, _HostPhase.LOST, _HostPhase.ABSENT}
        return may_end and now - self._changed_at >= self._timings.peers_timeout_s

    def _decide(self, job_outcome: JobOutcome, now: float, note: str = "") -> None:
        if self.job_outcome is not None:
            return
        if job_outcome.is_failure:
            notes = [note] if note else []
            if self._pending is not None and not note:
                notes.append(f"{self._pending.restart} was in progress. Its cause: {self._pending.restart.cause}")
            if self._num_restarts:
                restarted = f"The job was restarted {times(self._num_restarts)} before"
                notes.append(f"{restarted}. First cause: {self._first_cause}")
            early = [name for name, host in self._trainers.items() if host.has_succeeded and name != job_outcome.host]
            if early and job_outcome.kind is not OutcomeKind.INTERRUPTION:
                # Ranks that exit in the middle of training make others fail, with errors that do not name the ranks
                # that exited.
                notes.append(f"The script had already exited with code 0 on: {listed(early)}.")
            # SageMaker limits the number of characters, so cut the end of the reason rather than the notes.
            end = "".join(f"\n{note}" for note in notes)
            text = job_outcome.reason.text[: MAX_REASON_CHARS - len(end)] + end
            job_outcome = replace(job_outcome, reason=Reason(text, job_outcome.reason.headline))
        self.job_outcome = job_outcome
        self._decided_at = now

    def _change(self, host: _TrackedHost, state: _HostPhase, now: float) -> None:
        host.state = state
        self._changed_at = now
