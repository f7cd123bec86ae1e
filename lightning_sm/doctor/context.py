"""The subject of the checks: one host, by its variables, files and kernel; and how long they may take."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lightning_sm.errors import LightningSMError
from lightning_sm.job.facts import SageMakerJob, base_directory
from lightning_sm.job.topology import Topology

# The time to report calls that did not return: a tenth of the whole time, and at most this.
_MOST_MARGIN_S = 1.0
# A killed program closes its pipes at once, unless it hangs in the kernel.
_KILLED_S = 1.0


@dataclass(frozen=True)
class Context:
    """One host.

    Attributes:
        env: Its environment variables.
        base_dir: The folder that SageMaker calls ``/opt/ml``.
        ends_at: When all checks must have ended, in seconds of ``time.monotonic``.
        margin_s: Seconds before that in which a check still reports calls that did not return.
        proc: The folder in which the kernel describes processes.
        sys: The folder in which the kernel describes devices.
        dev: The folder of the device files.
    """

    env: Mapping[str, str]
    base_dir: Path
    ends_at: float
    margin_s: float = _MOST_MARGIN_S
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")

    @classmethod
    def of(cls, env: Mapping[str, str], timeout_s: float) -> Context:
        """Return this host, with ``timeout_s`` for all checks together."""
        margin_s = min(_MOST_MARGIN_S, timeout_s / 10)
        return cls(env, base_directory(env), time.monotonic() + timeout_s, margin_s)

    def seconds(self, most: float) -> float:
        """Return how long one call may take: at most the given seconds, and less if less time remains."""
        # Never 0, with which a socket would not wait at all, and raise another error.
        return max(0.01, min(most, self.ends_at - self.margin_s - time.monotonic()))

    @property
    def job(self) -> SageMakerJob | None:
        """The job of this host; None off SageMaker, and if its files are malformed."""
        return self._facts[0]

    @property
    def topology(self) -> Topology | None:
        """The layout of the job; None if there is no job, or if its groups contradict each other."""
        return self._facts[1]

    @property
    def error(self) -> LightningSMError | None:
        """Why the job or its layout is unknown."""
        return self._facts[2]

    @property
    def shares_machine(self) -> bool:
        """Whether the hosts of the job share this machine, as those of ``lightning-sm local`` do."""
        return self.job is not None and self.job.shares_machine

    # Read in the threads of the checks that need it, so that a file that hangs delays only them, until their deadline.
    @cached_property
    def _facts(self) -> tuple[SageMakerJob | None, Topology | None, LightningSMError | None]:
        job = None
        try:
            job = SageMakerJob.from_environment(self.env, self.base_dir)
            return job, Topology.from_job(job) if job is not None else None, None
        except LightningSMError as error:
            return job, None, error

    def gpu_files(self) -> int:
        """Count the device files of NVIDIA GPUs."""
        return sum(1 for path in self.dev.glob("nvidia[0-9]*") if path.name[6:].isdecimal())


def text_of(path: Path) -> str | None:
    """Read a small file; return None if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def run(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output; after the timeout, kill it and its children.

    Raises:
        OSError: The program cannot be started.
        subprocess.TimeoutExpired: The program did not exit in time.
    """
    process = subprocess.Popen(
        list(command),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its children can be killed with it
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=_KILLED_S)
        raise
    return subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr)
