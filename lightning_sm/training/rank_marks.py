"""Marks of the rank on lines of errors and warnings: the ranks of a host share one log.

torch.distributed marks uncaught exceptions (``[rank1]: ``), but only once there is a process group. The launcher reads
the marks: it shows only once what several ranks print, and names the rank in the reason for a failure.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from types import TracebackType
from typing import TypeAlias

import torch

Rank: TypeAlias = "Callable[[], int | None]"


def mark_errors(rank: Rank) -> Callable[[], None]:
    """Mark uncaught exceptions and warnings of this process from now on.

    Args:
        rank: Returns the rank of this process; None while it is the only one of its host.

    Returns:
        A function that removes the marks again.
    """
    excepthook, warning_format = _ExceptHook(rank), _WarningFormat(rank)
    sys.excepthook, warnings.formatwarning = excepthook, warning_format

    def unmark() -> None:
        # If another hook, such as torch's, calls one of these by now, that one stays in place and marks nothing.
        excepthook.rank = warning_format.rank = lambda: None
        if sys.excepthook is excepthook:
            sys.excepthook = excepthook.hook
        if warnings.formatwarning is warning_format:
            warnings.formatwarning = warning_format.format

    return unmark


class _ExceptHook:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.hook = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = self.rank()
        if rank is None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self.hook(kind, error, trace)  # torch's own hook, which has called this one, adds the marks
            return
        with redirect_stderr(io.StringIO()) as text:
            self.hook(kind, error, trace)
        sys.stderr.write(_marked(text.getvalue(), rank))


class _WarningFormat:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.format = warnings.formatwarning

    def __call__(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        text = self.format(message, category, filename, lineno, line)
        rank = self.rank()
        return text if rank is None else _marked(text, rank)


def _marked(text: str, rank: int) -> str:
    return "".join(f"[rank{rank}]: {line}" for line in text.splitlines(keepends=True))
