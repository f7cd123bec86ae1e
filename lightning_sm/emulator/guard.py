"""The guard, a process that kills all hosts of an emulated job when the emulator has died, so that none outlives it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from lightning_sm.emulator.docker import remove_job
from lightning_sm.emulator.processes import processes_below, signal_process

# Between two checks for processes that SIGKILL has not ended yet.
_POLL_S = 1.0


@contextmanager
def guarded(job_dir: Path, *, containers_of: str | None = None) -> Iterator[None]:
    """Run the guard of a job.

    Args:
        job_dir: Folder of the job, with one folder per host.
        containers_of: Name of the job, if its hosts are containers.
    """
    job = [] if containers_of is None else [containers_of]
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_sm.emulator.guard", str(job_dir), *job],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not reach it
    ) as guard:
        try:
            yield
        finally:
            guard.kill()


def main() -> None:
    """Wait until the emulator is gone, then kill all processes of its hosts, and remove its containers."""
    # The emulator holds the other end of this pipe, as does a host that it has just forked, until the host runs its own
    # program. So at end of file, every host has the environment variable by which it is found.
    sys.stdin.buffer.read()
    while left := processes_below(Path(sys.argv[1])):
        for process in left:
            signal_process(process, psutil.Process.kill)
        psutil.wait_procs(left, timeout=_POLL_S)
    # After Docker's clients, which could still create a container.
    for job in sys.argv[2:]:
        remove_job(job)


if __name__ == "__main__":
    main()
