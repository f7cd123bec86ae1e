"""Concurrent calls that may hang, with one deadline, so that a dead resolver or file system delays no other check."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class TaskResult(Generic[_Value]):
    """The result of one call.

    Attributes:
        value: The value that it returned, if any.
        error: The exception that it raised, if any.
        seconds: How long it took; None if it did not return in time.
    """

    value: _Value | None = None
    error: Exception | None = None
    seconds: float | None = None


def in_parallel(
    function: Callable[[_Item], _Value], items: Sequence[_Item], timeout_s: float
) -> list[TaskResult[_Value]]:
    """Call a function for each item, each in a thread of its own.

    Threads that do not end within ``timeout_s`` are abandoned, because neither ``getaddrinfo`` nor ``statvfs`` can be
    interrupted. As daemons, they do not keep the process alive.
    """
    outcomes: list[TaskResult[_Value]] = [TaskResult() for _ in items]

    def call(index: int, item: _Item) -> None:
        started = time.monotonic()
        try:
            value = function(item)
        except Exception as error:  # noqa: BLE001 - the caller reports it
            outcomes[index] = TaskResult(error=error, seconds=time.monotonic() - started)
        else:
            outcomes[index] = TaskResult(value, seconds=time.monotonic() - started)

    deadline = time.monotonic() + timeout_s
    threads = []
    for index, item in enumerate(items):
        thread = threading.Thread(target=call, args=(index, item), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads is reached
            outcomes[index] = TaskResult(error=error, seconds=0.0)
        else:
            threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(outcomes)
