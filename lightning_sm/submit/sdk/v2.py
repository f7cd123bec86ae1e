"""SDK v2: ``Estimator(...)`` and ``fit(...)``."""

from __future__ import annotations

from typing import Any

from sagemaker.config import load_sagemaker_config
from sagemaker.debugger import TensorBoardOutputConfig
from sagemaker.estimator import Estimator
from sagemaker.inputs import FileSystemInput, TrainingInput
from sagemaker.instance_group import InstanceGroup
from sagemaker.session import Session

from lightning_sm.submit.file_systems import file_system_folder
from lightning_sm.submit.job_file import InputChannel
from lightning_sm.submit.request import TrainingRequest
from lightning_sm.submit.sdk.version import without_telemetry


def submit(plan: TrainingRequest, boto_session: Any) -> str:
    """Start a job under a new name, and return the name.

    Raises:
        ClientError: The service rejects the request.
    """
    session = Session(boto_session=boto_session, sagemaker_config=without_telemetry(load_sagemaker_config()))
    plan = plan.upload_code(session)
    estimator = Estimator(**_estimator_arguments(plan), sagemaker_session=session)
    # With wait=True the SDK swallows Ctrl-C.
    estimator.fit(_training_inputs(plan) or None, wait=False)
    return str(estimator.latest_training_job.name)


def run_locally(plan: TrainingRequest, root: str) -> None:
    """Run a job in local mode. Whether this raises says nothing about the job (see ``local_mode``).

    Args:
        plan: The job, adapted to local mode.
        root: Folder for everything that the SDK writes.
    """
    from lightning_sm.submit.sdk.v2_local_session import HeterogeneousLocalSession  # noqa: PLC0415 - needs sagemaker[local]

    session = HeterogeneousLocalSession()
    session.config = {"local": {"local_code": True, "container_root": root}}
    Estimator(**_estimator_arguments(plan), sagemaker_session=session).fit(_training_inputs(plan) or None)


def _estimator_arguments(plan: TrainingRequest) -> dict[str, Any]:
    job = plan.job
    if plan.single_group is not None:
        hosts = {"instance_type": plan.single_group.instance_type, "instance_count": plan.single_group.count}
    else:
        groups = [InstanceGroup(name, group.instance_type, group.count) for name, group in job.groups.items()]
        hosts = {"instance_groups": groups}
    return {
        "image_uri": job.image,
        "role": job.role,
        "base_job_name": job.name,
        **hosts,
        "volume_size": job.volume_gb,
        "volume_kms_key": job.volume_kms_key,
        "output_kms_key": job.output_kms_key,
        "training_plan": job.training_plan,
        "keep_alive_period_in_seconds": job.keep_alive_s,
        "hyperparameters": dict(plan.hyperparameters),
        "environment": dict(job.environment),
        "metric_definitions": plan.metrics or None,
        "output_path": job.output,
        "checkpoint_s3_uri": job.checkpoints,
        "tensorboard_output_config": TensorBoardOutputConfig(job.tensorboard) if job.tensorboard else None,
        "max_run": job.max_run_s,
        "use_spot_instances": job.spot is not None,
        "max_wait": job.spot.max_wait_s if job.spot else None,
        "max_retry_attempts": job.max_retry_attempts,
        "encrypt_inter_container_traffic": job.encrypt_between_hosts or None,
        "enable_network_isolation": job.network_isolation or None,
        "subnets": job.vpc.subnets if job.vpc else None,
        "security_group_ids": job.vpc.security_groups if job.vpc else None,
        "tags": [{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
        "enable_remote_debug": job.remote_debug or None,
        # Debugger and profiler need libraries in the image, and do not support instance groups.
        "debugger_hook_config": False,
        "disable_profiler": True,
    }


def _training_inputs(plan: TrainingRequest) -> dict[str, TrainingInput | FileSystemInput]:
    return {name: _training_input(channel) for name, channel in plan.channels.items()}


def _training_input(channel: InputChannel) -> TrainingInput | FileSystemInput:
    folder = file_system_folder(channel.uri)
    if folder is not None:
        return FileSystemInput(
            folder.file_system_id, folder.kind, folder.path, channel.access, content_type=channel.content_type
        )
    return TrainingInput(
        channel.uri,
        distribution=channel.distribution,
        content_type=channel.content_type,
        input_mode=channel.mode,
        instance_groups=channel.groups,
    )
