"""Tuning jobs: the request of a training job, with ranges in place of some hyperparameters.

The service writes the values that it chooses into ``hyperparameters.json`` as they are in the ranges. Those of a list
are therefore JSON here, like all other hyperparameters of ``lightning-sm submit``.

Source:
    SageMaker developer guide, "Automatic model tuning"; API, CreateHyperParameterTuningJob.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.hyperparameters import encode
from lightning_sm.submit.job_file import Job, Range, Tune
from lightning_sm.submit.problems import JobProblem
from lightning_sm.submit.service_limits import fitting
from lightning_sm.submit.training_job import present

_TIME = "-%y%m%d-%H%M%S"
_MAX_NAME_CHARS = 32
_MAX_PREFIX_CHARS = _MAX_NAME_CHARS - len("-261122-235959")
# Including the name of the objective, which the service adds.
_MAX_HYPERPARAMETERS = 100
# API, ParameterRanges: for all kinds of ranges together.
_MAX_RANGES = 30
_DEFAULT_JOBS = 10
_SCALES = {"auto": "Auto", "linear": "Linear", "log": "Logarithmic", "reverse_log": "ReverseLogarithmic"}
_WARM_STARTS = {"identical": "IdenticalDataAndAlgorithm", "transfer": "TransferLearning"}
# Parts of the request that a tuning job has elsewhere, or that only state what it does anyway.
_NOT_MISSED = frozenset({"TrainingJobName", "HyperParameters", "Tags", "ProfilerConfig", "DebugHookConfig"})
_KEYS = {
    "TensorBoardOutputConfig": "tensorboard",
    "RemoteDebugConfig": "remote_debug",
    "InfraCheckConfig": "infra_check",
    "MlflowConfig": "mlflow_experiment, mlflow_run",
}


def tuning_problems(job: Job) -> Iterator[JobProblem]:
    """Find what contradicts itself in ``tune``, or what the service would refuse."""
    tune = job.tune
    if tune is None:
        return
    if len(job.name) > _MAX_PREFIX_CHARS:
        yield JobProblem(
            "name",
            f"name is {job.name!r}, which has {len(job.name)} characters; the name of a tuning job has at most "
            f"{_MAX_PREFIX_CHARS}, since the time is appended and the service allows {_MAX_NAME_CHARS}.",
        )
    if not tune.ranges:
        yield JobProblem(
            "tune.ranges",
            "tune.ranges is empty; name a hyperparameter, as in {model.learning_rate: {min: 1e-4, max: 0.1}}.",
        )
    if len(tune.ranges) > _MAX_RANGES:
        yield JobProblem(
            "tune.ranges", f"tune.ranges has {len(tune.ranges)} hyperparameters; the service allows {_MAX_RANGES}."
        )
    for name, one in tune.ranges.items():
        for problem in _range_problems(name, one):
            yield JobProblem(f"tune.ranges.{name}", f"tune.ranges.{name}: {problem}")
    yield from _strategy_problems(tune)


def advice(job: Job) -> Iterator[str]:
    """Yield warnings about what is allowed in a tuning job but rarely intended, or not known to work."""
    if job.tune is not None and len(job.groups) > 1:
        yield (
            f"tune with {len(job.groups)} groups: the API accepts instance groups in tuning jobs; whether the service "
            "does is not documented."
        )
    if job.tune is not None and any(group.alternatives for group in job.groups.values()):
        yield (
            "tune with alternatives of an instance type: the API accepts them in tuning jobs; whether the service does "
            "is not documented."
        )


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
    config: dict[str, Any] = {
        "Strategy": tune.strategy.capitalize(),
        "HyperParameterTuningJobObjective": {"Type": tune.direction.capitalize(), "MetricName": tune.objective},
        "ResourceLimits": {
            **present(MaxNumberOfTrainingJobs=_max_jobs(tune), MaxRuntimeInSeconds=tune.max_run_s),
            "MaxParallelTrainingJobs": tune.parallel_jobs,
        },
        "ParameterRanges": _parameter_ranges(tune.ranges),
        "TrainingJobEarlyStoppingType": "Auto" if tune.early_stopping else "Off",
        **present(RandomSeed=tune.seed),
    }
    resource = present(MinResource=tune.min_epochs, MaxResource=tune.max_epochs)
    if resource:
        config["StrategyConfig"] = {"HyperbandStrategyConfig": resource}
    arguments = {
        "HyperParameterTuningJobName": f"{name}{time.strftime(_TIME, time.gmtime())}",
        "HyperParameterTuningJobConfig": config,
        "TrainingJobDefinition": definition,
        **present(Tags=request.get("Tags")),
    }
    if tune.warm_start:
        arguments["WarmStartConfig"] = {
            "ParentHyperParameterTuningJobs": [{"HyperParameterTuningJobName": parent} for parent in tune.warm_start],
            "WarmStartType": _WARM_STARTS[tune.warm_start_kind],
        }
    warnings = [
        f"{_KEYS.get(member, member)} is ignored: the training jobs of a tuning job cannot have it."
        for member in dropped
        if member not in _NOT_MISSED
    ]
    return arguments, warnings


def count_problem(tune: Tune, request: Mapping[str, Any]) -> JobProblem | None:
    """Return a problem if there are too many hyperparameters, those that are tuned included.

    Args:
        tune: What is tuned.
        request: Arguments of CreateTrainingJob.
    """
    fixed = len(request.get("HyperParameters", {}))
    total = fixed + len(tune.ranges) + 1
    if total <= _MAX_HYPERPARAMETERS:
        return None
    return JobProblem(
        "hyperparameters",
        f"hyperparameters: {fixed} fixed and {len(tune.ranges)} tuned ones, and one that the service adds, make "
        f"{total}; the service allows {_MAX_HYPERPARAMETERS}. Nest some, as in {{data: {{batch_size: 32}}}}.",
        also=("config", "tune.ranges"),
    )


def first_values(tune: Tune) -> dict[str, str]:
    """Return one value of each range, as the service would write it into ``hyperparameters.json``."""
    return {name: (_texts(one)[0] if one.values else _number(one.min)) for name, one in tune.ranges.items()}


def _range_problems(name: str, one: Range) -> Iterator[str]:
    try:
        encode({name: 0})
    except HyperparameterError as error:
        yield str(error)
    has_limits = one.min is not None and one.max is not None
    if (one.values is None) != has_limits or (one.values is not None and (one.min, one.max) != (None, None)):
        yield "give either min and max, or values."
    elif one.values is not None:
        if not one.values:
            yield "values is empty."
        if one.scale != "auto":
            yield f"scale is {one.scale}, which does not apply to a list of values. Remove it."
        for value in one.values:
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{value} has no JSON form."
    elif one.min is not None and one.max is not None:
        if not one.min < one.max:
            yield f"min is {one.min} and max is {one.max}; min must be the smaller one."
        elif one.scale == "log" and one.min <= 0:
            yield f"min is {one.min}; with scale: log it must be above 0."
        elif one.scale == "reverse_log" and not (one.min >= 0 and one.max < 1):
            yield f"the range is {one.min} to {one.max}; with scale: reverse_log it must lie in 0 <= x < 1."


def _strategy_problems(tune: Tune) -> Iterator[JobProblem]:
    lists = [one.values for one in tune.ranges.values() if one.values is not None]
    if tune.strategy == "grid":
        numbers = [name for name, one in tune.ranges.items() if one.values is None]
        combinations = math.prod(len(values) for values in lists)
        if numbers:
            yield JobProblem(
                "tune.strategy",
                f"tune.strategy is grid, which needs values, but min and max are given for: {', '.join(numbers)}.",
                also=("tune.ranges",),
            )
        elif tune.max_jobs not in {None, combinations}:
            yield JobProblem(
                "tune.max_jobs",
                f"tune.max_jobs is {tune.max_jobs}, but the number of combinations is {combinations}. Remove max_jobs.",
                also=("tune.ranges", "tune.strategy"),
            )
    jobs = _max_jobs(tune)
    if jobs is not None and tune.parallel_jobs > jobs:
        yield JobProblem(
            "tune.parallel_jobs",
            f"tune.parallel_jobs is {tune.parallel_jobs}, more than the number of jobs: {jobs} (tune.max_jobs).",
            also=("tune.max_jobs", "tune.strategy"),
        )
    if tune.strategy == "hyperband" and tune.early_stopping:
        yield JobProblem(
            "tune.early_stopping",
            "tune.early_stopping is set, but hyperband stops training jobs by itself. Remove it.",
            also=("tune.strategy",),
        )
    if tune.strategy != "hyperband" and (tune.min_epochs, tune.max_epochs) != (None, None):
        yield JobProblem(
            "tune.strategy",
            f"tune.min_epochs and tune.max_epochs belong to hyperband, but tune.strategy is {tune.strategy}.",
        )


def _max_jobs(tune: Tune) -> int | None:
    """None stands for all combinations of a grid, which the service counts itself."""
    return tune.max_jobs if tune.max_jobs is not None or tune.strategy == "grid" else _DEFAULT_JOBS


def _parameter_ranges(ranges: Mapping[str, Range]) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name, one in ranges.items():
        if one.values is not None:
            found.setdefault("CategoricalParameterRanges", []).append({"Name": name, "Values": _texts(one)})
            continue
        is_whole = isinstance(one.min, int) and isinstance(one.max, int)
        found.setdefault("IntegerParameterRanges" if is_whole else "ContinuousParameterRanges", []).append(
            {
                "Name": name,
                "MinValue": _number(one.min),
                "MaxValue": _number(one.max),
                "ScalingType": _SCALES[one.scale],
            }
        )
    return found


def _texts(one: Range) -> list[str]:
    return [json.dumps(value) for value in one.values or []]


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)
