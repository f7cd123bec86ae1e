"""What tests of ``lightning-sm local`` look for while it runs, and what they remove when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_PAUSE = threading.Event()


def processes_of(jobs: Path) -> list[psutil.Process]:
    """All processes that belong to jobs in a folder.

    Args:
        jobs: What was given as ``--base-dir``.
    """
    return [process for process in psutil.process_iter() if _base_dir(process).startswith(str(jobs))]


def until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Wait until something holds, and fail if it does not in time.

    Args:
        condition: What is to hold.
        what: The same in words.
        timeout_s: Seconds to wait at most.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        _PAUSE.wait(0.02)


def _base_dir(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("SAGEMAKER_BASE_DIR", ""))
    except psutil.Error:  # ended meanwhile
        return ""
