"""The failure file, which SageMaker shows as the reason for a failed job, and which users read first.

SageMaker keeps the first 1024 characters of ``/opt/ml/output/failure``. So the exception comes first, then where it was
raised, then its traceback. (sagemaker-training begins with the command line, which often fills all the space.)
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_sm._log import command_logger
from lightning_sm._text import shortened, times
from lightning_sm.errors import LightningSMError
from lightning_sm.job.stopping import MAX_REASON_CHARS, Reason
from lightning_sm.job.topology import Role
from lightning_sm.launcher.tracebacks import ANSI, START, USAGE, USAGE_ERROR, Traceback, cause_of, tracebacks_in

_LOG = command_logger(__name__)

# The exception is cut here, so that the frame that raised it always fits after it.
_MAX_EXCEPTION_CHARS = 700
# argparse exits with it, and so does jsonargparse.
_USAGE_EXIT_CODE = 2
# A process that signal n killed has exit code 128 + n.
_SIGNALS = 128

# A process that fails says why only on stderr: in Python's traceback, or in argparse's usage error.
# The user's exception on a data host, as the trainers raise it: its text, the place, and the traceback from there.
_REMOTE = re.compile(r"^(?:lightning_sm\.errors\.)?RemoteTransformError: ")
_OWN_ERROR = re.compile(r"^lightning_sm\.errors\.")
_LIBRARY = re.compile(r'/(?:site|dist)-packages/|/lib/python\d|"<frozen |/lightning_sm/(?:data|job|launcher|training)/')


@dataclass(frozen=True)
class Place:
    """The host on which a script ran.

    Attributes:
        host: Name of the host.
        role: Its role in the job.
        rank: Rank of its only training process; None if it has several, or none.
    """

    host: str
    role: Role
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.role.value} host {self.host}{rank}"


def failure_reason(stderr_tail: str, exit_code: int, place: Place | None = None, circumstances: str = "") -> Reason:
    """Say why a process failed.

    Args:
        stderr_tail: The end of what the process and its children (the local ranks) wrote to stderr.
        exit_code: Its exit code; 128 + n if signal n killed it.
        place: Where it ran; None if the reader knows.
        circumstances: What else the reader should know about its exit; may be empty.
    """
    lines = _lines(stderr_tail)
    ending = ending_of(exit_code, circumstances)
    usage_error = next((index for index, line in enumerate(lines) if USAGE_ERROR.match(line)), None)
    if exit_code == _USAGE_EXIT_CODE and usage_error is not None:
        message = shortened("\n".join(_usage_message(lines[usage_error:])), _MAX_EXCEPTION_CHARS)
        return Reason(f"{message}\n{_where(place, ending)}")
    tracebacks = list(tracebacks_in(lines))
    traceback = cause_of(tracebacks)
    if traceback is None and exit_code < _SIGNALS:
        # There are only consequences, the last of which ended the script (unless it was killed).
        traceback = next((last for last in reversed(tracebacks) if not last.is_ignored), None)
    if traceback is not None:
        if place is not None and traceback.rank is not None:
            place = replace(place, rank=traceback.rank)
        return _with_place(traceback, tracebacks, place, ending)
    written = [line for line in lines if line]
    where = ending if place is None else f"{ending} on {place}"
    return _with_last_lines(written, where) if written else Reason(f"{where}; nothing was written to stderr")


def script_reason(
    stderr_tail: str, exit_code: int, place: Place, *, stopped_by: int | None = None, num_restarts: int = 0
) -> Reason:
    """Say why the training script of this host failed.

    Args:
        stderr_tail: The end of what the script and its local ranks wrote to stderr.
        exit_code: Exit code of the script; 128 + n if signal n killed it.
        place: This host.
        stopped_by: The signal that told this host to stop, if there was one.
        num_restarts: How often the script was killed and restarted.
    """
    reason = failure_reason(stderr_tail, exit_code, place, f"restarted {times(num_restarts)}" if num_restarts else "")
    if stopped_by is not None:
        stop = f"The job was stopped or interrupted ({signal.Signals(stopped_by).name}). "
        return Reason(stop + reason.text, stop + reason.headline)
    return reason


def not_started_reason(stopped_by: int | None, doing: str) -> str:
    """Say why a host never started its script although nothing failed there.

    Args:
        stopped_by: The signal that told this host to stop; None if the job ended on another host.
        doing: What the host was doing, such as "fetching s3://bucket/code.tar.gz".
    """
    if stopped_by is None:
        return f"The job has ended. This host was {doing}."
    return f"The job was stopped or interrupted ({signal.Signals(stopped_by).name}). This host was {doing}."


def error_reason(error: Exception, place: Place | None) -> str:
    """Say why the launcher itself failed: by an error of lightning_sm, or else by a bug.

    Args:
        error: The error.
        place: This host; None if that is not known yet.
    """
    reason = f"{type(error).__name__}: {error}"
    if not isinstance(error, LightningSMError):
        reason = f"The launcher failed: {reason}"
    where = "" if place is None else f"\non {place}"
    return shortened(reason, MAX_REASON_CHARS - len(where)) + where


def is_consequence(stderr_tail: str) -> bool:
    """Return whether a script failed only because a process on another host had exited.

    Args:
        stderr_tail: The end of what the script and its local ranks wrote to stderr.
    """
    tracebacks = list(tracebacks_in(_lines(stderr_tail)))
    return bool(tracebacks) and all(traceback.is_consequence for traceback in tracebacks)


def cause_of_failure(stderr_tail: str) -> str:
    """Return the exception with which a failure began, as Python printed it; empty if there is none.

    For an exception in the user's code on a data host, this is the user's exception.

    Args:
        stderr_tail: The end of what the script and its local ranks wrote to stderr.
    """
    cause = cause_of(list(tracebacks_in(_lines(stderr_tail))))
    return "" if cause is None else _REMOTE.sub("", cause.exception[0])


def remove_failure(output_dir: Path) -> None:
    """Remove the failure file of an earlier job in the same container (a warm pool)."""
    path = output_dir / "failure"
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("cannot remove %s, which an earlier job left: %s", path, error)


def write_failure(output_dir: Path, reason: str) -> None:
    """Write the failure file, unless the script has written its own."""
    path = output_dir / "failure"
    try:
        if path.exists():
            return
        output_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(reason[:MAX_REASON_CHARS], encoding="utf-8", errors="replace")
    except OSError as error:
        _LOG.warning("cannot write %s (%s). The reason for the failure: %s", path, error, reason)


def _lines(stderr_tail: str) -> list[str]:
    text = ANSI.sub("", stderr_tail).replace("\r\n", "\n").replace("\r", "\n")
    return [line.rstrip() for line in text.split("\n")]


def ending_of(exit_code: int, circumstances: str = "") -> str:
    """Say how a process exited: "killed by SIGKILL (exit code 137)".

    Args:
        exit_code: Its exit code; 128 + n if signal n killed it.
        circumstances: What else to say about it; may be empty.
    """
    more = f", {circumstances}" if circumstances else ""
    try:
        return f"killed by {signal.Signals(exit_code - _SIGNALS).name} (exit code {exit_code}{more})"
    except ValueError:
        return f"exit code {exit_code}{more}"


def _usage_message(lines: list[str]) -> list[str]:
    """Return the error and what explains it, which jsonargparse separates by an empty line: all lines to the end."""
    ends = (USAGE, USAGE_ERROR, START)
    message = lines[:1]
    for line in lines[1:]:
        if any(end.match(line) for end in ends):
            break
        message += [line] if line else []
    return message


def _where(place: Place | None, ending: str, verb: str = "on") -> str:
    return ending if place is None else f"{verb} {place} ({ending})"


def _with_place(traceback: Traceback, tracebacks: list[Traceback], place: Place | None, ending: str) -> Reason:
    """Return the exception, where it was raised, and its frames; for an error on a data host, the frames from there."""
    exception = traceback.exception
    frames = traceback.frames
    where = _where(place, ending)
    if _REMOTE.match(exception[0]):
        exception = [_REMOTE.sub("", exception[0]), *exception[1:]]
        remote = (other for other in tracebacks if other.exception[0] == exception[0])
        frames = next((other.frames for other in remote), frames)
        if place is not None:  # the error's text already names the place
            where = _where(place, ending, "passed on to") if place.role is Role.TRAINER else ending
    return Reason(_with_frames(shortened("\n".join(exception), _MAX_EXCEPTION_CHARS) + f"\n{where}", frames))


def _with_frames(reason: str, frames: list[str]) -> str:
    """Add frames, the innermost first: the raising one, then those in the user's own code."""
    nearest = frames[::-1]
    # An error of lightning_sm says what is wrong; the frame that raises it does not help.
    num_raising = 0 if _OWN_ERROR.match(reason) else 1
    wanted = nearest[:num_raising] + [frame for frame in nearest[num_raising:] if not _LIBRARY.search(frame)]
    for frame in wanted:
        if len(reason) + len(frame) + 1 > MAX_REASON_CHARS:
            break
        reason += f"\n{frame}"
    return shortened(reason, MAX_REASON_CHARS)


def _with_last_lines(written: list[str], ending: str) -> Reason:
    reason = f"{ending}; last lines of stderr:"
    room = MAX_REASON_CHARS - len(reason)
    kept: list[str] = []
    for line in reversed(written):
        room -= len(line) + 1
        if room < 0 and kept:
            break
        kept.insert(0, line)
    return Reason(shortened("\n".join([reason, *kept]), MAX_REASON_CHARS), f"{reason} {written[-1]}")
