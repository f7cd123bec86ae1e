"""SDK v3: ``ModelTrainer(...)`` and ``train(...)``."""

from __future__ import annotations

import secrets
from typing import Any

from sagemaker.core.config.config import load_sagemaker_config
from sagemaker.core.helper.iam_role_resolver import RoleValidationError
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.shapes import Channel, DataSource, FileSystemDataSource, InstanceGroup, S3DataSource, Tag
from sagemaker.train import ModelTrainer, configs
from sagemaker.train.model_trainer import Mode

from lightning_sm.errors import SubmitError
from lightning_sm.submit.file_systems import file_system_folder
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.request import TrainingRequest
from lightning_sm.submit.sdk.containers import entry_point
from lightning_sm.submit.sdk.version import without_telemetry


def submit(plan: TrainingRequest, boto_session: Any) -> str:
    """Start a job under a new name, and return the name.

    Raises:
        ClientError: The service rejects the request.
        SubmitError: The SDK found that the role lacks permissions.
    """
    session = Session(boto_session=boto_session, sagemaker_config=without_telemetry(load_sagemaker_config()))
    plan = plan.upload_code(session)
    job = plan.job
    try:
        trainer = ModelTrainer(**_trainer_arguments(plan), sagemaker_session=session)
    except RoleValidationError as error:
        raise SubmitError(f"role: {error}") from error
    if plan.metrics:
        trainer.with_metric_definitions(
            [configs.MetricDefinition(name=metric["Name"], regex=metric["Regex"]) for metric in plan.metrics]
        )
    if job.tensorboard is not None:
        trainer.with_tensorboard_output_config(configs.TensorBoardOutputConfig(s3_output_path=job.tensorboard))
    if job.max_retry_attempts is not None:
        trainer.with_retry_strategy(configs.RetryStrategy(maximum_retry_attempts=job.max_retry_attempts))
    if job.remote_debug:
        trainer.with_remote_debug_config(configs.RemoteDebugConfig(enable_remote_debug=True))
    trainer.train(input_data_config=_input_channels(plan) or None, wait=False, logs=False)
    # The SDK's documentation also reads the private attribute.
    return str(trainer._latest_training_job.training_job_name)


def run_locally(plan: TrainingRequest, root: str) -> None:
    """Run a job in local mode. Whether this raises says nothing about the job (see ``local_mode``).

    Args:
        plan: The job, adapted to local mode.
        root: Folder for everything that the SDK writes.
    """
    arguments = _trainer_arguments(plan) | {
        "compute": configs.Compute(instance_type="local_cpu", instance_count=plan.job.num_hosts),
        "output_data_config": None,
    }
    trainer = _LocalTrainer(**arguments, training_mode=Mode.LOCAL_CONTAINER, local_container_root=root)
    data = [
        configs.InputData(channel_name=name, data_source=channel.uri.removeprefix("file://"))
        for name, channel in plan.channels.items()
    ]
    trainer.train(input_data_config=data or None)


class _LocalTrainer(ModelTrainer):  # type: ignore[misc]  # the SDK is not typed here
    """A trainer that starts the image with the argument ``train``, as the service does.

    The SDK's local mode forgets the argument without source_code. With source_code it would replace the launcher with a
    shell: signals would not arrive, and hyperparameters with a dot in their names would be refused. Source:
    sagemaker-train 1.27, ``local/local_container.py``.
    """

    def _create_training_job_args(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        request: dict[str, Any] = super()._create_training_job_args(*args, **kwargs)
        request["algorithm_specification"].container_entrypoint = [*entry_point(self.training_image), "train"]
        return request


def _trainer_arguments(plan: TrainingRequest) -> dict[str, Any]:
    job = plan.job
    if plan.single_group is not None:
        hosts = {"instance_type": plan.single_group.instance_type, "instance_count": plan.single_group.count}
    else:
        groups = [
            InstanceGroup(instance_group_name=name, instance_type=group.instance_type, instance_count=group.count)
            for name, group in job.groups.items()
        ]
        hosts = {"instance_groups": groups}
    network = {"subnets": job.vpc.subnets, "security_group_ids": job.vpc.security_groups} if job.vpc else {}
    return {
        "training_image": job.image,
        "role": job.role,
        # The SDK appends the time in seconds, and the service rejects a name that exists.
        "base_job_name": f"{job.name}-{secrets.token_hex(2)}",
        "compute": configs.Compute(
            **hosts,
            volume_size_in_gb=job.volume_gb,
            enable_managed_spot_training=True if job.spot else None,
            **_without_none(
                keep_alive_period_in_seconds=job.keep_alive_s,
                volume_kms_key_id=job.volume_kms_key,
                training_plan_arn=job.training_plan,
            ),
        ),
        "stopping_condition": configs.StoppingCondition(
            max_runtime_in_seconds=job.max_run_s,
            **_without_none(max_wait_time_in_seconds=job.spot.max_wait_s if job.spot else None),
        ),
        "hyperparameters": dict(plan.hyperparameters),
        "environment": dict(job.environment),
        "output_data_config": _output(job),
        "checkpoint_config": configs.CheckpointConfig(s3_uri=job.checkpoints) if job.checkpoints else None,
        "networking": configs.Networking(
            **network,
            enable_inter_container_traffic_encryption=job.encrypt_between_hosts,
            **_without_none(enable_network_isolation=job.network_isolation or None),
        ),
        "tags": [Tag(key=key, value=value) for key, value in job.tags.items()] or None,
    }


def _input_channels(plan: TrainingRequest) -> list[Channel]:
    channels: list[Channel] = []
    for name, channel in plan.channels.items():
        folder = file_system_folder(channel.uri)
        if folder is not None:
            mounted = FileSystemDataSource(
                file_system_id=folder.file_system_id,
                file_system_type=folder.kind,
                directory_path=folder.path,
                file_system_access_mode=channel.access,
            )
            settings: dict[str, Any] = {"data_source": DataSource(file_system_data_source=mounted)}
        else:
            source = S3DataSource(
                s3_data_type="S3Prefix",
                s3_uri=channel.uri,
                s3_data_distribution_type=channel.distribution,
                **_without_none(instance_group_names=channel.groups),
            )
            settings = {"data_source": DataSource(s3_data_source=source), "input_mode": channel.mode}
        channels.append(Channel(channel_name=name, **settings, **_without_none(content_type=channel.content_type)))
    return channels


def _output(job: Job) -> Any:
    if job.output is None:
        return None
    return configs.OutputDataConfig(s3_output_path=job.output, **_without_none(kms_key_id=job.output_kms_key))


def _without_none(**values: Any) -> dict[str, Any]:
    """Drop arguments that are None: the SDK treats None and a missing argument differently."""
    return {name: value for name, value in values.items() if value is not None}
