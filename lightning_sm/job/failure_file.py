"""A process's failure file, ``failure-<pid>.json`` in the control folder, with the exception that ended the process.

The process writes the file from its exception hook, where the exception is still an object: its type shows whether
another process's exit caused the exception, and whether the exception would recur. The launcher reads the file when the
script has failed. An empty file means that the process reports exceptions. If the file is still empty after the process
has exited, the process was killed by a signal, or called ``sys.exit`` or ``os._exit``.

The file uses the format of ``torch.distributed.elastic``. A rank started by torchrun also writes the same content to
``TORCHELASTIC_ERROR_FILE``, so that torchrun shows the exception with which the job failed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from lightning_sm import errors
from lightning_sm._linux import exit_code_of_zombie
from lightning_sm._structs import Struct
from lightning_sm.job.traceback_text import START, frame, last_exception, lines_of
from lightning_sm.job.variables import CONTROL_DIR

PREFIX, SUFFIX = "failure-", ".json"
# Set by torchrun for each rank; empty if torchrun writes no error files.
_TORCHS = "TORCHELASTIC_ERROR_FILE"
# More than enough: the launcher shows 1024 characters in all.
_MAX_LINES = 40
_MAX_LINE_CHARS = 2000
# This package's errors that are due to a contradiction in the job. Its other errors concern a host, a port or a file,
# and may not recur.
_CONTRADICTIONS = (ValueError, ImportError, errors.NeedsLinuxError)
# Exceptions raised because another process has exited or told this one to exit; by name, to avoid importing torch.
_OF_OTHER_PROCESSES = ("SIGTERMException", "ProcessRaisedException")
_LOST_CONNECTIONS = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, KeyboardInterrupt)
# Gloo, NCCL and TCPStore have no exception type for a lost peer. NCCL may name it on any line.
_LOST_PEER = re.compile(
    r"Broken ?[Pp]ipe|Connection ?[Rr]eset|Connection ?[Rr]efused|Connection closed by (?:remote )?peer"
    r"|remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted"
    r"|DistStoreError: (?:Socket Timeout|wait timeout)"
)


class ProcessFailure(Struct, frozen=True, forbid_unknown_fields=False):
    """The exception that ended a process, as described by the process itself.

    Unknown fields are ignored: the job's code may bring a newer version of this package than the launcher's image has.

    Attributes:
        rank: Global rank of the process; -1 if unknown, and on data hosts.
        at: Time of the report in seconds, from ``time.monotonic``, which all processes on a host share.
        lines: Type and message as Python prints them.
        frames: The frames, innermost last.
        is_consequence: Whether the exception was raised because another process had exited.
        is_permanent: Whether the exception would recur in a restarted script.
        is_passed_on: Whether the exception was raised on a data host; ``lines`` then names the host.
        dead_children: Process ids and exit codes (-n for signal n) of children that had already exited. Once this
            process has waited for its children, as it does when it exits, no other process can read these codes.
        message: The exception in torchrun's format.
    """

    rank: int
    at: float
    lines: tuple[str, ...]
    frames: tuple[str, ...]
    is_consequence: bool = False
    is_permanent: bool = False
    is_passed_on: bool = False
    dead_children: tuple[tuple[int, int], ...] = ()
    message: Mapping[str, object] = {}

    @classmethod
    def of(cls, error: BaseException, rank: int = -1) -> ProcessFailure:
        """Describe an exception, or the last one in its chain that was not caused by another process's exit."""
        chain = _chain(error)
        cause = next((link for link in chain if not followed_from_another(link)), error)
        lines, frames = _described(cause)
        is_consequence = followed_from_another(cause)
        # torchrun blames the failure with the earliest time (in whole seconds), then the one with the lowest rank, so
        # give consequences a later time.
        at = str(int(time.time()) + is_consequence)
        return cls(
            rank=rank,
            at=time.monotonic(),
            lines=tuple(line[:_MAX_LINE_CHARS] for line in lines[:_MAX_LINES]),
            frames=tuple(frames[-_MAX_LINES:]),
            is_consequence=is_consequence,
            is_permanent=would_recur(cause),
            is_passed_on=isinstance(cause, errors.RemoteTransformError),
            dead_children=tuple(
                (child.pid, code)
                for child in psutil.Process().children()
                if (code := exit_code_of_zombie(child.pid)) is not None
            ),
            message={
                "message": "\n".join(lines),
                "extraInfo": {"py_callstack": "".join(traceback.format_exception(cause)), "timestamp": at},
            },
        )


def would_recur(error: BaseException) -> bool:
    """Return whether an exception would recur after a restart: a failed import, or contradictory settings."""
    if isinstance(error, (ImportError, SyntaxError)):
        return True
    return isinstance(error, errors.LightningSMError) and isinstance(error, _CONTRADICTIONS)


def followed_from_another(error: BaseException) -> bool:
    """Return whether an exception was raised because another process had exited, or had told this one to exit."""
    if isinstance(error, _LOST_CONNECTIONS) or type(error).__name__ in _OF_OTHER_PROCESSES:
        return True
    # Only torch's errors count: the user's code and lightning_sm may quote such a message.
    is_torchs = type(error) is RuntimeError or type(error).__module__.startswith("torch.")
    return is_torchs and is_lost_peer(f"{type(error).__name__}: {error}")


def is_lost_peer(text: str) -> bool:
    """Return whether a message from torch reports that another rank has closed its connection."""
    return _LOST_PEER.search(text) is not None


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception, then the causes and contexts that Python would print above it, nearest first."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context
    return chain


def _described(error: BaseException) -> tuple[list[str], list[str]]:
    """Return the lines and frames of an exception, or of the original one if another process passed it on."""
    printed = traceback.format_exception_only(type(error), error)
    # A SyntaxError begins with its file and line, which are added as a frame below.
    while len(printed) > 1 and printed[0].startswith(" "):
        del printed[0]
    lines = lines_of("".join(printed).rstrip())
    frames = [frame(f.filename, f.lineno or 0, f.name, f.line) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(frame(error.filename, error.lineno or 0, None, (error.text or "").strip()))
    first = next((index for index, line in enumerate(lines) if START.search(line)), None)
    carried = None if first is None else last_exception(lines)
    if carried is None:
        return lines, frames
    if isinstance(error, errors.RemoteTransformError):  # its message begins with the user's exception and its place
        return [str(error).partition("\n")[0], *lines[1:first]], list(carried.frames)
    return [*carried.lines, *filter(None, lines[:first])], list(carried.frames)


class FailureReporter:
    """An exception hook that writes this process's failure files, then calls the previous hook.

    Args:
        own: The process's file in the control folder; None without a launcher.
        torchs: The process's file for torchrun; None without torchrun.

    Attributes:
        rank: Returns the global rank, or None if it is unknown.
        on_failure: Called when an exception ends this process, before exit handlers run.
    """

    def __init__(self, own: Path | None, torchs: Path | None) -> None:
        self.rank: Callable[[], int | None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self._own, self._torchs = own, torchs
        self._pid = os.getpid()
        self._hook = sys.excepthook
        self._reported: BaseException | None = None
        self._is_kept = False
        self._write(None)
        sys.excepthook = self
        atexit.register(self._at_exit)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an exception, and print it unless it has already been reported."""
        is_printed = error is self._reported
        self.report(error)
        if not is_printed:
            self._hook(kind, error, trace)

    def report(self, error: BaseException) -> None:
        """Write the exception that ends this process; in a forked process, leave that to the parent."""
        if os.getpid() != self._pid:
            return
        rank = self.rank()
        self._write(ProcessFailure.of(error, -1 if rank is None else rank))
        self._reported = error
        self.on_failure()

    def withdraw(self) -> None:
        """Withdraw a report, because the script has caught the exception and continues."""
        if self._reported is not None and os.getpid() == self._pid:
            self._write(None)
            self._reported = None

    def keep(self) -> None:
        """Keep the report even if something else, such as a signal, ends the process."""
        self._is_kept = True

    def _at_exit(self) -> None:
        """Report an exception that another hook did not pass on; withdraw the report if the process survived it."""
        error: BaseException | None = getattr(sys, "last_value", None)  # Python sets it only for an uncaught exception
        if error is None and not self._is_kept:
            self.withdraw()
        elif error is not None and error is not self._reported:
            self.report(error)

    def _write(self, failure: ProcessFailure | None) -> None:
        for path in filter(None, (self._own, self._torchs)):
            new = path.with_suffix(".new")
            try:
                new.write_bytes(b"" if failure is None else failure.encode())
                os.replace(new, path)
                if failure is None and path == self._torchs:
                    path.unlink()  # torchrun fails on an empty file
            except FileNotFoundError:  # the reader has exited and removed its folder
                continue
            except OSError as error:  # perhaps a full disk; raising would hide the failure itself
                for file in (new, path):
                    with contextlib.suppress(OSError):
                        file.unlink()  # the launcher then reads the reason from stderr
                sys.stderr.write(f"lightning-sm: {new} cannot be written: {error}.\n")


_reporters: dict[tuple[int, Path | None, Path | None], FailureReporter] = {}  # by process and files


def report_failures(env: Mapping[str, str] = os.environ) -> FailureReporter | None:
    """Have this process report the exception that ends it.

    Args:
        env: Environment variables.

    Returns:
        The reporter, the same in every call; None without a launcher or torchrun.
    """
    folder, pid = CONTROL_DIR.read(env), os.getpid()
    own = folder / f"{PREFIX}{pid}{SUFFIX}" if folder is not None and folder.is_dir() else None
    torchs = Path(env[_TORCHS]) if env.get(_TORCHS) else None
    if (pid, own, torchs) not in _reporters and (own or torchs):
        _reporters[pid, own, torchs] = FailureReporter(own, torchs)
    return _reporters.get((pid, own, torchs))


def read_failures(folder: Path) -> dict[int, ProcessFailure | None]:
    """Return the failures of a script's processes by process id; None for a process that reported no exception.

    Args:
        folder: The control folder.
    """
    failures: dict[int, ProcessFailure | None] = {}
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        content = path.read_bytes()
        pid = int(path.name.removeprefix(PREFIX).removesuffix(SUFFIX))
        failures[pid] = msgspec.json.decode(content, type=ProcessFailure) if content else None
    return failures
