"""``lightning-sm local`` in a process, at once or in the background, and the processes of its jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from lightning_sm.job.variables import HOST_FOLDER

TIMEOUT_S = 180
# First lines of scripts that look at their host.
SCRIPT_START = "import os\nbase = os.environ['SAGEMAKER_BASE_DIR']\nhost = os.environ['SM_CURRENT_HOST']\n"


def command(jobs: Path, args: Sequence[str]) -> list[str]:
    """The command of an emulator whose jobs lie in a folder."""
    return [sys.executable, "-m", "lightning_sm", "local", "--base-dir", str(jobs), *args]


def local(
    jobs: Path, work: Path, *args: str, timeout_s: float = TIMEOUT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run an emulator to its end."""
    return subprocess.run(
        command(jobs, args),
        cwd=work,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout_s,
    )


@contextmanager
def in_background(jobs: Path, work: Path, *args: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start an emulator, and end what is left of it and of its jobs."""
    process = subprocess.Popen(
        command(jobs, args),
        cwd=work,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        for left in processes_of(jobs):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.communicate(timeout=TIMEOUT_S)


def job_dir(jobs: Path) -> Path:
    """The folder of the only job."""
    (found,) = jobs.iterdir()
    return found


def processes_of(jobs: Path) -> list[psutil.Process]:
    """All processes that belong to jobs in a folder.

    Args:
        jobs: What was given as ``--base-dir``.
    """
    return [process for process in psutil.process_iter() if _folder(process).startswith(str(jobs))]


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
        time.sleep(0.02)


def _folder(process: psutil.Process) -> str:
    try:
        return str(process.environ().get(HOST_FOLDER.name, ""))
    except psutil.Error:  # ended meanwhile
        return ""
