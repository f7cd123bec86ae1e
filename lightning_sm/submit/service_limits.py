"""The limits of CreateTrainingJob, read from the model of the service that comes with botocore.

botocore itself checks types, names and minima only; maxima, patterns and enumerations are in its model, too, but left
to the service, which reports one at a time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import botocore.session
from botocore.validate import ParamValidator

# Where a part of the request comes from in the job file, and what helps if it is too much.
_SOURCES = {
    "TrainingJobName": "name",
    "RoleArn": "role",
    "HyperParameters": "config, hyperparameters (nest options, as in {data: {batch_size: 32}}, or put a file into a "
    "channel named config)",
    "AlgorithmSpecification.TrainingImage": "image",
    "AlgorithmSpecification.MetricDefinitions": "metrics, metric_patterns",
    "InputDataConfig": "channels",
    "OutputDataConfig": "output",
    "ResourceConfig.KeepAlivePeriodInSeconds": "keep_alive_s",
    "ResourceConfig.VolumeSizeInGB": "volume_gb",
    "ResourceConfig": "groups",
    "StoppingCondition.MaxWaitTimeInSeconds": "spot.max_wait_s",
    "StoppingCondition": "max_run_s",
    "CheckpointConfig": "checkpoints",
    "TensorBoardOutputConfig": "tensorboard",
    "VpcConfig.SecurityGroupIds": "vpc.security_groups",
    "VpcConfig.Subnets": "vpc.subnets",
    "RetryStrategy": "max_retry_attempts",
    "Environment": "environment",
    "Tags": "tags",
}
_SHOWN_CHARS = 60
# The patterns are Java's. Its character classes, inside brackets, as Python's; one that is not listed takes anything.
_CLASSES = {"Alnum": "a-zA-Z0-9", "L": r"\w", "N": r"\d", "Z": " "}


def request_problems(request: Mapping[str, Any]) -> list[str]:
    """Check a request against everything that the model of the service says about it.

    Args:
        request: Arguments of CreateTrainingJob.

    Returns:
        One line for each problem: the keys of the job file, the place in the request, what is wrong.
    """
    shape = _input_shape()
    report = ParamValidator().validate(request, shape)
    lines = report.generate_report().splitlines() if report.has_errors() else []
    return [*lines, *_violations(request, shape, "")]


def matches(member: str, value: str) -> bool:
    """Whether a text fits a member of the request, such as ``RoleArn``.

    Args:
        member: Name of a member of CreateTrainingJob.
        value: The text.
    """
    return not list(_violations(value, _input_shape().members[member], member))


@cache
def _input_shape() -> Any:
    service = botocore.session.get_session().get_service_model("sagemaker")
    return service.operation_model("CreateTrainingJob").input_shape


def _violations(value: Any, shape: Any, path: str) -> Iterator[str]:
    """What exceeds a maximum, fits no pattern or is in no enumeration; wrong types are botocore's own business."""
    if shape.type_name == "structure" and isinstance(value, Mapping):
        for name in value.keys() & shape.members.keys():
            yield from _violations(value[name], shape.members[name], f"{path}.{name}".lstrip("."))
    elif shape.type_name == "list" and isinstance(value, (list, tuple)):
        yield from _too_many(len(value), shape, path)
        for index, item in enumerate(value):
            yield from _violations(item, shape.member, f"{path}[{index}]")
    elif shape.type_name == "map" and isinstance(value, Mapping):
        yield from _too_many(len(value), shape, path)
        for key, item in value.items():
            yield from _violations(key, shape.key, f"{path} (name)")
            yield from _violations(item, shape.value, f"{path}[{key!r}]")
    elif shape.type_name == "string" and isinstance(value, str):
        yield from _text_violations(value, shape, path)
    elif shape.type_name in {"integer", "long"} and isinstance(value, int):
        maximum = shape.metadata.get("max")
        if maximum is not None and value > maximum:
            yield f"{_source(path)}: {path} is {value}; the service allows {maximum}."


def _too_many(count: int, shape: Any, path: str) -> Iterator[str]:
    maximum = shape.metadata.get("max")
    if maximum is not None and count > maximum:
        yield f"{_source(path)}: {path} has {count} entries; the service allows {maximum}."


def _text_violations(text: str, shape: Any, path: str) -> Iterator[str]:
    shown = repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
    maximum, pattern = shape.metadata.get("max"), shape.metadata.get("pattern")
    if maximum is not None and len(text) > maximum:
        yield f"{_source(path)}: {path} is {shown} with {len(text)} characters; the service allows {maximum}."
    if pattern is not None and not re.fullmatch(_pattern(pattern), text):
        yield f"{_source(path)}: {path} is {shown}, which does not match {pattern}."
    if shape.enum and text not in shape.enum:
        close = ", ".join(difflib.get_close_matches(text, shape.enum)) or f"one of {len(shape.enum)} values"
        yield (
            f"{_source(path)}: {path} is {shown}, which this botocore does not know; expected {close}. "
            "If it is new: pip install --upgrade boto3."
        )


def _pattern(pattern: str) -> str:
    return re.sub(r"\\p\{(\w+)\}", lambda match: _CLASSES.get(match[1], r"\s\S"), pattern)


def _source(path: str) -> str:
    """The keys of the job file that a place in the request comes from."""
    plain = re.sub(r"\[.*?\]| \(name\)", "", path)
    return next((source for prefix, source in _SOURCES.items() if plain.startswith(prefix)), "the request")
