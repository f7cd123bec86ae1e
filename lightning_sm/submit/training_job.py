"""The arguments of CreateTrainingJob, which are those of ``lightning-sm submit --dry-run`` and of the service alike."""

from __future__ import annotations

import secrets
import time
from typing import Any

from lightning_sm.submit.file_systems import file_system_folder
from lightning_sm.submit.job_file import InputChannel
from lightning_sm.submit.mlflow import mlflow_config
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
    return present(
        TrainingJobName=name,
        AlgorithmSpecification=present(**algorithm, MetricDefinitions=plan.metrics or None),
        RoleArn=job.role,
        HyperParameters=dict(plan.hyperparameters) or None,
        Environment=dict(job.environment),
        InputDataConfig=[_channel(name, channel) for name, channel in plan.channels.items()] or None,
        OutputDataConfig=present(S3OutputPath=output, KmsKeyId=job.output_kms_key),
        ResourceConfig=_resources(plan),
        StoppingCondition=present(
            MaxRuntimeInSeconds=job.max_run_s,
            MaxWaitTimeInSeconds=job.spot.max_wait_s if job.spot else None,
            MaxPendingTimeInSeconds=job.max_pending_s,
        ),
        CheckpointConfig={"S3Uri": job.checkpoints} if job.checkpoints else None,
        TensorBoardOutputConfig={"S3OutputPath": job.tensorboard} if job.tensorboard else None,
        RetryStrategy=(None if job.max_retry_attempts is None else {"MaximumRetryAttempts": job.max_retry_attempts}),
        VpcConfig={"Subnets": job.vpc.subnets, "SecurityGroupIds": job.vpc.security_groups} if job.vpc else None,
        EnableManagedSpotTraining=True if job.spot else None,
        EnableInterContainerTrafficEncryption=job.encrypt_between_hosts or None,
        EnableNetworkIsolation=job.network_isolation or None,
        InfraCheckConfig={"EnableInfraCheck": True} if job.infra_check else None,
        MlflowConfig=mlflow_config(job),
        RemoteDebugConfig={"EnableRemoteDebug": True} if job.remote_debug else None,
        # The service would start the profiler, which needs libraries in the image.
        ProfilerConfig={"DisableProfiler": True},
        Tags=[{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
    )


def _resources(plan: TrainingRequest) -> dict[str, Any]:
    job = plan.job
    group = plan.single_group
    if group is not None and group.alternatives:
        wanted = {group.instance_type: group.count, **group.alternatives}
        hosts: dict[str, Any] = {
            "InstancePreferences": [{"InstanceType": one, "InstanceCount": count} for one, count in wanted.items()]
        }
    elif group is not None:
        hosts = {"InstanceType": group.instance_type, "InstanceCount": group.count}
    else:
        hosts = {
            "InstanceGroups": [
                {"InstanceGroupName": name, "InstanceType": group.instance_type, "InstanceCount": group.count}
                for name, group in job.groups.items()
            ]
        }
    return present(
        **hosts,
        VolumeSizeInGB=job.volume_gb,
        VolumeKmsKeyId=job.volume_kms_key,
        KeepAlivePeriodInSeconds=job.keep_alive_s,
        TrainingPlanArn=job.training_plan,
    )


def _channel(name: str, channel: InputChannel) -> dict[str, Any]:
    folder = file_system_folder(channel.uri)
    if folder is not None:
        source: dict[str, Any] = {
            "FileSystemDataSource": {
                "FileSystemId": folder.file_system_id,
                "FileSystemType": folder.kind,
                "DirectoryPath": folder.path,
                "FileSystemAccessMode": channel.access,
            }
        }
    else:
        source = {
            "S3DataSource": present(
                S3DataType="S3Prefix",
                S3Uri=channel.uri,
                S3DataDistributionType=channel.distribution,
                InstanceGroupNames=channel.groups,
            )
        }
    return present(
        ChannelName=name,
        DataSource=source,
        ContentType=channel.content_type,
        InputMode=channel.mode if folder is None else None,
    )


def present(**values: Any) -> dict[str, Any]:
    """Return the members of a request that have a value."""
    return {name: value for name, value in values.items() if value is not None}
