"""The outcome of a job: which of its hosts run, have ended or are lost, and what that means for all of them.

Rules without I/O. The launcher of the main host keeps this record for the job. The order in which messages reach it is
the order of events, so that no clocks are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_sm.job.stopping import JobOutcome, Outcome


class _State(Enum):
    ABSENT = "has not connected yet"
    RUNNING = "is connected; its script runs"
    AWAY = "was disconnected and may reconnect"
    ENDED = "has reported how its script ended"
    LOST = "did not reconnect in time"


@dataclass
class _Host:
    state: _State = _State.ABSENT
    since: float = 0.0
    why_away: str = ""
    has_failed: bool = False


class JobOutcomeTracker:
    """The record of a job's hosts. All times are seconds of one clock, that of the main host.

    Args:
        trainers: Hosts whose success or failure is the job's.
        data_hosts: Hosts that training does without, as long as one is left.
        reconnect_s: How long a disconnected host may take to reconnect.
        absent_s: How long to wait for hosts that never connected once all others have ended.
        after_failure_s: How long to wait, after a failure, for hosts that still run.

    Attributes:
        job_outcome: How the job ends, once that is known; it never changes after that.
        is_over: Whether no host needs to wait any longer: all trainer hosts have ended or are lost.
    """

    def __init__(
        self,
        trainers: Sequence[str],
        data_hosts: Sequence[str],
        *,
        reconnect_s: float,
        absent_s: float,
        after_failure_s: float,
    ) -> None:
        self.job_outcome: JobOutcome | None = None
        self.is_over = False
        self._trainers = {name: _Host() for name in trainers}
        self._data_hosts = {name: _Host() for name in data_hosts}
        self._reconnect_s = reconnect_s
        self._absent_s = absent_s
        self._after_failure_s = after_failure_s
        self._changed_at = 0.0
        self._decided_at = 0.0

    @property
    def awaited(self) -> list[str]:
        """Trainer hosts that have neither ended nor are lost."""
        return [name for name, host in self._trainers.items() if host.state not in (_State.ENDED, _State.LOST)]

    def has(self, name: str) -> bool:
        """Whether a host belongs to the job."""
        return name in self._trainers or name in self._data_hosts

    def has_ended(self, name: str) -> bool:
        """Whether the script of a host has ended."""
        return self._host(name).state is _State.ENDED

    def joined(self, name: str, now: float) -> None:
        """Note that a host is connected. A lost host that reconnects before the job is over is waited for again."""
        if not self.has_ended(name):
            self._change(name, _State.RUNNING, now)

    def left(self, name: str, now: float, why: str) -> None:
        """Note that a host is disconnected.

        Args:
            name: Name of the host.
            now: The time.
            why: What happened to the connection, for the job's outcome.
        """
        host = self._host(name)
        if host.state is _State.RUNNING:
            self._change(name, _State.AWAY, now)
            host.why_away = why

    def reported(self, name: str, outcome: Outcome, now: float) -> None:
        """Note how the script of a host ended; only the first report counts."""
        if self.has_ended(name):
            return
        self._change(name, _State.ENDED, now)
        if outcome.exit_code == 0:
            return
        self._host(name).has_failed = True
        others_can_serve = name in self._data_hosts and not all(host.has_failed for host in self._data_hosts.values())
        if not others_can_serve:
            self._decide(JobOutcome("failed", name, outcome.exit_code, outcome.reason), now)

    def update(self, now: float) -> None:
        """Draw the conclusions from the time that has passed."""
        for name, host in (*self._trainers.items(), *self._data_hosts.items()):
            if host.state is _State.AWAY and now - host.since >= self._reconnect_s:
                self._change(name, _State.LOST, now)
                if name in self._trainers:
                    self._decide(JobOutcome.lost(name, host.why_away), now)
        if not self.is_over and self._may_all_leave(now):
            self.is_over = True
            self._decide(JobOutcome("finished"), now)

    def _may_all_leave(self, now: float) -> bool:
        has_failed = self.job_outcome is not None
        if has_failed and now - self._decided_at >= self._after_failure_s:
            return True
        states = {host.state for host in self._trainers.values()}
        if has_failed:
            # A data host that starts a moment too late would wait for trainers that never come. After success nobody
            # has to wait: the trainers did reach the data hosts that they needed.
            states |= {host.state for host in self._data_hosts.values()} & {_State.ABSENT}
        if states <= {_State.ENDED, _State.LOST}:
            return True
        return states <= {_State.ENDED, _State.LOST, _State.ABSENT} and now - self._changed_at >= self._absent_s

    def _decide(self, job_outcome: JobOutcome, now: float) -> None:
        if self.job_outcome is None:
            self.job_outcome = job_outcome
            self._decided_at = now

    def _change(self, name: str, state: _State, now: float) -> None:
        host = self._host(name)
        host.state = state
        host.since = now
        self._changed_at = now

    def _host(self, name: str) -> _Host:
        return self._trainers[name] if name in self._trainers else self._data_hosts[name]
