"""Tuning jobs: the request of a training job, with ranges in place of some hyperparameters.

The service chooses values from the ranges, and copies them to ``hyperparameters.json``. The values in a list are
therefore JSON here, like all other hyperparameters of ``lightning-sm submit``.

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
from lightning_sm.submit.request_limits import fitting
from lightning_sm.submit.training_job import joined, present

_TIME = "-%y%m%d-%H%M%S"
_DEFAULT_JOBS = 10
_SCALES = {"auto": "Auto", "linear": "Linear", "log": "Logarithmic", "reverse_log": "ReverseLogarithmic"}
# Members that can be dropped silently, because a tuning job sets them elsewhere or does the same without them.
_NOT_MISSED = frozenset({"TrainingJobName", "HyperParameters", "Tags", "ProfilerConfig", "DebugHookConfig"})


def tuning_problems(job: Job) -> Iterator[JobProblem]:
    """Yield a problem for each invalid setting; ``request_limits`` checks the rest of the request."""
    if job.tune is None:
        return
    if not job.tune.ranges:
        yield JobProblem(
            "tune.ranges",
            "tune.ranges is empty; name a hyperparameter, as in {model.learning_rate: {min: 1e-4, max: 0.1}}.",
        )
    for name, span in job.tune.ranges.items():
        key = f"tune.ranges.{name}"
        try:
            check_name(name)
        except HyperparameterError as error:
            yield JobProblem(key, f"{key}: {error}")
        limits = [limit for limit in (span.min, span.max) if limit is not None]
        if len(limits) != (2 if span.values is None else 0) or span.values == []:
            yield JobProblem(key, f"{key}: give either min and max, or values.")
        elif span.min is not None and span.max is not None and not span.min < span.max:
            yield JobProblem(key, f"{key}: min is {span.min} and max is {span.max}; min must be smaller than max.")
        elif span.min is not None and span.max is not None:
            # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ContinuousParameterRange.html
            if span.scale == "log" and span.min <= 0:
                yield JobProblem(key, f"{key}: min is {span.min}; with scale: log, expected more than 0.")
            if span.scale == "reverse_log" and not 0 <= span.min < span.max < 1:
                yield JobProblem(
                    key,
                    f"{key}: min is {span.min} and max is {span.max}; with scale: reverse_log, expected at least 0 and "
                    "less than 1.",
                )
    most = job.tune.max_jobs or _DEFAULT_JOBS
    if job.tune.parallel_jobs > most and not (job.tune.max_jobs is None and job.tune.strategy == "grid"):
        yield JobProblem(
            "tune.parallel_jobs",
            f"tune.parallel_jobs is {job.tune.parallel_jobs}, but the tuning job has only {most} training jobs "
            "(tune.max_jobs).",
        )


def tuning_job(tune: Tune, name: str, request: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Build the arguments of CreateHyperParameterTuningJob.

    Args:
        tune: The settings of the tuning job.
        name: Start of the job's name; the time is appended.
        request: Arguments of CreateTrainingJob.

    Returns:
        The arguments, and a warning for each setting that training jobs of a tuning job cannot have.
    """
    definition, dropped = fitting(request, "HyperParameterTrainingJobDefinition")
    definition["StaticHyperParameters"] = dict(request.get("HyperParameters", {}))
    # With None, the service runs all combinations of a grid.
    max_jobs = tune.max_jobs if tune.max_jobs is not None or tune.strategy == "grid" else _DEFAULT_JOBS
    ranges: dict[str, list[dict[str, Any]]] = {}
    for option, span in tune.ranges.items():
        kind, content = _range(span)
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


def _range(span: Range) -> tuple[str, dict[str, Any]]:
    if span.values is not None:
        return "CategoricalParameterRanges", {"Values": [json.dumps(value) for value in span.values]}
    is_whole = all(isinstance(limit, int) for limit in (span.min, span.max))
    kind = "IntegerParameterRanges" if is_whole else "ContinuousParameterRanges"
    return kind, {"MinValue": repr(span.min), "MaxValue": repr(span.max), "ScalingType": _SCALES[span.scale]}
