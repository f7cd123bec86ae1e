"""Secrets in hyperparameters and environment, where whoever may describe the job reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sm.errors import JobConfigError
from lightning_sm.job.redaction import is_secret, shown
from lightning_sm.job.variables import JOB_SECRET
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.problems import JobProblem
from lightning_sm.submit.request import script_options

_ADVICE = (
    "SageMaker shows it to whoever may describe the job. Keep secrets in AWS Secrets Manager, and read them in the "
    "script, with the job's role (docs/submit.md, Secrets)."
)


def secret_problems(job: Job) -> Iterator[JobProblem]:
    """Find values that are secret by their name or form, unless ``not_secret`` names them."""
    try:
        options = script_options(job)
    except JobConfigError:  # a problem of its own
        options = job.hyperparameters
    for name, value in options.items():
        for path in _secrets(name, value):
            is_stated = any(f"{path}.".startswith(f"{stated}.") for stated in job.hyperparameters)
            key = f"hyperparameters.{path}" if is_stated else "config"
            place = key if is_stated else f"config: {path}"
            yield from _unless_allowed(job, path, key, place)
    for name, value in job.environment.items():
        if name != JOB_SECRET.name and shown(name, value) != value:
            yield from _unless_allowed(job, name, f"environment.{name}", f"environment.{name}")


def _unless_allowed(job: Job, name: str, key: str, place: str) -> Iterator[JobProblem]:
    if name not in job.not_secret:
        allowed = f"If it is no secret: not_secret: [{', '.join([*job.not_secret, name])}]."
        yield JobProblem(key, f"{place} looks like a secret. {_ADVICE} {allowed}", also=("not_secret",))


def _secrets(name: str, value: Any) -> Iterator[str]:
    """Yield the names of the values that are hidden, as deep as they are nested."""
    if [shown(name, value)] == [value]:  # in lists, because nan, which equals nothing, is itself in them
        return
    inner = value.items() if isinstance(value, Mapping) and not is_secret(name) else ()
    found = [path for key, item in inner for path in _secrets(f"{name}.{key}", item)]
    yield from found or [name]
