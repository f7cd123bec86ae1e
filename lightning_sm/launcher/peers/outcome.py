"""How a job ends: which of its hosts run, have ended or are gone, and what follows for all of them.

Rules without I/O. The launcher of the main host keeps this record for the job; the order in which it hears of things
is the order in which they happened, so that no clocks are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

# What the service shows of a failure, and what fits into one message in any alphabet.
MAX_REASON_CHARS = 1024
# A lost host has no exit code; the job failed all the same.
_LOST_EXIT_CODE = 1


@dataclass(frozen=True)
class Outcome:
    """How the script of one host ended.

    Attributes:
        exit_code: Its exit code; 128 + n if signal n ended it.
        reason: Why it failed, the decisive words first; cut at 1024 characters. Empty after success.
    """

    exit_code: int
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", self.reason[:MAX_REASON_CHARS])


@dataclass(frozen=True)
class Verdict:
    """How the job ends, alike on all hosts.

    Attributes:
        kind: ``finished`` when all trainer hosts that were heard of succeeded, ``failed`` when the script of one, or
            those of all data hosts, failed, ``lost`` when a trainer host vanished.
        host: The host that failed or vanished first; empty if none did.
        exit_code: Exit code of its script; 1 for a lost host, 0 if none failed. 143 is SIGTERM: the host was
            interrupted, as all others may be at this moment.
        reason: Why, the decisive words first, in at most 1024 characters; empty if none failed.
    """

    kind: Literal["finished", "failed", "lost"]
    host: str = ""
    exit_code: int = 0
    reason: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether a trainer host, or every data host, failed or vanished, so that the others cannot succeed either."""
        return self.kind != "finished"

    @classmethod
    def lost(cls, host: str, why: str) -> Verdict:
        """The verdict over a host that vanished.

        Args:
            host: Its name.
            why: What was noticed.
        """
        return cls("lost", host, _LOST_EXIT_CODE, f"Host {host} is gone: {why}"[:MAX_REASON_CHARS])

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Verdict:
        """Read a verdict that another launcher sent.

        Args:
            message: The fields of a verdict, and others.

        Raises:
            ValueError: There is no such kind, or a field has no number where one is needed.
            KeyError: A field is missing.
        """
        kind: Literal["finished", "failed", "lost"]
        for kind in ("finished", "failed", "lost"):
            if message["kind"] == kind:
                reason = str(message["reason"])[:MAX_REASON_CHARS]
                return cls(kind, str(message["host"]), int(message["exit_code"]), reason)
        raise ValueError(f"unknown kind of verdict {message['kind']!r}")


class _State(Enum):
    ABSENT = "absent"  # never heard of
    RUNNING = "running"
    AWAY = "away"  # its connection ended; it may come back
    ENDED = "ended"
    LOST = "lost"


@dataclass
class _Host:
    state: _State = _State.ABSENT
    since: float = 0.0
    why: str = ""
    has_failed: bool = False


class Endings:
    """The record of a job's hosts. All times are seconds of one clock, that of the main host.

    Args:
        trainers: Hosts whose success or failure is the job's.
        data_hosts: Hosts that training goes on without, as long as one is left.
        return_s: How long a host whose connection ended may take to come back.
        absent_s: How long hosts that were never heard of are waited for when all others have ended.
        ending_s: How long hosts that still run are waited for after a failure.

    Attributes:
        verdict: How the job ends, once that is known; it never changes again.
        is_over: Whether nobody needs to wait any longer: all trainer hosts have ended or are gone.
    """

    def __init__(
        self, trainers: Sequence[str], data_hosts: Sequence[str], *, return_s: float, absent_s: float, ending_s: float
    ) -> None:
        self.verdict: Verdict | None = None
        self.is_over = False
        self._trainers = {name: _Host() for name in trainers}
        self._data_hosts = {name: _Host() for name in data_hosts}
        self._return_s, self._absent_s, self._ending_s = return_s, absent_s, ending_s
        self._changed_at = self._judged_at = 0.0

    @property
    def awaited(self) -> list[str]:
        """Trainer hosts that have neither ended nor vanished."""
        return [name for name, host in self._trainers.items() if host.state not in (_State.ENDED, _State.LOST)]

    def has(self, name: str) -> bool:
        """Whether a host belongs to the job.

        Args:
            name: Name of the host.
        """
        return name in self._trainers or name in self._data_hosts

    def has_ended(self, name: str) -> bool:
        """Whether the script of a host has ended.

        Args:
            name: Name of the host.
        """
        return self._host(name).state is _State.ENDED

    def joined(self, name: str, now: float) -> None:
        """Note that a host runs. One that was given up is waited for again, until the job is over.

        Args:
            name: Name of the host.
            now: The time.
        """
        if not self.has_ended(name):
            self._change(name, _State.RUNNING, now)

    def left(self, name: str, now: float, why: str) -> None:
        """Note that the connection of a host ended.

        Args:
            name: Name of the host.
            now: The time.
            why: What was noticed, for the verdict.
        """
        if self._host(name).state is _State.RUNNING:
            self._change(name, _State.AWAY, now)
            self._host(name).why = why

    def reported(self, name: str, outcome: Outcome, now: float) -> None:
        """Note how the script of a host ended; only the first report counts.

        Args:
            name: Name of the host.
            outcome: How it ended.
            now: The time.
        """
        if self.has_ended(name):
            return
        self._change(name, _State.ENDED, now)
        self._host(name).has_failed = outcome.exit_code != 0
        can_go_on = name in self._data_hosts and not all(host.has_failed for host in self._data_hosts.values())
        if outcome.exit_code != 0 and not can_go_on:
            self._judge(Verdict("failed", name, outcome.exit_code, outcome.reason), now)

    def settle(self, now: float) -> None:
        """Draw the conclusions from the time that has passed.

        Args:
            now: The time.
        """
        for name, host in (*self._trainers.items(), *self._data_hosts.items()):
            if host.state is _State.AWAY and now - host.since >= self._return_s:
                self._change(name, _State.LOST, now)
                if name in self._trainers:
                    self._judge(Verdict.lost(name, host.why), now)
        if not self.is_over and self._nobody_is_awaited(now):
            self.is_over = True
            self._judge(Verdict("finished"), now)

    def _nobody_is_awaited(self, now: float) -> bool:
        has_failed = self.verdict is not None
        if has_failed and now - self._judged_at >= self._ending_s:
            return True
        states = {host.state for host in self._trainers.values()}
        if has_failed:
            # A data host that starts a moment too late would wait for trainers that never come. After success there
            # is no such haste: the trainers did reach the data hosts that they needed.
            states |= {host.state for host in self._data_hosts.values()} & {_State.ABSENT}
        if states <= {_State.ENDED, _State.LOST}:
            return True
        return states <= {_State.ENDED, _State.LOST, _State.ABSENT} and now - self._changed_at >= self._absent_s

    def _judge(self, verdict: Verdict, now: float) -> None:
        if self.verdict is None:
            self.verdict, self._judged_at = verdict, now

    def _change(self, name: str, state: _State, now: float) -> None:
        host = self._host(name)
        host.state, host.since = state, now
        self._changed_at = now

    def _host(self, name: str) -> _Host:
        return self._trainers[name] if name in self._trainers else self._data_hosts[name]
