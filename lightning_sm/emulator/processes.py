"""Functions that find and signal the processes of emulated hosts, which may exit at any moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil

from lightning_sm._linux import ADOPTS_ORPHANS
from lightning_sm.job.variables import HOST_FOLDER


def processes_of_job(job_dir: Path) -> list[psutil.Process]:
    """Return the descendants of this process, including orphans.

    Args:
        job_dir: Folder of the job. On systems that cannot adopt orphans, orphans are found by their environment,
            which names a host's folder inside the job's folder.
    """
    processes = psutil.Process().children(recursive=True)
    if not ADOPTS_ORPHANS:
        processes += [process for process in processes_below(job_dir) if process not in processes]
    return processes


def processes_below(job_dir: Path) -> list[psutil.Process]:
    """Return the live processes whose environment names a host's folder in ``job_dir``, and all their descendants."""
    found: dict[psutil.Process, None] = {}
    for process in psutil.process_iter():
        if Path(variable_of(process, HOST_FOLDER.name) or "/").parent == job_dir and is_alive(process):
            found[process] = None
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= dict.fromkeys(process.children(recursive=True))
    return list(found)


def signal_process(process: psutil.Process, send: Callable[[psutil.Process], None]) -> None:
    """Call ``psutil.Process.kill``, ``suspend`` or ``resume``, unless the process has already exited."""
    with contextlib.suppress(psutil.NoSuchProcess):
        send(process)


def variable_of(process: psutil.Process, name: str) -> str | None:
    """Return a process's environment variable; None if it is unset, or the process has exited or is another user's."""
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is still running; a zombie is not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
