"""Tuning jobs: the request of a training job, with ranges in place of some hyperparameters.

The service writes the values that it chooses into ``hyperparameters.json`` as they are in the ranges. Those of a list
are therefore JSON here, like all other hyperparameters of ``lightning-sm submit``.

Source:
    SageMaker developer guide, "Automatic model tuning"; API, CreateHyperParameterTuningJob.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.hyperparameters import check_name
from lightning_sm.submit.job_file import Job, Range, Tune
from lightning_sm.submit.problems import JobProblem
from lightning_sm.submit.service_limits import fitting
from lightning_sm.submit.training_job import joined, present

_TIME = "-%y%m%d-%H%M%S"
_DEFAULT_JOBS = 10
_SCALES = {"auto": "Auto", "linear": "Linear", "log": "Logarithmic", "reverse_log": "ReverseLogarithmic"}
# Parts of the request that a tuning job has elsewhere, or that only state what it does anyway.
_NOT_MISSED = frozenset({"TrainingJobName", "HyperParameters", "Tags", "ProfilerConfig", "DebugHookConfig"})


def tuning_problems(job: Job) -> Iterator[JobProblem]:
    """Find ranges that are none; what the service's model knows of the request is checked with it."""
    if job.tune is None:
        return
    if not job.tune.ranges:
        yield JobProblem(
            "tune.ranges",
            "tune.ranges is empty; name a hyperparameter, as in {model.learning_rate: {min: 1e-4, max: 0.1}}.",
        )
    for name, one in job.tune.ranges.items():
        key = f"tune.ranges.{name}"
        try:
            check_name(name)
        except HyperparameterError as error:
            yield JobProblem(key, f"{key}: {error}")
        limits = [limit for limit in (one.min, one.max) if limit is not None]
        if len(limits) != (2 if one.values is None else 0) or one.values == []:
            yield JobProblem(key, f"{key}: give either min and max, or values.")
        elif one.min is not None and one.max is not None and not one.min < one.max:
            yield JobProblem(key, f"{key}: min is {one.min} and max is {one.max}; min must be the smaller one.")


def tuning_job(tune: Tune, name: str, request: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Build the arguments of CreateHyperParameterTuningJob.

    Args:
        tune: What is tuned.
        name: Start of the job's name; the time is appended.
        request: Arguments of CreateTrainingJob.

    Returns:
        The arguments, and a warning for each setting that training jobs of a tuning job cannot have.
    """
    definition, dropped = fitting(request, "HyperParameterTrainingJobDefinition")
    definition["StaticHyperParameters"] = dict(request.get("HyperParameters", {}))
    # None stands for all combinations of a grid, which the service counts itself.
    max_jobs = tune.max_jobs if tune.max_jobs is not None or tune.strategy == "grid" else _DEFAULT_JOBS
    ranges: dict[str, list[dict[str, Any]]] = {}
    for option, one in tune.ranges.items():
        kind, content = _range(one)
        ranges.setdefault(kind, []).append({"Name": option, **content})
    arguments = {
        "HyperParameterTuningJobName": f"{name}{time.strftime(_TIME, time.gmtime())}",
        "HyperParameterTuningJobConfig": {
            "Strategy": tune.strategy.capitalize(),
            "HyperParameterTuningJobObjective": {"Type": tune.direction.capitalize(), "MetricName": tune.objective},
            "ResourceLimits": present(MaxNumberOfTrainingJobs=max_jobs, MaxParallelTrainingJobs=tune.parallel_jobs),
            "ParameterRanges": ranges,
        },
        "TrainingJobDefinition": definition,
        **present(Tags=request.get("Tags")),
    }
    ignored = [member for member in dropped if member not in _NOT_MISSED]
    warnings = [f"{member} is ignored: the training jobs of a tuning job cannot have it." for member in ignored]
    return joined(arguments, tune.request), warnings


def _range(one: Range) -> tuple[str, dict[str, Any]]:
    if one.values is not None:
        return "CategoricalParameterRanges", {"Values": [json.dumps(value) for value in one.values]}
    is_whole = all(isinstance(limit, int) for limit in (one.min, one.max))
    kind = "IntegerParameterRanges" if is_whole else "ContinuousParameterRanges"
    return kind, {"MinValue": repr(one.min), "MaxValue": repr(one.max), "ScalingType": _SCALES[one.scale]}
