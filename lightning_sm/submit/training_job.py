"""The arguments of CreateTrainingJob, which are those of ``lightning-sm submit --dry-run`` and of the service alike."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from lightning_sm.submit.job_file import InputChannel
from lightning_sm.submit.request import TrainingRequest

# As the SDKs name jobs; they end with milliseconds, which two submitters may share.
_TIME = "-%Y-%m-%d-%H-%M-%S-"
# Characters after the name that the job file gives.
NAME_ENDING_CHARS = len("-2026-11-26-23-59-59-") + 3


def new_job_name(start: str) -> str:
    """Return a name that no other job has.

    Args:
        start: The name in the job file.
    """
    return f"{start}{time.strftime(_TIME, time.gmtime())}{secrets.randbelow(16**3):03x}"


def training_job(plan: TrainingRequest, name: str, output: str) -> dict[str, Any]:
    """Build the arguments of CreateTrainingJob.

    Args:
        plan: The job, with the address of its code if it has any of its own.
        name: Name of the training job.
        output: S3 prefix for model and output.
    """
    job = plan.job
    algorithm = {"TrainingInputMode": "File", "TrainingImage": job.image}
    request = present(
        TrainingJobName=name,
        AlgorithmSpecification=present(**algorithm, MetricDefinitions=plan.metrics or None),
        RoleArn=job.role,
        HyperParameters=dict(plan.hyperparameters) or None,
        Environment=dict(job.environment),
        InputDataConfig=[_channel(name, channel) for name, channel in plan.channels.items()] or None,
        OutputDataConfig={"S3OutputPath": output},
        ResourceConfig={**_hosts(plan), "VolumeSizeInGB": job.volume_gb},
        StoppingCondition=present(
            MaxRuntimeInSeconds=job.max_run_s, MaxWaitTimeInSeconds=job.spot.max_wait_s if job.spot else None
        ),
        CheckpointConfig={"S3Uri": job.checkpoints} if job.checkpoints else None,
        EnableManagedSpotTraining=True if job.spot else None,
        # The service would start the profiler, which needs libraries in the image.
        ProfilerConfig={"DisableProfiler": True},
        Tags=[{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
    )
    return joined(request, job.request)


def joined(request: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with other members: those of structures are joined, lists are longer, other values are replaced.

    Args:
        request: Arguments of CreateTrainingJob, or a structure in them.
        more: What the job file's ``request`` says of it.
    """
    result = dict(request)
    for name, value in more.items():
        own = result.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            result[name] = joined(own, value)
        elif isinstance(own, list) and isinstance(value, list):
            result[name] = [*own, *value]
        else:
            result[name] = value
    return result


def _hosts(plan: TrainingRequest) -> dict[str, Any]:
    group = plan.single_group
    if group is None:
        return {
            "InstanceGroups": [
                {"InstanceGroupName": name, "InstanceType": group.instance_type, "InstanceCount": group.count}
                for name, group in plan.job.groups.items()
            ]
        }
    if plan.job.requested("ResourceConfig.InstancePreferences") is not None:
        return {}  # the service accepts one or the other
    return {"InstanceType": group.instance_type, "InstanceCount": group.count}


def _channel(name: str, channel: InputChannel) -> dict[str, Any]:
    source = present(
        S3DataType="S3Prefix",
        S3Uri=channel.uri,
        S3DataDistributionType=channel.distribution,
        InstanceGroupNames=channel.groups,
    )
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": channel.mode}


def present(**values: Any) -> dict[str, Any]:
    """Return the members of a request that have a value."""
    return {name: value for name, value in values.items() if value is not None}
