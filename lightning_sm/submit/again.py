"""``lightning-sm jobs again``, which resubmits the request of an existing training job, with changes and a new name.

The service returns the original request, so neither the job file nor the SDK that created the job is needed. The
request is converted to keys of a job file; members without a key go into ``request``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import Clients
from lightning_sm.errors import SubmitError
from lightning_sm.job.facts import SINGLE_GROUP
from lightning_sm.job.hyperparameters import TUNING_OBJECTIVE, is_for_toolkit, toolkit_value, values_of
from lightning_sm.job.variables import JOB_SECRET, MAX_RESTARTS
from lightning_sm.submit.cost_limit import confirm_cost
from lightning_sm.submit.job_file import read_job
from lightning_sm.submit.overrides import Override
from lightning_sm.submit.request_limits import fitting
from lightning_sm.submit.submit import send, show_dry_run
from lightning_sm.submit.training_job import MAX_NAME_CHARS

_LOG = command_logger(__name__)

# The end of a name created by ``new_job_name`` or an SDK.
_NAME_ENDING = re.compile(r"-\d{4}(-\d\d){5}-[0-9a-f]{3}\Z")


def again(
    clients: Clients, description: Mapping[str, Any], settings: Sequence[str], *, is_dry_run: bool, yes: bool
) -> None:
    """Resubmit the request of a training job.

    Args:
        clients: Clients for the AWS APIs.
        description: A response from DescribeTrainingJob.
        settings: Changes, as ``KEY=VALUE`` with keys of a job file.
        is_dry_run: Whether to print the request, without secrets, and send nothing.
        yes: Whether to submit without asking.

    Raises:
        ClientError: AWS rejects a request.
        SubmitError: A change is invalid, or the new job has problems.
    """
    keys = _keys(clients, description)
    name = description["TrainingJobName"]
    original = [Override(key, json.dumps(value), name, is_json=True) for key, value in keys.items()]
    job = read_job(None, [*original, *_changes(settings)])
    if job.checkpoints is not None and job.checkpoints == keys["checkpoints"]:
        _LOG.warning(
            "warning: the new job resumes from %s's checkpoints, in %s. To start over, pass --set checkpoints=s3://...",
            name,
            job.checkpoints,
        )
    region = clients.sagemaker.meta.region_name
    if is_dry_run:
        show_dry_run(job, region)
    else:
        send(job, wait=False, ask=None if yes else confirm_cost, region=region)


def _changes(settings: Sequence[str]) -> list[Override]:
    pairs = [setting.partition("=") for setting in settings]
    for key, equals, _ in pairs:
        if not (key and equals):
            raise SubmitError(f"--set {key}: expected KEY=VALUE, as in --set max_run_s=3600.")
    return [Override(key, text, f"--set {key}") for key, _, text in pairs]


def _keys(clients: Clients, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a job file that would result in the same request."""
    request = {name: value for name, value in fitting(description, "CreateTrainingJobRequest")[0].items() if value}
    environment: dict[str, str] = request.pop("Environment", {})
    of_keys = {JOB_SECRET.name, MAX_RESTARTS.name}
    resources, stopping = request["ResourceConfig"], request["StoppingCondition"]
    pages = clients.sagemaker.get_paginator("list_tags").paginate(ResourceArn=description["TrainingJobArn"])
    tags = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"] if not tag["Key"].startswith("aws:")}
    keys: dict[str, Any] = {
        "name": _NAME_ENDING.sub("", request.pop("TrainingJobName"))[:MAX_NAME_CHARS].rstrip("-"),
        "image": request["AlgorithmSpecification"].pop("TrainingImage", ""),
        "role": request.pop("RoleArn"),
        "groups": _groups(resources),
        "max_restarts": MAX_RESTARTS.read(environment),
        "environment": {name: value for name, value in environment.items() if name not in of_keys},
        "hyperparameters": _values(request.pop("HyperParameters", {})),
        "output": request["OutputDataConfig"].pop("S3OutputPath"),
        "checkpoints": request.pop("CheckpointConfig", {}).get("S3Uri"),
        "max_run_s": stopping.pop("MaxRuntimeInSeconds", None),
        "volume_gb": resources.pop("VolumeSizeInGB"),
        "tags": tags,
    }
    max_wait_s = stopping.pop("MaxWaitTimeInSeconds", None)
    if request.pop("EnableManagedSpotTraining", False):
        keys["spot"] = {"max_wait_s": max_wait_s}
    return {**keys, "request": request}


def _groups(resources: dict[str, Any]) -> dict[str, Any]:
    """Remove the groups from a ResourceConfig and return them; an unnamed group gets the service's name for it."""
    groups = resources.pop("InstanceGroups", None)
    if groups:
        return {
            group["InstanceGroupName"]: {"instance_type": group["InstanceType"], "count": group["InstanceCount"]}
            for group in groups
        }
    preferences = resources.get("InstancePreferences")  # the service then chooses the hosts, and the group is not sent
    only = preferences[0] if preferences else resources
    group = {"instance_type": only["InstanceType"], "count": only.get("InstanceCount", 1)}
    if not preferences:
        del resources["InstanceType"], resources["InstanceCount"]
    return {SINGLE_GROUP: group}


def _values(hyperparameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of all hyperparameters, including those for SageMaker's toolkit."""
    of_toolkit = [name for name in hyperparameters if is_for_toolkit(name) and name != TUNING_OBJECTIVE]
    return {name: toolkit_value(hyperparameters[name]) for name in of_toolkit} | values_of(hyperparameters)
