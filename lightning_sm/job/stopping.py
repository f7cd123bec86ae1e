"""How a host stops: the signals, their schedule, and the rules for its exit code.

Launcher, ranks and data hosts share these. The rules have no I/O: the launcher applies them.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from lightning_sm.job.topology import Role
from lightning_sm.job.variables import STOP_SCHEDULE

# Asks a training script to save a checkpoint and exit. Not SIGTERM: on that, Lightning makes a collective call, which
# deadlocks unless all ranks get the signal at the same moment (Lightning issue 20806).
GENTLE_SIGNAL = signal.SIGUSR2
# An interrupted run did not succeed. Lightning exits with 0, by which SageMaker would call the job "Completed".
INTERRUPTED_EXIT_CODE = 128 + signal.SIGTERM


@dataclass(frozen=True)
class StopSchedule:
    """What the launcher sends when SageMaker stops the job, and when, in seconds since SageMaker's SIGTERM.

    At 0 s, the gentle signal goes to the processes that handle it. If no process does, all get SIGTERM at 0 s. The
    launcher's ``ChildProcess`` sends them.

    Attributes:
        term_s: When processes that still run get SIGTERM. SageMaker itself sends SIGKILL after 120 s.
        kill_s: When they get SIGKILL.
    """

    term_s: float
    kill_s: float

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> StopSchedule:
        """Read ``LIGHTNING_SM_STOP_SCHEDULE``.

        Raises:
            JobConfigError: The value is not two numbers in ascending order.
        """
        return cls(*STOP_SCHEDULE.read(env))


# SageMaker shows this much of a failure, and it fits into one message between launchers in any alphabet.
MAX_REASON_CHARS = 1024
# A lost host reported no exit code; the job failed all the same.
_LOST_EXIT_CODE = 1


@dataclass(frozen=True)
class Outcome:
    """How the script of one host ended.

    Attributes:
        exit_code: Its exit code; 128 + n if signal n ended it.
        reason: Why it failed, the decisive words first; cut at 1024 characters. Empty after success.
        may_restart: Whether the script may be started again, if the job has restarts left.
    """

    exit_code: int
    reason: str = ""
    may_restart: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", self.reason[:MAX_REASON_CHARS])

    @property
    def headline(self) -> str:
        """The reason in one line, for the log: the error and where it was raised, or how the script ended."""
        first, *others = self.reason.splitlines() or [""]
        is_tail = first.endswith("last lines of stderr:")
        return " ".join([first, *(others[-1:] if is_tail else others[:1])])


@dataclass(frozen=True)
class JobOutcome:
    """How the job ends; the same on all hosts.

    Attributes:
        kind: ``finished`` if all connected trainer hosts succeeded; ``failed`` if the script of a trainer host, or the
            scripts of all data hosts, failed; ``lost`` if a trainer host vanished.
        host: The host that failed or vanished first; empty if none did.
        exit_code: Exit code of its script; 1 for a lost host, 0 if none failed. 143 is SIGTERM: the host was
            interrupted, and all others may be at the same moment.
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

    @property
    def is_interruption(self) -> bool:
        """Whether the first host to fail was interrupted by SIGTERM."""
        return self.exit_code == INTERRUPTED_EXIT_CODE

    @classmethod
    def lost(cls, host: str, why: str) -> JobOutcome:
        """The outcome of a job that lost a host.

        Args:
            host: Name of the host.
            why: How its launcher noticed, for people.
        """
        return cls("lost", host, _LOST_EXIT_CODE, f"Lost host {host}: {why}"[:MAX_REASON_CHARS])

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> JobOutcome:
        """Read the outcome that another launcher sent.

        Raises:
            ValueError: The kind is unknown, or the exit code is not a number.
            KeyError: A field is missing.
        """
        kind = message["kind"]
        if kind not in ("finished", "failed", "lost"):
            raise ValueError(f"unknown kind of job outcome: {kind!r}")
        reason = str(message["reason"])[:MAX_REASON_CHARS]
        return cls(kind, str(message["host"]), int(message["exit_code"]), reason)


class Stop(Enum):
    """Whether SageMaker, or a user, stopped this host."""

    NONE = "it was not stopped"
    FIRST = "it was stopped before any host had failed by itself"
    AFTER_FAILURE = "it was stopped because another host had failed"


class FinalOutcome(Enum):
    """How a host exits."""

    OWN = "as its own script did"
    NOT_NEEDED = "with 0: training succeeded without this data host"
    FAILED_ELSEWHERE = "with its own exit code or 1, and the reason of the host that failed first"


def final_outcome(role: Role, stop: Stop, exit_code: int, job: JobOutcome | None, host: str) -> FinalOutcome:
    """How this host exits.

    A trainer host never looks successful when another host failed.

    ======= ============== ======================== ===================
    role    own exit code  job                      this host exits as
    ======= ============== ======================== ===================
    data    not 0          finished                 ``NOT_NEEDED``
    data    any            anything else            ``OWN``
    trainer any            unknown, finished, or    ``OWN``
                           failed on this host
    trainer not 0          failed on another host,  ``OWN``
                           but the stop was first
    trainer any            failed on another host   ``FAILED_ELSEWHERE``
    ======= ============== ======================== ===================

    Args:
        role: The role of this host.
        stop: Whether this host was stopped.
        exit_code: Exit code of the script of this host.
        job: The outcome of the job; None if this host never learned it.
        host: Name of this host.
    """
    if role is Role.DATA:
        is_needless = job is not None and not job.is_failure and exit_code != 0
        return FinalOutcome.NOT_NEEDED if is_needless else FinalOutcome.OWN
    failed_elsewhere = job is not None and job.is_failure and job.host != host
    if not failed_elsewhere or (stop is Stop.FIRST and exit_code != 0):
        return FinalOutcome.OWN
    return FinalOutcome.FAILED_ELSEWHERE


def ends_script(role: Role, job: JobOutcome, host: str, *, is_stopped: bool) -> bool:
    """Whether the outcome of the job leaves the script of this host nothing to do.

    A data host's work ends with the training, however that ended. A trainer host that was stopped keeps its whole
    schedule to save a checkpoint, even if another host exits earlier.

    Args:
        role: The role of this host.
        job: The outcome of the job.
        host: Name of this host.
        is_stopped: Whether this host was stopped.
    """
    if job.host == host:
        return False
    if role is Role.DATA:
        return True
    has_first_host_left = job.kind == "lost" or job.is_interruption
    return job.is_failure and not (is_stopped and has_first_host_left)
