"""The process with which the failure of a host's script began. Rules without I/O."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_sm.job.failure_file import ProcessFailure

_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class EndedProcess:
    """The script, or a rank that it started.

    Attributes:
        pid: The process.
        rank: Its global rank; -1 if it is not known.
        exit_code: Its exit code; 128 + n if signal n killed it. None if it still runs, or if only its parent knows.
        exited_at: When it exited, in seconds of ``time.monotonic``; None if it still runs.
        failure: What it said of the exception that ended it; None if it said nothing.
        has_reporter: Whether it would have said so.
    """

    pid: int
    rank: int = -1
    exit_code: int | None = None
    exited_at: float | None = None
    failure: ProcessFailure | None = None
    has_reporter: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another process had exited."""
        return self.failure is not None and self.failure.is_consequence


def first_failure(
    processes: Sequence[EndedProcess], script: int | None, *, only_exceptions: bool = False
) -> EndedProcess:
    """Return the process that failed first: by an exception that is not a consequence, or killed or exited without one.

    Args:
        processes: The script, and all processes that have announced themselves or can report failures.
        script: The process id of the script; None if several ranks run it, which the launcher has started.
        only_exceptions: Whether an exit without an exception counts for the script only: the others were told to exit.
    """
    reported = [(one.failure.at, one) for one in processes if one.failure is not None]
    failed = [one for one in processes if one.exit_code != 0 and one.exited_at is not None]
    first_rank = min((one for one in failed if one.pid != script), key=lambda one: one.exited_at or 0.0, default=None)
    causes: list[tuple[float, EndedProcess]] = []
    for process in processes:
        is_script = process.pid == script
        if process.failure is not None:
            if not process.is_consequence:
                causes.append((process.failure.at, process))
        elif process.exited_at is not None and process.exit_code and (is_script or not only_exceptions):
            # Lightning and torchrun kill the other ranks when one has exited.
            is_cleanup = process.exit_code in _KILLED and first_rank not in (None, process)
            # A shell or torchrun fails because its ranks have failed.
            is_messenger = is_script and not process.has_reporter and bool(reported or first_rank)
            if not is_cleanup and not is_messenger:
                causes.append((process.exited_at, process))
    vanished = [(one.exited_at or 0.0, one) for one in failed if one.exit_code is None and not one.failure]
    # Without a cause: one that only its parent has seen exit, then the first of the consequences.
    for found in (causes, [] if only_exceptions else vanished, reported):
        if found:
            return min(found, key=lambda one: one[0])[1]
    return next((process for process in processes if process.pid == script), first_rank or processes[0])
