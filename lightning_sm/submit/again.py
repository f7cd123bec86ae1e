"""``lightning-sm jobs again``: the request of a training job that exists, sent again with changes, under a new name.

The service returns what it was asked for, so neither the job file nor the SDK that made the request is needed: what no
key of a job file can express stays as it was.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sm.cloud.aws import Clients
from lightning_sm.cloud.hosts import groups_of, shown_hosts
from lightning_sm.errors import SubmitError
from lightning_sm.job.variables import JOB_SECRET, MAX_RESTARTS, MODEL
from lightning_sm.submit.confirm import confirm
from lightning_sm.submit.creation import create_training_job
from lightning_sm.submit.job_file import Job, parse_job
from lightning_sm.submit.job_keys import keys_of, suggestion
from lightning_sm.submit.overrides import Override
from lightning_sm.submit.problems import Findings
from lightning_sm.submit.request import encode_hyperparameters, make_request
from lightning_sm.submit.secret_check import secret_problems
from lightning_sm.submit.service_limits import PLACES, fitting, request_problems
from lightning_sm.submit.training_job import NAME_ENDING_CHARS, joined, new_job_name, training_job
from lightning_sm.submit.without_secrets import without_secrets

# Keys that become variables of the hosts.
_VARIABLES = {"max_restarts": MAX_RESTARTS.name, "model": MODEL.name}
_CHANGEABLE = (*PLACES, *_VARIABLES, "tags", "request")
# Those that are not put into the request as they are.
_JOINED = {"name", "hyperparameters", "environment"}
# The end of a name that ``new_job_name`` or an SDK has made.
_NAME_ENDING = re.compile(r"-\d{4}(-\d\d){5}-[0-9a-f]{3}\Z")
_MAX_NAME_CHARS = 63 - NAME_ENDING_CHARS
# What a tuning job adds to the hyperparameters of its training jobs.
_OF_TUNING = "_tuning_objective_metric"


def again(
    clients: Clients, description: Mapping[str, Any], settings: Sequence[str], *, dry_run: bool, yes: bool
) -> str | None:
    """Submit the request of a training job again.

    Args:
        clients: Clients of the AWS APIs.
        description: An answer of DescribeTrainingJob.
        settings: Changes, as ``KEY=VALUE`` with keys of a job file.
        dry_run: Whether to write the request to stdout, without secrets, and to send nothing.
        yes: Whether to submit without asking.

    Returns:
        The new job's name; None if nothing was sent.

    Raises:
        ClientError: AWS rejects a request.
        SubmitError: A change is not possible, or the new request has problems.
    """
    changes = [_change(setting) for setting in settings]
    job = parse_job(None, [*_base(description, changes), *changes])
    findings = Findings([*job.source.problems], source=job.source)
    findings.add(secret_problems(job))
    findings.report()
    request = _changed(description, job, changes)
    request |= _tags(clients, description, job)
    findings.add(request_problems(request))
    if "CheckpointConfig" in request and not any(change.key == "checkpoints" for change in changes):
        findings.warnings.append(
            f"the new job resumes from the checkpoints of {description['TrainingJobName']}, in "
            f"{request['CheckpointConfig']['S3Uri']}. To begin anew: --set checkpoints=s3://..."
        )
    findings.report()
    if dry_run:
        json.dump(without_secrets(request), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return None
    words = ", ".join(f"{change.key}={change.text}" for change in changes) or "no changes"
    hours = request["StoppingCondition"].get("MaxRuntimeInSeconds", 0) / 3600
    if not yes:
        confirm(
            f"{description['TrainingJobName']} again, with {words}: {shown_hosts(request)}, for at most {hours:g} h."
        )
    create_training_job(clients, request)
    return str(request["TrainingJobName"])


def _change(setting: str) -> Override:
    key, equals, value = setting.partition("=")
    name = key.partition(".")[0]
    if not equals:
        raise SubmitError(f"--set {setting}: expected KEY=VALUE, as in --set max_run_s=3600.")
    if name not in keys_of(Job):
        raise SubmitError(f"--set {setting}: a job has no key {name}.{suggestion(key, Job, Job)[0]}")
    if name not in _CHANGEABLE:
        raise SubmitError(
            f"--set {setting}: {name} cannot be changed here. Submit a job file, or change one of: "
            f"{', '.join(sorted(_CHANGEABLE))}."
        )
    return Override(key, value, "--set ")


def _base(description: Mapping[str, Any], changes: Sequence[Override]) -> list[Override]:
    """Return what a job file needs at least, as the job has it; changes then apply to it."""
    groups = groups_of(description)
    names = [group.name for group in groups]
    stated = [change.key.split(".")[1] for change in changes if change.key.startswith("groups.")]
    if len(groups) == 1 and stated:  # the request of an ordinary job does not name its group
        names = [stated[0]]
    hosts = {
        name: {"instance_type": group.instance_type, "count": group.num_hosts}
        for name, group in zip(names, groups, strict=True)
    }
    image = description["AlgorithmSpecification"].get("TrainingImage", "")
    return [Override("image", image), Override("groups", json.dumps(hosts))]


def _changed(description: Mapping[str, Any], job: Job, changes: Sequence[Override]) -> dict[str, Any]:
    """Return the arguments of CreateTrainingJob: those of the job, with the changes."""
    request = {name: value for name, value in fitting(description, "CreateTrainingJobRequest")[0].items() if value}
    old_name = description["TrainingJobName"]
    keys = {change.key.partition(".")[0] for change in changes}
    start = job.name if "name" in keys else _NAME_ENDING.sub("", old_name)[:_MAX_NAME_CHARS].rstrip("-")
    name = new_job_name(start)
    new = training_job(make_request(job, encode_hyperparameters(job)), name, job.output or "")
    if "groups" in keys and "InstancePreferences" in request["ResourceConfig"]:
        raise SubmitError(
            f"{old_name} leaves the choice of its hosts to the service. To change that, submit a job file."
        )
    for key in (keys & PLACES.keys()) - _JOINED:
        for place in PLACES[key]:
            _put(request, place, _get(new, place))
    request["TrainingJobName"] = name
    variables = {_VARIABLES[key] for key in keys & _VARIABLES.keys()} | {JOB_SECRET.name}
    kept = {one: value for one, value in request.get("Environment", {}).items() if one not in variables}
    request["Environment"] = kept | new["Environment"]
    hyperparameters = _without(request.get("HyperParameters", {}), {_OF_TUNING, *job.hyperparameters})
    added = new.get("HyperParameters", {})
    if not all(map(_is_json, hyperparameters.values())):
        # Sent by an SDK as they are: beside them, quotes would count as text (job/hyperparameters.py, rule 1).
        added |= {one: value for one, value in job.hyperparameters.items() if isinstance(value, str)}
    request["HyperParameters"] = hyperparameters | added
    return joined({name: value for name, value in request.items() if value != {}}, job.request)


def _without(hyperparameters: Mapping[str, str], names: set[str]) -> dict[str, str]:
    return {key: text for key, text in hyperparameters.items() if key not in names}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _tags(clients: Clients, description: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return the tags of the job, which its description lacks, and the new ones."""
    pages = clients.sagemaker.get_paginator("list_tags").paginate(ResourceArn=description["TrainingJobArn"])
    tags = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"] if not tag["Key"].startswith("aws:")}
    tags |= job.tags
    return {"Tags": [{"Key": key, "Value": value} for key, value in tags.items()]} if tags else {}


def _get(request: Mapping[str, Any], place: str) -> Any:
    value: Any = request
    for part in place.split("."):
        value = value.get(part, {})
    return None if value == {} else value


def _put(request: dict[str, Any], place: str, value: Any) -> None:
    """Set a member of a request, or remove it with what is empty without it."""
    outer, _, inner = place.partition(".")
    if not inner:
        request[outer] = value
    else:
        request[outer] = {**request.get(outer, {}), inner: value}
        if value is None:
            del request[outer][inner]
    if request[outer] in (None, {}) or (outer == "CheckpointConfig" and value is None):
        del request[outer]
