"""An exception of the user's code on a data host, as the trainers raise it: what it says, where, and its traceback."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TypeVar

from lightning_sm.errors import DataSettingsError

_TRACEBACK = "Traceback (most recent call last):"

_Failure = TypeVar("_Failure", bound="Failure")


@dataclass(frozen=True)
class Failure:
    """The reason why there are no batches, or no loaders.

    Attributes:
        error: Name of the error: a class of ``lightning_sm.errors``, or "WorkerLost", "ShardMoved", "NotOpen".
        text: What happened: a sentence, or what ``describe_exception`` returned.
        where: The hook, index or step at which the user's code failed, and the worker; empty: unknown.
    """

    error: str
    text: str
    where: str = ""

    @classmethod
    def of(cls: type[_Failure], error: BaseException, where: str = "") -> _Failure:
        """Describe an exception that the user's code raised, or that is about the user's settings."""
        if isinstance(error, DataSettingsError):
            return cls("DataSettingsError", str(error), where)
        return cls("RemoteTransformError", describe_exception(error), where)


def describe_exception(error: BaseException) -> str:
    """Return the exception's type and message, and after that its traceback, which ends with both again.

    Args:
        error: The exception that the user's code raised.
    """
    only = traceback.format_exception_only(error)
    # A SyntaxError begins with its file and line, which the traceback has, too.
    what = next(line for line in only if not line.startswith(" "))
    return what.rstrip() + "\n" + "".join(traceback.format_exception(error))


def with_place(text: str, place: str) -> str:
    """Insert where an exception was raised between its message and its traceback.

    The launcher shows the beginning of an error as the reason of the job's failure.

    Args:
        text: What ``describe_exception`` returned, or the message of an error of lightning_sm.
        place: Data host, worker, hook or sample.
    """
    message, header, frames = text.partition(f"\n{_TRACEBACK}\n")
    return f"{message.rstrip()}\non {place}{header}{frames}".rstrip()


def first_line(text: str) -> str:
    """Return the first line of an error, for a line in the log."""
    return text.partition("\n")[0]
