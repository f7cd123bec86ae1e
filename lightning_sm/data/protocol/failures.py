"""Failures on a data host, such as exceptions in the user's code, and the text with which trainers raise them."""

from __future__ import annotations

import traceback

from lightning_sm import errors
from lightning_sm._structs import Struct
from lightning_sm.errors import DataServiceError, DataSettingsError

# Failures of workers that died while they had a task, or before they were ready for one.
LOST_WORKERS = ("WorkerLost", "WorkerNotStarted")
# Exceptions in the user's code.
USER_ERRORS = ("RemoteTransformError", "RemoteImportError")


class Failure(Struct, frozen=True, tag=True):
    """The reason why a data host returned no batches or loaders.

    Attributes:
        error: Name of the error: a class in ``lightning_sm.errors``, one of ``LOST_WORKERS``, "StreamMoved", "NotOpen".
        text: What happened: a sentence, or the type and message of an exception in the user's code.
        where: The hook, index or step at which the user's code failed, and the worker; empty if unknown.
        traceback: The traceback of the user's exception, as Python prints it; empty for other failures.
    """

    error: str
    text: str
    where: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> Failure:
        """Describe an exception from the user's code, or an error in the user's settings."""
        if isinstance(error, DataSettingsError):
            return cls("DataSettingsError", str(error), where)
        only = traceback.format_exception_only(error)
        # For a SyntaxError, the file and line come first, indented. Skip these lines: the traceback has them, too.
        what = next(line for line in only if not line.startswith(" "))
        name = "RemoteImportError" if isinstance(error, (ImportError, SyntaxError)) else "RemoteTransformError"
        return cls(name, what.rstrip(), where, "".join(traceback.format_exception(error)))

    def at(self, place: str) -> str:
        """Return what happened, where, and the traceback.

        The message comes first, because the launcher shows the beginning of an error as the job's failure reason.

        Args:
            place: Data host, worker, hook or sample.
        """
        return f"{self.text.rstrip()}\non {place}\n{self.traceback}".rstrip()


def error_class(name: str) -> type[DataServiceError]:
    """Return the data service's error class with this name, or ``DataServiceError`` if there is none."""
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, DataServiceError) else DataServiceError


def first_line(text: str) -> str:
    """Return the first line of an error, for the log."""
    return (text.splitlines() or [""])[0]
