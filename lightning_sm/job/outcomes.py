"""The outcomes of scripts and jobs, with their reasons."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

# Lightning alone would exit with 0 after an interruption, and SageMaker would report the job as "Completed".
INTERRUPTED_EXIT_CODE = 128 + signal.SIGTERM
# SageMaker shows this many characters of a failure. In any alphabet, they fit into one message between launchers.
MAX_REASON_CHARS = 1024
# Stands in for the exit code of a lost host, which has reported none.
_LOST_EXIT_CODE = 1


class OutcomeKind(Enum):
    """The kind of a script's or the whole job's outcome. Launchers act on the kind, never on the reason."""

    SUCCESS = "success"
    FAILURE = "failure"
    HANG = "hang"  # the launcher killed the script because it made no progress
    INTERRUPTION = "interruption"  # exit code 143; all other hosts may be interrupted at the same moment
    LOST = "lost"  # only for a job: the launcher of a trainer host vanished

    @classmethod
    def of_exit_code(cls, exit_code: int) -> OutcomeKind:
        """Return the kind implied by an exit code alone."""
        if exit_code == INTERRUPTED_EXIT_CODE:
            return cls.INTERRUPTION
        return cls.FAILURE if exit_code else cls.SUCCESS


@dataclass(frozen=True)
class Reason:
    """The reason for a script's failure, for messages.

    Attributes:
        text: The reason, with the most important words first; truncated to 1024 characters.
        headline: The reason in one line, for logs. Defaults to the first two lines, which are the error and its place.
    """

    text: str
    headline: str = ""

    def __post_init__(self) -> None:
        text = self.text[:MAX_REASON_CHARS]
        object.__setattr__(self, "text", text)
        headline = self.headline or " ".join(text.splitlines()[:2])
        object.__setattr__(self, "headline", headline[:MAX_REASON_CHARS])


@dataclass(frozen=True)
class Outcome:
    """The outcome of one host's script.

    Attributes:
        kind: The kind of outcome.
        exit_code: Exit code of the script; 128 + n if signal n killed it.
        reason: Why the script failed; empty after success.
        may_restart: Whether the script may be restarted, if the job has restarts left.
    """

    kind: OutcomeKind
    exit_code: int
    reason: Reason = Reason("")
    may_restart: bool = False

    @classmethod
    def of_exit_code(cls, exit_code: int, reason: Reason | str = "", *, may_restart: bool = False) -> Outcome:
        """Return an outcome of the kind implied by the exit code."""
        reason = Reason(reason) if isinstance(reason, str) else reason
        return cls(OutcomeKind.of_exit_code(exit_code), exit_code, reason, may_restart)


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of the job, the same on all hosts.

    Attributes:
        kind: ``SUCCESS`` if all connected trainer hosts succeeded; ``LOST`` if a trainer host vanished; else the kind
            of outcome of the first trainer host to fail, or of the last data host.
        host: The host that failed or vanished first; empty if none did.
        exit_code: Exit code of that host's script; 1 for a lost host, 0 if none failed.
        reason: Why the host failed; empty if none failed.
    """

    kind: OutcomeKind
    host: str = ""
    exit_code: int = 0
    reason: Reason = Reason("")

    @property
    def is_failure(self) -> bool:
        """Whether a trainer host or every data host failed or vanished, so that the other hosts cannot succeed."""
        return self.kind is not OutcomeKind.SUCCESS

    @classmethod
    def lost(cls, host: str, why: str) -> JobOutcome:
        """Return the outcome of a job that lost a host.

        Args:
            host: Name of the host.
            why: What happened to the connection, for messages.
        """
        return cls(OutcomeKind.LOST, host, _LOST_EXIT_CODE, Reason(f"Lost host {host}: {why}"))
