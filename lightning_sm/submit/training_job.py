"""The arguments of CreateTrainingJob, as sent to the service and printed by ``lightning-sm submit --dry-run``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_sm.job.host_keys import new_secret
from lightning_sm.job.hyperparameters import encode
from lightning_sm.job.variables import MAX_RESTARTS
from lightning_sm.job.yaml_file import read_mapping
from lightning_sm.record.progress_metrics import metric_pattern, objective_pattern
from lightning_sm.submit.job_file import InputChannel, Job

# The SDKs' job-name format without milliseconds, which two jobs might share; ``new_job_name`` adds random digits.
_TIME = "-%Y-%m-%d-%H-%M-%S-"
# The maximum length of ``name`` in a job file, as enforced by ``preflight``; the service limits the whole name to 63
# characters.
MAX_NAME_CHARS = 63 - len("-2026-11-26-23-59-59-") - 3


def new_job_name(start: str) -> str:
    """Return a unique job name.

    Args:
        start: The name in the job file.
    """
    return f"{start}{time.strftime(_TIME, time.gmtime())}{secrets.randbelow(16**3):03x}"


def prepared(job: Job) -> Job:
    """Return a copy of a job with all environment variables for its hosts, including a new secret.

    In the copy, either all channels name groups or none do, as the service requires.
    """
    has_groups = len(job.groups) > 1 and any(channel.groups for channel in job.channels.values())
    channels = {
        name: replace(channel, groups=(channel.groups or list(job.groups)) if has_groups else None)
        for name, channel in job.channels.items()
    }
    restarts = {MAX_RESTARTS.name: str(job.max_restarts)} if job.max_restarts else {}
    return replace(job, channels=channels, environment={**new_secret(), **restarts, **job.environment})


def config_of(job: Job) -> dict[str, Any]:
    """Return the content of the config file, or an empty mapping if there is none.

    Raises:
        JobConfigError: The file cannot be read, or is not a mapping.
    """
    return {} if job.config is None else read_mapping(Path(job.config), "config")


def script_options(job: Job) -> dict[str, Any]:
    """Merge the config file, the hyperparameters and the script into the options of the script.

    Hyperparameters that override parts of the config file become separate options, because only the script can merge
    them: ``{"data": {"size": 3}}`` becomes ``data.size``. Hyperparameters chosen by a tuning job are left out.

    Raises:
        JobConfigError: The config file cannot be read, or is not a mapping.
    """
    config = config_of(job)
    options = dict(config)
    for name, value in job.hyperparameters.items():
        options |= _flat(name, value) if name in config else {name: value}
    if job.script is not None:
        options["sagemaker_program"] = job.script
    tuned = set() if job.tune is None else set(job.tune.ranges)
    return {name: value for name, value in options.items() if name not in tuned}


def metric_definitions(names: Iterable[str], objective: str | None = None) -> list[dict[str, str]]:
    """Build the metric definitions that extract metrics from the log for CloudWatch.

    Args:
        names: Metrics as LineProgress prints them (``record/progress_metrics.py``).
        objective: The metric that a tuning job optimizes, which is read once per validation.
    """
    regexes = {name: metric_pattern(name) for name in names}
    if objective is not None:
        regexes[objective] = objective_pattern(objective)
    return [{"Name": name, "Regex": regex} for name, regex in regexes.items()]


def training_job(job: Job, name: str, output: str, code: str | None = None) -> dict[str, Any]:
    """Build the arguments of CreateTrainingJob.

    Args:
        job: The job, ``prepared``.
        name: Name of the training job.
        output: S3 prefix for the model and output.
        code: S3 address of the job's code archive, if there is one.

    Raises:
        HyperparameterError: A hyperparameter's name or value cannot be passed on.
        JobConfigError: The config file cannot be read, or is not a mapping.
    """
    code_option = {} if code is None else {"sagemaker_submit_directory": code}
    metrics = metric_definitions(job.metrics, None if job.tune is None else job.tune.objective)
    algorithm = {"TrainingInputMode": "File", "TrainingImage": job.image}
    request = present(
        TrainingJobName=name,
        AlgorithmSpecification=present(**algorithm, MetricDefinitions=metrics or None),
        RoleArn=job.role,
        HyperParameters=encode({**script_options(job), **code_option}) or None,
        Environment=dict(job.environment),
        InputDataConfig=[_channel(name, channel) for name, channel in job.channels.items()] or None,
        OutputDataConfig={"S3OutputPath": output},
        ResourceConfig={**_hosts(job), "VolumeSizeInGB": job.volume_gb},
        StoppingCondition=present(
            MaxRuntimeInSeconds=job.max_run_s, MaxWaitTimeInSeconds=job.spot.max_wait_s if job.spot else None
        ),
        CheckpointConfig={"S3Uri": job.checkpoints} if job.checkpoints else None,
        EnableManagedSpotTraining=True if job.spot else None,
        # By default, the service starts the profiler, which needs libraries in the image.
        ProfilerConfig={"DisableProfiler": True},
        Tags=[{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
    )
    return joined(request, job.request)


def joined(request: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with additional members: structures are merged, lists extended, and other values replaced.

    Args:
        request: Arguments of CreateTrainingJob, or a structure in them.
        more: The corresponding part of the job file's ``request``.
    """
    result = dict(request)
    for name, value in more.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[name] = joined(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            result[name] = [*old, *value]
        else:
            result[name] = value
    return result


def present(**values: Any) -> dict[str, Any]:
    """Return the members of a request that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(f"{name}.{key}", item)
    return flat


def _hosts(job: Job) -> dict[str, Any]:
    if len(job.groups) > 1:
        return {
            "InstanceGroups": [
                {"InstanceGroupName": name, "InstanceType": group.instance_type, "InstanceCount": group.count}
                for name, group in job.groups.items()
            ]
        }
    if job.requested("ResourceConfig.InstancePreferences") is not None:
        return {}  # the service accepts one or the other
    (group,) = job.groups.values()
    return {"InstanceType": group.instance_type, "InstanceCount": group.count}


def _channel(name: str, channel: InputChannel) -> dict[str, Any]:
    source = present(
        S3DataType="S3Prefix",
        S3Uri=channel.uri,
        S3DataDistributionType=channel.distribution,
        InstanceGroupNames=channel.groups,
    )
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": channel.mode}
