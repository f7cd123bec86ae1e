"""The jobs that run on this machine, found by the environment of their processes, without any configuration.

In a container that is the job of the container, also for a shell that has none of its variables. Where the emulator
runs a job, it is all of its hosts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from lightning_sm.errors import JobConfigError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.variables import CONTROL_DIR, HOST_FOLDER, RECORD_DIR

_JOB_NAME, _BASE_DIR = "TRAINING_JOB_NAME", "SAGEMAKER_BASE_DIR"
# Process 1 of a container is the launcher, which has no control folder in its own environment.
_LAUNCHER_PID = 1
_PATHS = (CONTROL_DIR.name, RECORD_DIR.name)


@dataclass(frozen=True)
class RunningHost:
    """A host of a job that runs on this machine.

    Attributes:
        job: The job, as the host sees it.
        env: Environment of its processes.
        since: When its first process started, in seconds since the Unix epoch.
    """

    job: SageMakerJob
    env: Mapping[str, str]
    since: float


def running_jobs() -> dict[str, list[RunningHost]]:
    """Return the hosts of the jobs whose processes this user may see, by name of the job; the newest job comes last."""
    hosts: dict[tuple[str, str], RunningHost] = {}
    for since, env in sorted(_environments(), key=lambda found: found[0]):
        job = _job_of(env)
        if job is None:
            continue
        name = job.name or "unnamed"
        key = (name, str(job.base_dir))
        if key in hosts:
            # The script's processes have the variables that the launcher has set for them.
            made = {one.name: env[one.name] for one in (CONTROL_DIR, RECORD_DIR) if one.name in env}
            hosts[key] = replace(hosts[key], env={**hosts[key].env, **made})
        else:
            hosts[key] = RunningHost(job, env, since)
    jobs: dict[str, list[RunningHost]] = {}
    for (name, _), host in sorted(hosts.items(), key=lambda item: item[1].since):
        jobs.setdefault(name, []).append(host)
    return jobs


def _environments() -> list[tuple[float, dict[str, str]]]:
    """Return start times and environments of the processes that belong to jobs."""
    found = []
    for process in psutil.process_iter():
        # The process may be another user's, or may have just exited.
        with suppress(psutil.Error, OSError):
            env = process.environ()
            is_of_job = CONTROL_DIR.name in env or (process.pid == _LAUNCHER_PID and _JOB_NAME in env)
            if is_of_job and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                paths = {name: _from_outside(env[name], env) for name in _PATHS if name in env}
                found.append((process.create_time(), {**env, **paths}))
    return found


def _job_of(env: Mapping[str, str]) -> SageMakerJob | None:
    try:
        job = SageMakerJob.from_environment(env, base_dir=env.get(HOST_FOLDER.name))
    except (JobConfigError, OSError):  # the emulator is just moving its folder away
        return None
    if job is None or job.checkpoint_dir is None:
        return job
    return replace(job, checkpoint_dir=Path(_from_outside(str(job.checkpoint_dir), env)))


def _from_outside(path: str, env: Mapping[str, str]) -> str:
    """Return the path here of a file that an emulated host sees under another path."""
    base, folder = env.get(_BASE_DIR), env.get(HOST_FOLDER.name)
    if folder is None or base is None or not Path(path).is_relative_to(base):
        return path
    return str(Path(folder, Path(path).relative_to(base)))
