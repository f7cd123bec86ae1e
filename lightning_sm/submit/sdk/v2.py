"""SDK v2: ``Estimator(...)`` and ``fit(...)``."""

from __future__ import annotations

from typing import Any

from sagemaker.config import load_sagemaker_config
from sagemaker.debugger import TensorBoardOutputConfig
from sagemaker.estimator import Estimator
from sagemaker.inputs import TrainingInput
from sagemaker.instance_group import InstanceGroup
from sagemaker.session import Session

from lightning_sm.submit.plan import Plan
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
        estimator = Estimator(**estimator_arguments(plan), sagemaker_session=self._session)
        # The SDK's own waiting swallows Ctrl-C.
        estimator.fit(training_inputs(plan) or None, wait=False)
        return str(estimator.latest_training_job.name)


def run_locally(plan: Plan, root: str) -> None:
    """Run the job in local mode; what this raises or not says nothing about the job (see ``local_mode``).

    Args:
        plan: The job, made for local mode.
        root: Folder for everything that the SDK writes.
    """
    from lightning_sm.submit.sdk.v2_local_session import HeterogeneousLocalSession  # noqa: PLC0415 - needs sagemaker[local]

    session = HeterogeneousLocalSession()
    session.config = {"local": {"local_code": True, "container_root": root}}
    Estimator(**estimator_arguments(plan), sagemaker_session=session).fit(training_inputs(plan) or None)


def estimator_arguments(plan: Plan) -> dict[str, Any]:
    """Name everything as ``Estimator`` does.

    Args:
        plan: The job.
    """
    job = plan.job
    return {
        "image_uri": job.image,
        "role": job.role,
        "base_job_name": job.name,
        **_hosts(plan),
        "volume_size": job.volume_gb,
        "keep_alive_period_in_seconds": job.keep_alive_s,
        "hyperparameters": dict(plan.hyperparameters),
        "environment": dict(job.environment),
        "metric_definitions": plan.metrics or None,
        "output_path": job.output,
        "checkpoint_s3_uri": job.checkpoints,
        "tensorboard_output_config": None if job.tensorboard is None else TensorBoardOutputConfig(job.tensorboard),
        "max_run": job.max_run_s,
        "use_spot_instances": job.spot is not None,
        "max_wait": None if job.spot is None else job.spot.max_wait_s,
        "max_retry_attempts": job.max_retry_attempts,
        "encrypt_inter_container_traffic": job.encrypt_between_hosts or None,
        "subnets": None if job.vpc is None else job.vpc.subnets,
        "security_group_ids": None if job.vpc is None else job.vpc.security_groups,
        "tags": [{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
        "enable_remote_debug": job.remote_debug or None,
        # Debugger and profiler need libraries in the image, and know no instance groups.
        "debugger_hook_config": False,
        "disable_profiler": True,
    }


def training_inputs(plan: Plan) -> dict[str, TrainingInput]:
    """Name the channels as ``fit`` does.

    Args:
        plan: The job.
    """
    return {
        name: TrainingInput(
            channel.uri,
            distribution=channel.distribution,
            content_type=channel.content_type,
            input_mode=channel.mode,
            instance_groups=channel.groups,
        )
        for name, channel in plan.channels.items()
    }


def _hosts(plan: Plan) -> dict[str, Any]:
    if plan.single_group is not None:
        return {"instance_type": plan.single_group.instance_type, "instance_count": plan.single_group.count}
    groups = plan.job.groups.items()
    return {"instance_groups": [InstanceGroup(name, group.instance_type, group.count) for name, group in groups]}
