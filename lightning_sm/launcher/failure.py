"""The failure file, which SageMaker shows as the reason for a failed job and users read first.

SageMaker keeps the first 1024 characters of ``/opt/ml/output/failure``. The exception therefore comes first, then where
it was raised, then its traceback. (sagemaker-training starts with the command line, which often fills all the space.)
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm._text import plain, shortened
from lightning_sm.errors import LightningSMError
from lightning_sm.job.failure_file import is_lost_peer
from lightning_sm.job.outcomes import MAX_REASON_CHARS, Reason
from lightning_sm.job.topology import Role
from lightning_sm.job.traceback_text import START, PrintedException, exception_that_ended, lines_of, rank_of
from lightning_sm.launcher.first_failure import EndedProcess

_LOG = command_logger(__name__)

# Exceptions are truncated to this length, so that the frame that raised them always fits.
_MAX_EXCEPTION_CHARS = 700
# Exit code of argparse and jsonargparse for a usage error.
_USAGE_EXIT_CODE = 2
# Python's exit code for an uncaught exception.
EXCEPTION_EXIT_CODE = 1
# Exit codes after which a restart is useless: those of usage errors, and of scripts that were told to exit.
_FINAL_EXIT_CODES = frozenset({_USAGE_EXIT_CODE, 128 + signal.SIGTERM, 128 + signal.SIGINT})
# Exceptions that would recur. A script that does not import lightning_sm, or cannot be compiled, only prints them.
_FINAL_EXCEPTIONS = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError"})
# argparse and jsonargparse: "train.py: error: ..." or "error: ...".
_USAGE_ERROR = re.compile(r"^(?:[^\s:]+(?: [\w-]+)*: )?error: .+")
_USAGE = re.compile(r"^usage: ")
_OWN_ERROR = re.compile(r"^lightning_sm\.errors\.")
_LIBRARY = re.compile(r'/(?:site|dist)-packages/|/lib/python\d|"<frozen |/lightning_sm/(?:data|job|launcher|training)/')


@dataclass(frozen=True)
class Place:
    """The host on which a script ran.

    Attributes:
        host: Name of the host.
        role: Role of the host in the job.
        rank: Rank of its only training process; None if it has none or several.
    """

    host: str
    role: Role
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.role.value} host {self.host}{rank}"


@dataclass(frozen=True)
class ScriptFailure:
    """The failure of a host's script.

    Attributes:
        exit_code: Exit code of the process that failed first; 128 + n if signal n killed it.
        reason: Why it failed.
        is_consequence: Whether the script failed because a process on another host had exited.
        is_permanent: Whether the script would fail in the same way again.
    """

    exit_code: int
    reason: Reason
    is_consequence: bool = False
    is_permanent: bool = False


def script_failure(
    failed: EndedProcess, exit_code: int, stderr_tail: str, place: Place, *, stopped_by: int | None = None
) -> ScriptFailure:
    """Describe why this host's training script failed.

    Args:
        failed: The process that failed first.
        exit_code: Exit code of the script, used if the exit code of the process is unknown.
        stderr_tail: The end of what the script and its local ranks wrote to stderr.
        place: This host.
        stopped_by: The signal that told this host to stop, if any.
    """
    is_unknown = failed.exited_at is not None and failed.exit_code is None and failed.failure is None
    exit_code = failed.exit_code or exit_code
    ending = "exited with a code that only its parent knows" if is_unknown else ending_of(exit_code)
    place = place if failed.rank < 0 else replace(place, rank=failed.rank)
    failure, printed = failed.failure, None
    if failure is not None:
        reason = _with_place(failure.lines, failure.frames, place, ending, is_passed_on=failure.is_passed_on)
    else:
        lines = [line for line in lines_of(stderr_tail) if rank_of(line) in (None, failed.rank) or failed.rank < 0]
        reason, printed = _printed_reason(lines, exit_code, place, ending, may_raise=not failed.has_reporter)
    if stopped_by is not None:
        reason = Reason(stopped_reason(stopped_by, reason.text), stopped_reason(stopped_by, reason.headline))
    if failure is not None:
        return ScriptFailure(exit_code, reason, failure.is_consequence, failure.is_permanent)
    said = "" if printed is None else printed.lines[0]
    is_permanent = exit_code in _FINAL_EXIT_CODES or said.partition(":")[0] in _FINAL_EXCEPTIONS
    return ScriptFailure(exit_code, reason, is_lost_peer(said), is_permanent)


def failure_reason(stderr_tail: str, exit_code: int, place: Place | None = None) -> Reason:
    """Describe why a process that writes no failure file failed.

    Args:
        stderr_tail: The end of the process's stderr.
        exit_code: Its exit code; 128 + n if signal n killed it.
        place: Where it ran; None if this is clear from the context.
    """
    return _printed_reason(lines_of(stderr_tail), exit_code, place, ending_of(exit_code))[0]


def _printed_reason(
    lines: Sequence[str], exit_code: int, place: Place | None, ending: str, *, may_raise: bool = True
) -> tuple[Reason, PrintedException | None]:
    """Return the reason found in stderr, and the exception that caused the failure, if one was printed."""
    if exit_code == _USAGE_EXIT_CODE and (message := _usage_message(lines)):
        return Reason(f"{shortened(message, _MAX_EXCEPTION_CHARS)}\n{_where(place, ending)}"), None
    is_exception = may_raise and exit_code == EXCEPTION_EXIT_CODE  # Python uses this code only for exceptions
    # A rank that merely lost its connection may print before or after the rank that caused the failure.
    ranks = [rank for rank in dict.fromkeys(map(rank_of, lines)) if rank is not None]
    texts = [[line for line in lines if rank_of(line) in (None, rank)] for rank in ranks] or [list(lines)]
    found = filter(None, map(exception_that_ended, texts if is_exception else ()))
    printed = min(found, key=lambda one: is_lost_peer(one.lines[0]), default=None)
    if printed is not None:
        if place is not None and printed.rank is not None:
            place = replace(place, rank=printed.rank)
        return _with_place(printed.lines, printed.frames, place, ending), printed
    written = [line for line in lines if line]
    where = ending if place is None else f"{ending} on {place}"
    return _with_last_lines(written, where) if written else Reason(f"{where}; nothing was written to stderr"), None


def stopped_reason(stopped_by: int, rest: str) -> str:
    """Return the reason that a host reports if it was told to stop.

    Args:
        stopped_by: The signal.
        rest: What happened next, as a sentence.
    """
    return f"The job was stopped or interrupted ({signal.Signals(stopped_by).name}). {rest}"


def not_started_reason(stopped_by: int | None, doing: str) -> str:
    """Return the reason that a host reports if it never started its script, although nothing failed on this host.

    Args:
        stopped_by: The signal that told this host to stop; None if the job ended on another host.
        doing: What the host was doing, such as "fetching s3://bucket/code.tar.gz".
    """
    if stopped_by is None:
        return f"The job has ended. This host was {doing}."
    return stopped_reason(stopped_by, f"This host was {doing}.")


def error_reason(error: Exception, place: Place | None) -> str:
    """Describe an exception in the launcher: an error of lightning_sm, or a bug.

    Args:
        error: The exception.
        place: This host; None if it is not known yet.
    """
    reason = f"{type(error).__name__}: {error}"
    if not isinstance(error, LightningSMError):
        reason = f"The launcher failed: {reason}"
    where = "" if place is None else f"\non {place}"
    return shortened(reason, MAX_REASON_CHARS - len(where)) + where


def remove_failure(output_dir: Path) -> None:
    """Remove the failure file of an earlier job in the same container (a warm pool)."""
    path = output_dir / "failure"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("cannot remove %s, a leftover of an earlier job: %s", path, error)


def write_failure(output_dir: Path, reason: str) -> None:
    """Write the failure file, unless the script has written one."""
    path = output_dir / "failure"
    try:
        if path.exists():
            return
        output_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(plain(reason)[:MAX_REASON_CHARS], encoding="utf-8", errors="replace")
    except OSError as error:
        _LOG.warning("cannot write %s (%s). Its text would be: %s", path, error, reason)


def ending_of(exit_code: int) -> str:
    """Describe how a process exited, such as "killed by SIGKILL (exit code 137)".

    Args:
        exit_code: Its exit code; 128 + n if signal n killed it.
    """
    try:
        return f"killed by {signal.Signals(exit_code - 128).name} (exit code {exit_code})"
    except ValueError:
        return f"exit code {exit_code}"


def _usage_message(lines: Sequence[str]) -> str:
    """Return the last usage error and its explanation, which jsonargparse separates with an empty line."""
    errors = [index for index, line in enumerate(lines) if _USAGE_ERROR.match(line)]
    rest = lines[errors[-1] :] if errors else ()
    said = takewhile(lambda line: not (_USAGE.match(line) or START.search(line)), rest)
    return "\n".join(line for line in said if line)


def _where(place: Place | None, ending: str, verb: str = "on") -> str:
    return ending if place is None else f"{verb} {place} ({ending})"


def _with_place(
    lines: Sequence[str], frames: Sequence[str], place: Place | None, ending: str, *, is_passed_on: bool = False
) -> Reason:
    """Return the exception, where it was raised, and its frames."""
    # The text of an exception that a data host passed on already names that host.
    is_named = is_passed_on and place is not None and place.role is Role.DATA
    where = ending if is_named else _where(place, ending, "passed on to" if is_passed_on else "on")
    text = shortened("\n".join(lines), _MAX_EXCEPTION_CHARS)
    # Lines after a full sentence may be a table, so leave them out of the headline.
    first, *rest = text.splitlines()
    return Reason(_with_frames(f"{text}\n{where}", frames), " ".join([first, *rest[: not first.endswith(".")], where]))


def _with_frames(reason: str, frames: Sequence[str]) -> str:
    """Append frames, innermost first: the one that raised, then those in the user's code."""
    nearest = list(reversed(frames))
    # Omit the raising frame of lightning_sm's errors: their messages suffice.
    num_raising = 0 if _OWN_ERROR.match(reason) else 1
    wanted = nearest[:num_raising] + [frame for frame in nearest[num_raising:] if not _LIBRARY.search(frame)]
    for frame in wanted:
        if len(reason) + len(frame) + 1 > MAX_REASON_CHARS:
            break
        reason += f"\n{frame}"
    return shortened(reason, MAX_REASON_CHARS)


def _with_last_lines(written: list[str], ending: str) -> Reason:
    reason = f"{ending}; last lines of stderr:"
    kept = written[-MAX_REASON_CHARS:]
    while len(kept) > 1 and len("\n".join([reason, *kept])) > MAX_REASON_CHARS:
        del kept[0]
    return Reason(shortened("\n".join([reason, *kept]), MAX_REASON_CHARS), f"{reason} {written[-1]}")
