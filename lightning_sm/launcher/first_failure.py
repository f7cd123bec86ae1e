"""Rules, without I/O, for finding the process that failed first when a host's script fails."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_sm.job.failure_file import ProcessFailure

_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class EndedProcess:
    """The script, or one of its ranks.

    Attributes:
        pid: Process id.
        rank: Its global rank; -1 if it is not known.
        exit_code: Its exit code; 128 + n if signal n killed it. None if it still runs, or if only its parent knows the
            code.
        exited_at: When it exited, as a value of ``time.monotonic()``; None if it still runs.
        failure: Its report of the exception that made it fail; None if it reported nothing.
        has_reporter: Whether it reports its exceptions.
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
    """Return the process that failed first, whether it raised an exception (not a consequence) or exited without one.

    Args:
        processes: The script, and all processes that have announced themselves or can report failures.
        script: The process id of the script; None if the launcher started several ranks of it.
        only_exceptions: If True, ignore exits without an exception, except the script's, because all others were told
            to exit.
    """
    reported = [(process.failure.at, process) for process in processes if process.failure is not None]
    failed = [process for process in processes if process.exit_code != 0 and process.exited_at is not None]
    first_rank = min((end for end in failed if end.pid != script), key=lambda end: end.exited_at or 0.0, default=None)
    causes: list[tuple[float, EndedProcess]] = []
    for process in processes:
        is_script = process.pid == script
        if process.failure is not None:
            if not process.is_consequence:
                causes.append((process.failure.at, process))
        elif process.exited_at is not None and process.exit_code and (is_script or not only_exceptions):
            # Lightning and torchrun kill the other ranks when one has exited.
            is_cleanup = process.exit_code in _KILLED and first_rank not in (None, process)
            # A shell or torchrun exits with an error because its ranks failed.
            is_messenger = is_script and not process.has_reporter and bool(reported or first_rank)
            if not is_cleanup and not is_messenger:
                causes.append((process.exited_at, process))
    vanished = [(rank.exited_at or 0.0, rank) for rank in failed if rank.exit_code is None and not rank.failure]
    # If there is no cause, choose a process whose exit code only its parent knows, then the first consequence.
    for candidates in (causes, [] if only_exceptions else vanished, reported):
        if candidates:
            return min(candidates, key=lambda candidate: candidate[0])[1]
    return next((process for process in processes if process.pid == script), first_rank or processes[0])
