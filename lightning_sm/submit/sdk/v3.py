"""SDK v3: ``ModelTrainer(...)`` and ``train(...)``."""

from __future__ import annotations

import secrets
from typing import Any

from sagemaker.core.config.config import load_sagemaker_config
from sagemaker.core.helper.iam_role_resolver import RoleValidationError
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.shapes import Channel, DataSource, InstanceGroup, S3DataSource, Tag
from sagemaker.train import ModelTrainer, configs
from sagemaker.train.model_trainer import Mode

from lightning_sm.errors import SubmitError
from lightning_sm.submit.job_file import Channel as ChannelSpec
from lightning_sm.submit.plan import Plan
from lightning_sm.submit.sdk.containers import entry_point
from lightning_sm.submit.sdk.version import code_location, without_telemetry


class Submission:
    """A plan and the session that it is submitted with.

    Args:
        plan: The job.
        boto_session: Credentials and region.
    """

    def __init__(self, plan: Plan, boto_session: Any) -> None:
        config = without_telemetry(load_sagemaker_config())
        self._plan = plan
        self._session = Session(boto_session=boto_session, sagemaker_config=config)

    def submit(self) -> str:
        """Start the job under a new name, and return the name.

        Raises:
            ClientError: The service refuses the request.
        """
        plan = self._plan
        if plan.job.source_dir is not None:
            plan = plan.with_code(self._session.upload_data(plan.job.source_dir, **code_location(plan.job)))
        try:
            trainer = ModelTrainer(**trainer_arguments(plan), sagemaker_session=self._session)
        except RoleValidationError as error:
            raise SubmitError(f"role: {error}") from error
        _add_settings(trainer, plan)
        trainer.train(input_data_config=input_channels(plan) or None, wait=False, logs=False)
        # The SDK's documentation, too, gets at the job this way.
        return str(trainer._latest_training_job.training_job_name)


def run_locally(plan: Plan, root: str) -> None:
    """Run the job in local mode; what this raises or not says nothing about the job (see ``local_mode``).

    Args:
        plan: The job, made for local mode.
        root: Folder for everything that the SDK writes.
    """
    arguments = trainer_arguments(plan) | {
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
    """Starts the image as the service does: with ``train``, which the SDK's local mode forgets without source_code.

    With it, the SDK would put a shell in the place of the launcher: signals would not arrive, and hyperparameters with
    a dot in their names would be refused. Source: sagemaker-train 1.27, ``local/local_container.py``.
    """

    def _create_training_job_args(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        request: dict[str, Any] = super()._create_training_job_args(*args, **kwargs)
        request["algorithm_specification"].container_entrypoint = [*entry_point(self.training_image), "train"]
        return request


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """Name everything as ``ModelTrainer`` does.

    Args:
        plan: The job.
    """
    job = plan.job
    return {
        "training_image": job.image,
        "role": job.role,
        # The SDK adds the time in seconds, and a service that knows a name refuses it.
        "base_job_name": f"{job.name}-{secrets.token_hex(2)}",
        "compute": configs.Compute(
            **_hosts(plan),
            volume_size_in_gb=job.volume_gb,
            enable_managed_spot_training=True if job.spot else None,
            **_given(keep_alive_period_in_seconds=job.keep_alive_s),
        ),
        "stopping_condition": configs.StoppingCondition(
            max_runtime_in_seconds=job.max_run_s,
            **_given(max_wait_time_in_seconds=job.spot.max_wait_s if job.spot else None),
        ),
        "hyperparameters": dict(plan.hyperparameters),
        "environment": dict(job.environment),
        "output_data_config": configs.OutputDataConfig(s3_output_path=job.output) if job.output else None,
        "checkpoint_config": configs.CheckpointConfig(s3_uri=job.checkpoints) if job.checkpoints else None,
        "networking": configs.Networking(
            **_given(
                subnets=job.vpc.subnets if job.vpc else None,
                security_group_ids=job.vpc.security_groups if job.vpc else None,
            ),
            enable_inter_container_traffic_encryption=job.encrypt_between_hosts,
        ),
        "tags": [Tag(key=key, value=value) for key, value in job.tags.items()] or None,
    }


def input_channels(plan: Plan) -> list[Channel]:
    """Name the channels as ``train`` does.

    Args:
        plan: The job.
    """
    return [_channel(name, channel) for name, channel in plan.channels.items()]


def _channel(name: str, channel: ChannelSpec) -> Channel:
    source = S3DataSource(
        s3_data_type="S3Prefix",
        s3_uri=channel.uri,
        s3_data_distribution_type=channel.distribution,
        **_given(instance_group_names=channel.groups),
    )
    return Channel(
        channel_name=name,
        data_source=DataSource(s3_data_source=source),
        input_mode=channel.mode,
        **_given(content_type=channel.content_type),
    )


def _add_settings(trainer: ModelTrainer, plan: Plan) -> None:
    job = plan.job
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


def _hosts(plan: Plan) -> dict[str, Any]:
    if plan.single_group is not None:
        return {"instance_type": plan.single_group.instance_type, "instance_count": plan.single_group.count}
    groups = [
        InstanceGroup(instance_group_name=name, instance_type=group.instance_type, instance_count=group.count)
        for name, group in plan.job.groups.items()
    ]
    return {"instance_groups": groups}


def _given(**values: Any) -> dict[str, Any]:
    """Only what is set: the SDK tells None from nothing."""
    return {name: value for name, value in values.items() if value is not None}
