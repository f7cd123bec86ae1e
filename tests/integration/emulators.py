"""Run ``lightning-sm local`` in the foreground or background, and find the processes of its jobs."""

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
# First lines of scripts that use the name or the folder of their host.
SCRIPT_START = "import os\nbase = os.environ['SAGEMAKER_BASE_DIR']\nhost = os.environ['SM_CURRENT_HOST']\n"


def command(jobs: Path, args: Sequence[str]) -> list[str]:
    """Build the command of an emulator with its jobs in a folder."""
    return [sys.executable, "-m", "lightning_sm", "local", "--base-dir", str(jobs), *args]


def local(
    jobs: Path, work: Path, *args: str, timeout_s: float = TIMEOUT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run an emulator and wait for it to exit."""
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
    """Start an emulator, and kill it and the processes of its jobs at the end of the context."""
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
    """Return the folder of the only job."""
    (found,) = jobs.iterdir()
    return found


def processes_of(jobs: Path) -> list[psutil.Process]:
    """Find all processes of the jobs in a folder.

    Args:
        jobs: The folder that was given as ``--base-dir``.
    """
    return [process for process in psutil.process_iter() if _folder(process).startswith(str(jobs))]


def until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Wait until a condition holds, and fail after a timeout.

    Args:
        condition: The condition.
        what: A description of the condition for the failure message.
        timeout_s: Timeout in seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def _folder(process: psutil.Process) -> str:
    try:
        return str(process.environ().get(HOST_FOLDER.name, ""))
    except psutil.Error:  # the process has exited
        return ""
