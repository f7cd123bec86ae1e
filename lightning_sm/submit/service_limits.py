"""The limits of the APIs that take jobs, from the API models that come with botocore.

botocore itself checks types, names and minima only. Maxima, patterns and enumerations are in its model too, but it
leaves them to the service, which reports one violation at a time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import botocore.session
from botocore.validate import ParamValidator

from lightning_sm.job.redaction import shown
from lightning_sm.submit.problems import JobProblem

# Place in the request to keys of the job file, with advice where a limit is easily exceeded.
_SOURCES = {
    "TrainingJobName": "name",
    "RoleArn": "role",
    "HyperParameters": "config, hyperparameters (nest options, as in {data: {batch_size: 32}}, or put a file into a "
    "channel named config)",
    "AlgorithmSpecification.TrainingImage": "image",
    "AlgorithmSpecification.MetricDefinitions": "metrics, metric_patterns",
    "InputDataConfig": "channels",
    "OutputDataConfig.KmsKeyId": "output_kms_key",
    "OutputDataConfig": "output",
    "ResourceConfig.VolumeKmsKeyId": "volume_kms_key",
    "ResourceConfig.TrainingPlanArn": "training_plan",
    "ResourceConfig.KeepAlivePeriodInSeconds": "keep_alive_s",
    "ResourceConfig.VolumeSizeInGB": "volume_gb",
    "ResourceConfig.InstancePreferences": "groups",
    "ResourceConfig": "groups",
    "StoppingCondition.MaxWaitTimeInSeconds": "spot.max_wait_s",
    "StoppingCondition.MaxPendingTimeInSeconds": "max_pending_s",
    "StoppingCondition": "max_run_s",
    "CheckpointConfig": "checkpoints",
    "TensorBoardOutputConfig": "tensorboard",
    "VpcConfig.SecurityGroupIds": "vpc.security_groups",
    "VpcConfig.Subnets": "vpc.subnets",
    "RetryStrategy": "max_retry_attempts",
    "InfraCheckConfig": "infra_check",
    "MlflowConfig.MlflowExperimentName": "mlflow_experiment",
    "MlflowConfig.MlflowRunName": "mlflow_run",
    "MlflowConfig": "mlflow",
    "RemoteDebugConfig": "remote_debug",
    "Environment": "environment",
    "Tags": "tags",
    "HyperParameterTuningJobName": "name",
    "StaticHyperParameters": "config, hyperparameters",
    "HyperParameterTuningJobConfig.ParameterRanges": "tune.ranges",
    "HyperParameterTuningJobConfig.HyperParameterTuningJobObjective": "tune.objective",
    "HyperParameterTuningJobConfig": "tune",
    "WarmStartConfig": "tune.warm_start",
}
# Of a tuning job: the place of what is a training job's elsewhere.
_DEFINITION = "TrainingJobDefinition."
_SHOWN_CHARS = 60
# Kinds of values in the model.
_PYTHON_TYPES: dict[str, Any] = {
    "structure": Mapping,
    "map": Mapping,
    "list": (list, tuple),
    "string": str,
    "integer": int,
    "long": int,
}
_UNITS = {"map": "entries", "list": "entries", "string": "characters"}
# The patterns use Java's syntax. Java's character classes to the content of Python's brackets; a class that is not
# listed matches anything.
_CLASSES = {"Alnum": "a-zA-Z0-9", "L": r"\w", "N": r"\d", "Z": " "}


def request_problems(request: Mapping[str, Any], operation: str = "CreateTrainingJob") -> list[JobProblem]:
    """Check a request against the API model.

    Args:
        request: Arguments of the operation.
        operation: Its name.

    Returns:
        The problems: the keys of the job file, the place in the request, and what is wrong.
    """
    shape = _input_shape(operation)
    known = _fitting(request, shape, [])
    report = ParamValidator().validate(known, shape).generate_report()
    return [*(JobProblem("", line) for line in report.splitlines()), *_violations(request, shape, "")]


def matches(member: str, value: str) -> bool:
    """Return whether a text is valid for a member of CreateTrainingJob, such as ``RoleArn``."""
    return not list(_violations(value, _input_shape().members[member], member))


def fitting(value: Mapping[str, Any], structure: str) -> tuple[dict[str, Any], list[str]]:
    """Return what a structure of SageMaker's API can hold of a value, and the names of what it cannot.

    Args:
        value: For example the arguments of CreateTrainingJob.
        structure: Name of the structure, such as ``HyperParameterTrainingJobDefinition``.
    """
    dropped: list[str] = []
    return _fitting(value, _service().shape_for(structure), dropped), dropped


def _fitting(value: Any, shape: Any, dropped: list[str]) -> Any:
    if shape.type_name == "structure" and isinstance(value, Mapping):
        dropped += [name for name in value if name not in shape.members]
        return {
            name: _fitting(item, shape.members[name], dropped) for name, item in value.items() if name in shape.members
        }
    if shape.type_name == "list" and isinstance(value, (list, tuple)):
        return [_fitting(item, shape.member, dropped) for item in value]
    return value


@cache
def _service() -> Any:
    return botocore.session.get_session().get_service_model("sagemaker")


@cache
def _input_shape(operation: str = "CreateTrainingJob") -> Any:
    return _service().operation_model(operation).input_shape


def _violations(value: Any, shape: Any, path: str) -> Iterator[JobProblem]:
    """Find members that the model lacks, and values beyond a maximum, or outside a pattern or an enumeration."""
    kind = shape.type_name
    if not isinstance(value, _PYTHON_TYPES.get(kind, ())):
        return  # botocore reports wrong types
    maximum = shape.metadata.get("max")
    if maximum is not None:
        size = value if isinstance(value, int) else len(value)
        if size > maximum:
            extent = f"has {size} {_UNITS[kind]}" if kind in _UNITS else f"is {size}"
            yield JobProblem(_key(path), f"{_source(path)}: {path} {extent}; the service allows {maximum}.")
    match kind:
        case "structure":
            for name in value:
                place = f"{path}.{name}".lstrip(".")
                if name in shape.members:
                    yield from _violations(value[name], shape.members[name], place)
                else:
                    yield JobProblem(
                        _key(place),
                        f"{_source(place)}: the installed botocore {botocore.__version__} does not know {place}: pip "
                        "install --upgrade boto3.",
                    )
        case "list":
            for index, item in enumerate(value):
                yield from _violations(item, shape.member, f"{path}[{index}]")
        case "map":
            for key, item in value.items():
                yield from _violations(key, shape.key, f"{path} (name)")
                yield from _violations(item, shape.value, f"{path}[{key!r}]")
        case "string":
            yield from _text_violations(value, shape, path)


def _text_violations(text: str, shape: Any, path: str) -> Iterator[JobProblem]:
    safe = shown(path, text)
    quoted = repr(safe if len(safe) <= _SHOWN_CHARS else f"{safe[:_SHOWN_CHARS]}...")
    pattern = shape.metadata.get("pattern")
    if pattern is not None and not re.fullmatch(_pattern(pattern), text):
        yield JobProblem(_key(path), f"{_source(path)}: {path} is {quoted}, which does not match {pattern}.")
    if shape.enum and f"ml.{text}" in shape.enum:
        yield JobProblem(_key(path), f"{_source(path)}: the instance type is {quoted}; SageMaker has ml.{text}.")
    elif shape.enum and text not in shape.enum:
        close = ", ".join(difflib.get_close_matches(text, shape.enum)) or f"one of {len(shape.enum)} values"
        yield JobProblem(
            _key(path),
            f"{_source(path)}: {path} is {quoted}, which the installed botocore does not know; expected {close}. If "
            "the value is new: pip install --upgrade boto3.",
        )


def _pattern(pattern: str) -> str:
    return re.sub(r"\\p\{(\w+)\}", lambda match: _CLASSES.get(match[1], r"\s\S"), pattern)


def _key(path: str) -> str:
    """Return the key of the job file whose line a problem is shown with."""
    keys = _keys(path)
    key = "" if keys is None else re.split(r"[, ]", keys)[0]
    key = "hyperparameters" if key == "config" else key
    entry = re.fullmatch(r"\w+\['(.*)'\]", path.removeprefix(_DEFINITION))
    return f"{key}.{entry[1]}" if entry is not None and key in {"environment", "hyperparameters"} else key


def _source(path: str) -> str:
    """Return what a problem with a place in the request begins with."""
    return _keys(path) or "the request"


def _keys(path: str) -> str | None:
    """Return the keys of the job file behind a place in the request."""
    plain = re.sub(r"\[.*?\]| \(name\)", "", path).removeprefix(_DEFINITION)
    return next((source for prefix, source in _SOURCES.items() if plain.startswith(prefix)), None)
