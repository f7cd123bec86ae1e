"""The guard, a process that kills all hosts of an emulated job when the emulator dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from lightning_sm.emulator.docker import remove_job
from lightning_sm.emulator.processes import processes_below, signal_process

# Interval in seconds between checks for processes that are still alive after SIGKILL.
_POLL_S = 1.0
# While a process executes a program, it has no environment for a moment, so stop only after this many checks, this many
# seconds apart, have found no process.
_NUM_CHECKS, _PAUSE_S = 5, 0.05


@contextmanager
def guarded(job_dir: Path, *, containers_of: str | None = None) -> Iterator[None]:
    """Run a job's guard until the context exits.

    Args:
        job_dir: Folder of the job, with one folder per host.
        containers_of: Name of the job, if its hosts are containers.
    """
    job = [] if containers_of is None else [containers_of]
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_sm.emulator.guard", str(job_dir), *job],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # protect it from Ctrl-C
    ) as guard:
        try:
            yield
        finally:
            guard.kill()


def main() -> None:
    """Wait until the emulator has exited, then kill all processes of its hosts, and remove its containers."""
    # The emulator holds the other end of this pipe, and so does each forked host until it executes its program. At
    # end of file, every host therefore has the environment variable that identifies it.
    sys.stdin.buffer.read()
    num_empty = 0
    while num_empty < _NUM_CHECKS:
        left = processes_below(Path(sys.argv[1]))
        for process in left:
            signal_process(process, psutil.Process.kill)
        psutil.wait_procs(left, timeout=_POLL_S)
        num_empty = 0 if left else num_empty + 1
        time.sleep(_PAUSE_S)
    # Kill Docker's clients first, since they could still create a container.
    for job in sys.argv[2:]:
        remove_job(job)


if __name__ == "__main__":
    main()
