"""An exception of the user's code on a data host, as the trainers raise it: what it says, where, and its traceback."""

from __future__ import annotations

import traceback

from lightning_sm import errors
from lightning_sm._structs import Struct
from lightning_sm.errors import DataServiceError, DataSettingsError

# The names of failures of a worker that died: with a task, or before it was ready for one.
LOST_WORKERS = ("WorkerLost", "WorkerNotStarted")
# The names of exceptions in the user's code.
USER_ERRORS = ("RemoteTransformError", "RemoteImportError")


class Failure(Struct, frozen=True, tag=True):
    """The reason why there are no batches, or no loaders.

    Attributes:
        error: Name of the error: a class of ``lightning_sm.errors``, or one of
            ``LOST_WORKERS``, "StreamMoved", "NotOpen".
        text: What happened: a sentence, or the type and the message of an exception in the user's code.
        where: The hook, index or step at which the user's code failed, and the worker; empty: unknown.
        traceback: The traceback of such an exception, as Python prints it; else empty.
    """

    error: str
    text: str
    where: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> Failure:
        """Describe an exception that the user's code raised, or that is about the user's settings."""
        if isinstance(error, DataSettingsError):
            return cls("DataSettingsError", str(error), where)
        only = traceback.format_exception_only(error)
        # A SyntaxError begins with its file and line, which Python indents, and which the traceback has, too.
        what = next(line for line in only if not line.startswith(" "))
        name = "RemoteImportError" if isinstance(error, (ImportError, SyntaxError)) else "RemoteTransformError"
        return cls(name, what.rstrip(), where, "".join(traceback.format_exception(error)))

    def at(self, place: str) -> str:
        """Return what happened, where, and the traceback.

        The launcher shows the beginning of an error as the reason of the job's failure.

        Args:
            place: Data host, worker, hook or sample.
        """
        return f"{self.text.rstrip()}\non {place}\n{self.traceback}".rstrip()


def error_class(name: str) -> type[DataServiceError]:
    """Return the error of the data service with a name; the general one if none has it."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, DataServiceError) else DataServiceError


def first_line(text: str) -> str:
    """Return the first line of an error, for a line in the log."""
    return (text.splitlines() or [""])[0]
