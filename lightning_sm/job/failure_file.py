"""The file in which a process that dies of an exception says why: ``failure-<pid>.json`` in the control folder.

The process writes it from its exception hook, where the exception is an object: its type decides whether it followed
from the exit of another process, and whether it would recur. The launcher reads it when the script has failed. An empty
file is a promise: this process would say why it dies. If it dies and the file is still empty, a signal killed it, or it
called ``sys.exit`` or ``os._exit``.

The file has the format of ``torch.distributed.elastic``. A rank that torchrun has started writes it for torchrun, too,
where ``TORCHELASTIC_ERROR_FILE`` says: torchrun then shows the exception with which the job failed.
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
# torchrun sets it for each rank. It is empty if torchrun keeps no files.
_TORCHS = "TORCHELASTIC_ERROR_FILE"
# The launcher shows 1024 characters in all.
_MAX_LINES = 40
_MAX_LINE_CHARS = 2000
# Our own errors that name a contradiction in the job. The others name a host, a port or a file, and so may pass.
_CONTRADICTIONS = (ValueError, ImportError, errors.NeedsLinuxError)
# Raised where another process has exited, or has told this one to: by name, because this module does not import torch.
_OF_OTHER_PROCESSES = ("SIGTERMException", "ProcessRaisedException")
_LOST_CONNECTIONS = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, KeyboardInterrupt)
# Gloo, NCCL and TCPStore have no exception type for a lost peer. NCCL may name it on any line.
_LOST_PEER = re.compile(
    r"Broken ?[Pp]ipe|Connection ?[Rr]eset|Connection ?[Rr]efused|Connection closed by (?:remote )?peer"
    r"|remote process exited or there was a network error|ncclRemoteError|NCCL communicator was aborted"
    r"|DistStoreError: (?:Socket Timeout|wait timeout)"
)


class ProcessFailure(Struct, frozen=True, forbid_unknown_fields=False):
    """The exception that ended a process, in its own words.

    Code that comes with the job may bring a newer version of this package than the launcher, which has the image's.

    Attributes:
        rank: Global rank of the process; -1 if it does not know it, and on data hosts.
        at: When it was raised, in seconds of ``time.monotonic``, which all processes of a host share.
        lines: Type and message as Python prints them.
        frames: The frames, the raising one last.
        is_consequence: Whether it was raised because another process had exited.
        is_permanent: Whether it would recur in a restarted script.
        is_passed_on: Whether it was raised on a data host, which is named in ``lines``.
        dead_children: Children that had exited before: process id, and exit code (-n for signal n). Once this process
            has waited for them, as it does when it exits, nobody else can know.
        message: The exception as torchrun reads it.
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
        """Describe an exception; of a chain, the last one that did not follow from another process's exit."""
        chain = _chain(error)
        cause = next((one for one in chain if not followed_from_another(one)), error)
        lines, frames = _described(cause)
        is_consequence = followed_from_another(cause)
        # torchrun takes the failure of the earliest second for the cause, then that of the lowest rank.
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
    """Return whether a restart cannot overcome an exception: code that cannot be imported, or settings in conflict."""
    if isinstance(error, (ImportError, SyntaxError)):
        return True
    return isinstance(error, errors.LightningSMError) and isinstance(error, _CONTRADICTIONS)


def followed_from_another(error: BaseException) -> bool:
    """Return whether an exception was raised because another process had exited, or had told this one to exit."""
    if isinstance(error, _LOST_CONNECTIONS) or type(error).__name__ in _OF_OTHER_PROCESSES:
        return True
    # What the user's code and lightning_sm raise may quote such a message.
    is_torchs = type(error) is RuntimeError or type(error).__module__.startswith("torch.")
    return is_torchs and is_lost_peer(f"{type(error).__name__}: {error}")


def is_lost_peer(text: str) -> bool:
    """Return whether a message of torch says that another rank has closed its connection."""
    return _LOST_PEER.search(text) is not None


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and those during whose handling it was raised, as Python prints them, the last first."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context
    return chain


def _described(error: BaseException) -> tuple[list[str], list[str]]:
    """Return the lines and the frames of an exception; of one that another process passed on, those from there."""
    printed = traceback.format_exception_only(type(error), error)
    # A SyntaxError begins with its file and line, which are a frame.
    while len(printed) > 1 and printed[0].startswith(" "):
        del printed[0]
    lines = lines_of("".join(printed).rstrip())
    frames = [
        frame(one.filename, one.lineno or 0, one.name, one.line) for one in traceback.extract_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(frame(error.filename, error.lineno or 0, None, (error.text or "").strip()))
    first = next((index for index, line in enumerate(lines) if START.search(line)), None)
    carried = None if first is None else last_exception(lines)
    if carried is None:
        return lines, frames
    if isinstance(error, errors.RemoteTransformError):  # its text begins with the user's exception, and the place
        return [str(error).partition("\n")[0], *lines[1:first]], list(carried.frames)
    return [*carried.lines, *filter(None, lines[:first])], list(carried.frames)


class FailureReporter:
    """The exception hook of this process: writes its failure files, then calls the hook that was there before.

    Args:
        own: Its file in the control folder; None without a launcher.
        torchs: Its file for torchrun; None without torchrun.

    Attributes:
        rank: Returns the global rank; None if it is not known.
        on_failure: Called when an exception ends this process, before handlers at exit run.
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
        """Report an exception, and print it once."""
        is_printed = error is self._reported
        self.report(error)
        if not is_printed:
            self._hook(kind, error, trace)

    def report(self, error: BaseException) -> None:
        """Write why this process dies, unless it is a fork, whose parent decides what its failure means."""
        if os.getpid() != self._pid:
            return
        rank = self.rank()
        self._write(ProcessFailure.of(error, -1 if rank is None else rank))
        self._reported = error
        self.on_failure()

    def withdraw(self) -> None:
        """Take back a report: the script has caught the exception, and continues."""
        if self._reported is not None and os.getpid() == self._pid:
            self._write(None)
            self._reported = None

    def close(self) -> None:
        """Report nothing from now on. Where another hook has wrapped this one, it stays in place."""
        _reporters.pop((self._pid, self._own, self._torchs), None)
        atexit.unregister(self._at_exit)
        self._pid = 0
        if sys.excepthook is self:
            sys.excepthook = self._hook

    def keep(self) -> None:
        """Let a report stand although another exit replaces the exception: a signal ends the process meanwhile."""
        self._is_kept = True

    def _at_exit(self) -> None:
        """Report what another hook has not passed on, and withdraw what did not end the process."""
        error: BaseException | None = getattr(sys, "last_value", None)  # set by Python for an uncaught exception only
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
            except FileNotFoundError:  # who reads it has gone, and its folder with it
                continue
            except OSError as error:  # a full disk, perhaps the reason of this failure, which it must not replace
                for file in (new, path):
                    with contextlib.suppress(OSError):
                        file.unlink()  # the launcher then takes the reason from stderr
                sys.stderr.write(f"lightning-sm: {new} cannot be written: {error}.\n")


_reporters: dict[tuple[int, Path | None, Path | None], FailureReporter] = {}  # by process and files


def report_failures(env: Mapping[str, str] = os.environ) -> FailureReporter | None:
    """Let this process tell its launcher of the exception that ends it.

    Args:
        env: Environment variables.

    Returns:
        The reporter, the same in every call; None without a launcher and torchrun.
    """
    folder, pid = CONTROL_DIR.read(env), os.getpid()
    own = folder / f"{PREFIX}{pid}{SUFFIX}" if folder is not None and folder.is_dir() else None
    torchs = Path(env[_TORCHS]) if env.get(_TORCHS) else None
    if (pid, own, torchs) not in _reporters and (own or torchs):
        _reporters[pid, own, torchs] = FailureReporter(own, torchs)
    return _reporters.get((pid, own, torchs))


def read_failures(folder: Path) -> dict[int, ProcessFailure | None]:
    """Return what the processes of a script said of their end, by process id; None for a promise that was not needed.

    Args:
        folder: The control folder.
    """
    failures: dict[int, ProcessFailure | None] = {}
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        content = path.read_bytes()
        pid = int(path.name.removeprefix(PREFIX).removesuffix(SUFFIX))
        failures[pid] = msgspec.json.decode(content, type=ProcessFailure) if content else None
    return failures
