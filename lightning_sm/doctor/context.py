"""The input and output of checks: a host's variables, files and kernel, and the rows of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lightning_sm.errors import LightningSMError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Topology


@dataclass(frozen=True)
class Context:
    """The host to check.

    Attributes:
        env: The host's environment variables.
        job: The host's job; None outside SageMaker, or if the job's files are malformed.
        topology: The job's layout; None if there is no job, or if its groups contradict each other.
        error: Why the job or its layout is unknown.
        sys: The folder in which the kernel describes devices.
        dev: The folder of the device files.
    """

    env: Mapping[str, str]
    job: SageMakerJob | None = None
    topology: Topology | None = None
    error: LightningSMError | None = None
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Context:
        """Return the context of this host."""
        job = None
        try:
            job = SageMakerJob.from_environment(env)
            return cls(env, job, None if job is None else Topology.from_job(job))
        except LightningSMError as error:
            return cls(env, job, error=error)

    @property
    def has_own_machine(self) -> bool:
        """Whether this is the only host of a job on its machine, unlike the hosts of the emulator."""
        return self.job is not None and not self.job.shares_machine


class Status(str, Enum):
    """The severity of a result."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Result:
    """One row of the report.

    Attributes:
        name: What was checked.
        status: The severity.
        found: What the check found.
        advice: What to do; empty if there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Result:
    """Return a result that needs no action."""
    return Result(name, Status.OK, found)


def warning(name: str, found: str, advice: str) -> Result:
    """Return a result about something that would slow jobs down, or make some of them fail."""
    return Result(name, Status.WARNING, found, advice)


def problem(name: str, found: str, advice: str) -> Result:
    """Return a result about something that would make a training job fail."""
    return Result(name, Status.PROBLEM, found, advice)
