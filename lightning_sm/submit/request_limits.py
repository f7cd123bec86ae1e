"""The limits on job requests, from botocore's API models.

botocore only checks types, names and minima. Its models also contain maxima, patterns and enumerations, but botocore
leaves these checks to the service, which reports one violation at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import botocore.session

from lightning_sm._arguments import did_you_mean
from lightning_sm._text import shortened
from lightning_sm.job.redaction import shown
from lightning_sm.submit.problems import JobProblem

# The places in the request that each key of the job file sets.
PLACES: Mapping[str, tuple[str, ...]] = {
    "name": ("TrainingJobName", "HyperParameterTuningJobName"),
    "image": ("AlgorithmSpecification.TrainingImage",),
    "role": ("RoleArn",),
    "groups": ("ResourceConfig.InstanceGroups", "ResourceConfig.InstanceType", "ResourceConfig.InstanceCount"),
    "hyperparameters": ("HyperParameters", "StaticHyperParameters"),
    "environment": ("Environment",),
    "output": ("OutputDataConfig.S3OutputPath",),
    "checkpoints": ("CheckpointConfig.S3Uri",),
    "max_run_s": ("StoppingCondition.MaxRuntimeInSeconds",),
    "spot": ("StoppingCondition.MaxWaitTimeInSeconds", "EnableManagedSpotTraining"),
    "volume_gb": ("ResourceConfig.VolumeSizeInGB",),
}
# Keys that become lists in the request. The key ``request`` may add entries to these lists.
_LISTS = {"channels": "InputDataConfig", "metrics": "AlgorithmSpecification.MetricDefinitions", "tags": "Tags"}
_TUNING = {
    "tune.ranges": "HyperParameterTuningJobConfig.ParameterRanges",
    "tune.objective": "HyperParameterTuningJobConfig.HyperParameterTuningJobObjective",
    "tune": "HyperParameterTuningJobConfig",
    "tune.request": "WarmStartConfig",
}
# The prefix of a training job's settings in the request of a tuning job.
_DEFINITION = "TrainingJobDefinition."
_ADVICE = {
    "hyperparameters": " Nest options, as in {data: {batch_size: 32}}, or put a file into a channel named config."
}
IF_NEW = f"If it is new: pip install --upgrade boto3 (botocore {botocore.__version__} is installed)."
_SHOWN_CHARS = 60
# Kinds of values in the model: Python types, words for a value, and the unit of its size.
_KINDS: Mapping[str, tuple[Any, str, str]] = {
    "structure": (Mapping, "names with values", ""),
    "map": (Mapping, "names with values", " entries"),
    "list": ((list, tuple), "a list", " entries"),
    "string": (str, "text", " characters"),
    "boolean": (bool, "true or false", ""),
    "integer": (int, "a whole number", ""),
    "long": (int, "a whole number", ""),
    "float": ((int, float), "a number", ""),
    "double": ((int, float), "a number", ""),
}
# The patterns use Java's syntax. This maps Java's character classes to Python's; a class not listed matches anything.
_CLASSES = {"Alnum": "a-zA-Z0-9", "L": r"\w", "N": r"\d", "Z": " "}


def request_problems(request: Mapping[str, Any], operation: str = "CreateTrainingJob") -> list[JobProblem]:
    """Check a request against the API model.

    Args:
        request: Arguments of the operation.
        operation: Name of the operation.

    Returns:
        The problems, each with the key of the job file, the place in the request, and what is wrong.
    """
    return list(_violations(request, _input_shape(operation), ""))


def matches(member: str, value: str) -> bool:
    """Return whether a string is valid for a member of CreateTrainingJob, such as ``RoleArn``."""
    return not list(_violations(value, _input_shape().members[member], member))


def values_of(shape: str) -> list[str]:
    """Return the values of an enumeration in the model, such as ``TrainingInstanceType``."""
    return list(_service().shape_for(shape).enum)


def fitting(value: Mapping[str, Any], structure: str) -> tuple[dict[str, Any], list[str]]:
    """Return a value with only the members that a structure of SageMaker's API allows, and the names of the others.

    Args:
        value: A value such as the arguments of CreateTrainingJob.
        structure: Name of the structure, such as ``HyperParameterTrainingJobDefinition``.
    """
    dropped: list[str] = []
    return _fitting(value, _service().shape_for(structure), dropped), dropped


def _fitting(value: Any, shape: Any, dropped: list[str]) -> Any:
    if shape.type_name == "structure" and isinstance(value, Mapping):
        members = shape.members
        dropped += [name for name in value if name not in members]
        return {name: _fitting(item, members[name], dropped) for name, item in value.items() if name in members}
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
    """Yield a problem for each unknown or missing member, and each value of the wrong type or beyond a limit."""
    types, words, unit = _KINDS[shape.type_name]
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        yield _problem(path, f"is not {words}.")
        return
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    size = len(value) if unit else value
    extent = f"has {size}{unit}" if unit else f"is {size}"
    if most is not None and size > most:
        yield _problem(path, f"{extent}; the service allows {most}.{_ADVICE.get(_key(path), '')}")
    if least is not None and size < least:
        yield _problem(path, f"{extent}; the service needs at least {least}.")
    match shape.type_name:
        case "structure":
            yield from _member_violations(value, shape, path)
        case "list":
            for index, item in enumerate(value):
                yield from _violations(item, shape.member, f"{path}[{index}]")
        case "map":
            for name, item in value.items():
                yield from _violations(name, shape.key, f"{path}[{name!r}] (name)")
                yield from _violations(item, shape.value, f"{path}[{name!r}]")
        case "string":
            yield from _text_violations(value, shape, path)


def _member_violations(value: Mapping[str, Any], shape: Any, path: str) -> Iterator[JobProblem]:
    for name in shape.required_members:
        if name not in value:
            yield _problem(path, f"lacks {name}.")
    for name, item in value.items():
        place = f"{path}.{name}".lstrip(".")
        if name in shape.members:
            yield from _violations(item, shape.members[name], place)
        else:
            near = did_you_mean(str(name), list(shape.members))
            yield _problem(place, f"is not known to the service's model.{near} {IF_NEW}")


def _text_violations(text: str, shape: Any, path: str) -> Iterator[JobProblem]:
    quoted = repr(shortened(str(shown(path, text)), _SHOWN_CHARS))
    pattern = shape.metadata.get("pattern")
    if pattern is not None and not re.fullmatch(_pattern(pattern), text):
        yield _problem(path, f"is {quoted}, which does not match {pattern}.")
    if shape.enum and text not in shape.enum:
        yield _problem(path, f"is {quoted}, unknown to the service's model.{did_you_mean(text, shape.enum)} {IF_NEW}")


def _pattern(pattern: str) -> str:
    return re.sub(r"\\p\{(\w+)\}", lambda match: _CLASSES.get(match[1], r"\s\S"), pattern)


def _problem(path: str, text: str) -> JobProblem:
    key = _key(path)
    entry = re.fullmatch(r"\w+\['(.*)'\](?: \(name\))?", path.removeprefix(_DEFINITION))
    if key == "request":
        line = f"request.{path}"
    else:
        line = f"{key}.{entry[1]}" if entry is not None and key in {"environment", "hyperparameters"} else key
    return JobProblem(line, f"{key}: {path or 'the request'} {text}")


def _key(path: str) -> str:
    """Return the key of the job file that sets a place in the request; "request" if no other key does."""
    plain = re.sub(r"\[.*?\]| \(name\)", "", path).removeprefix(_DEFINITION)
    decided = [(place, key) for key, places in PLACES.items() for place in places]
    for place, key in [*decided, *((place, key) for key, place in {**_LISTS, **_TUNING}.items())]:
        if f"{plain}.".startswith(f"{place}."):
            return key
    return "request"
