"""The processes of emulated hosts: how they are found, and how they get signals though they may end at any moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil

from lightning_sm._linux import ADOPTS_ORPHANS


def processes_of_job(job_dir: Path) -> list[psutil.Process]:
    """Return the descendants of this process, orphans included.

    Args:
        job_dir: Where orphans are not adopted, they are known by a host's folder in this one, in their environment.
    """
    found = psutil.Process().children(recursive=True)
    if not ADOPTS_ORPHANS:
        found += [process for process in processes_below(job_dir) if process not in found]
    return found


def processes_below(job_dir: Path) -> list[psutil.Process]:
    """Return the live processes whose environment names a host's folder in this one, and all their descendants."""
    found: dict[psutil.Process, None] = {}
    for process in psutil.process_iter():
        if Path(variable_of(process, "SAGEMAKER_BASE_DIR") or "/").parent == job_dir and is_alive(process):
            found[process] = None
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= dict.fromkeys(process.children(recursive=True))
    return list(found)


def signal_process(process: psutil.Process, send: Callable[[psutil.Process], None]) -> None:
    """Call ``psutil.Process.kill``, ``suspend`` or ``resume``, unless the process has already ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        send(process)


def variable_of(process: psutil.Process, name: str) -> str | None:
    """Return an environment variable of a process; None if it has ended, or belongs to another user."""
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that only waits to be reaped has."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
