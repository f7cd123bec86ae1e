"""The request for a job, for both SDKs: everything is decided here, and the adapters only rename it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_sm.job.facts import CODE_CHANNEL
from lightning_sm.job.hyperparameters import encode
from lightning_sm.job.secret import new_secret
from lightning_sm.job.variables import MAX_RESTARTS, MODEL
from lightning_sm.job.yaml_file import read_mapping
from lightning_sm.submit.file_systems import file_system_folder
from lightning_sm.submit.job_file import Group, InputChannel, Job
from lightning_sm.submit.metric_patterns import metric_definitions
from lightning_sm.submit.mlflow import MLFLOW_TRACKING_URI

_CODE_DIR = f"/opt/ml/input/data/{CODE_CHANNEL}"
# Keys that local mode does not support, and that the script might miss.
_NOT_LOCAL = (
    "spot",
    "checkpoints",
    "tensorboard",
    "volume_kms_key",
    "output_kms_key",
    "training_plan",
    "network_isolation",
    "vpc",
    "tune",
)
# The SDK requires a role in local mode too, and never uses it.
_NO_ROLE = "arn:aws:iam::000000000000:role/local"


@dataclass(frozen=True)
class TrainingRequest:
    """A job, ready for either SDK.

    Attributes:
        job: The content of the job file.
        hyperparameters: JSON text by name, within the service's limit per value.
        metrics: Metric definitions.
        channels: Input channels. Either all of them name groups or none does, as the service requires.
    """

    job: Job
    hyperparameters: Mapping[str, str]
    metrics: list[dict[str, str]]
    channels: Mapping[str, InputChannel]

    @property
    def single_group(self) -> Group | None:
        """The group of an ordinary job; None if the job is heterogeneous."""
        return next(iter(self.job.groups.values())) if len(self.job.groups) == 1 else None

    def upload_code(self, session: Any) -> TrainingRequest:
        """Upload ``source_dir``, if there is one, and return the plan with a channel for it.

        The code goes below the job's output, or into the SDK's own bucket if the job names no output.

        Args:
            session: The SDK's session, of either version.
        """
        job = self.job
        if job.source_dir is None:
            return self
        # Two submissions may start in the same second.
        folder = f"{job.name}/code/{time.strftime('%Y-%m-%d-%H-%M-%S', time.gmtime())}-{secrets.token_hex(2)}"
        bucket, prefix = None, ""
        if job.output is not None:
            bucket, _, prefix = job.output.removeprefix("s3://").partition("/")
        key_prefix = "/".join(filter(None, (prefix.strip("/"), folder)))
        return self.with_code(session.upload_data(job.source_dir, bucket=bucket, key_prefix=key_prefix))

    def with_code(self, uri: str) -> TrainingRequest:
        """Return the plan with a channel for the user's code, which all hosts receive."""
        has_groups = any(channel.groups for channel in self.channels.values())
        code = InputChannel(uri, groups=list(self.job.groups) if has_groups else None)
        return replace(self, channels={**self.channels, CODE_CHANNEL: code})


def make_request(job: Job, hyperparameters: Mapping[str, str]) -> TrainingRequest:
    """Fill in what the job file left open, and give the hosts the variables that follow from it, and a new secret.

    Args:
        job: The content of the job file.
        hyperparameters: The result of ``encode_hyperparameters``.
    """
    has_groups = len(job.groups) > 1 and any(channel.groups for channel in job.channels.values())
    channels: dict[str, InputChannel] = {}
    for name, channel in job.channels.items():
        # All hosts mount a file system: its channel has no groups.
        takes_groups = has_groups and file_system_folder(channel.uri) is None
        groups = (channel.groups or list(job.groups)) if takes_groups else None
        channels[name] = replace(channel, groups=groups)
    model = {} if job.model == MODEL.default.value else {MODEL.name: job.model}
    restarts = {MAX_RESTARTS.name: str(job.max_restarts)} if job.max_restarts else {}
    mlflow = {} if job.mlflow is None else {MLFLOW_TRACKING_URI: job.mlflow}
    job = replace(job, environment={**new_secret(), **model, **restarts, **mlflow, **job.environment})
    metrics = list(job.metrics)
    objective = None if job.tune is None else job.tune.objective
    if objective is not None and objective not in {*job.metrics, *job.metric_patterns}:
        metrics.append(objective)
    return TrainingRequest(job, hyperparameters, metric_definitions(metrics, job.metric_patterns, objective), channels)


def encode_hyperparameters(job: Job) -> dict[str, str]:
    """Join the config file, the hyperparameters, the subcommand and the script, and encode them.

    Hyperparameters that override parts of the config file become options of their own, for example
    ``{"data": {"size": 3}}`` becomes ``data.size``: only the script knows how to merge them. Those that a tuning job
    chooses are left out.

    Raises:
        HyperparameterError: A name or a value cannot be passed on.
        JobConfigError: The config file cannot be read, or is not a mapping.
    """
    config: dict[str, Any] = {} if job.config is None else read_mapping(Path(job.config), "config")
    options: dict[str, Any] = dict(config)
    for name, value in job.hyperparameters.items():
        options |= _flat(name, value) if name in config else {name: value}
    # The launcher reads these two for code that comes with the job. SDK v3's own way would replace the image's entry
    # point with a shell.
    special = {
        "subcommand": job.subcommand,
        "sagemaker_program": job.script,
        "sagemaker_submit_directory": None if job.source_dir is None else _CODE_DIR,
    }
    options |= {name: value for name, value in special.items() if value is not None}
    tuned = set() if job.tune is None else set(job.tune.ranges)
    return encode({name: value for name, value in options.items() if name not in tuned})


def for_local_mode(job: Job, folder: Path) -> tuple[Job, list[str]]:
    """Remove what local mode does not support, and share this machine's CPUs among the hosts.

    Args:
        job: The content of the job file.
        folder: Receives model and output.

    Returns:
        The job for local mode, and a warning for each removed setting that the script might miss.
    """
    warnings = [f"{name} is ignored: local mode does not support it." for name in _NOT_LOCAL if getattr(job, name)]
    channels: dict[str, InputChannel] = {}
    for name, channel in job.channels.items():
        channels[name] = replace(channel, mode="File", distribution="FullyReplicated")
        if channels[name] != channel:
            warnings.append(
                f"channels.{name} is {channel.mode} and {channel.distribution}; local mode uses File and "
                "FullyReplicated."
            )
    local = replace(
        job,
        role=job.role or _NO_ROLE,
        channels=channels,
        output=folder.as_uri(),
        # PyTorch would start one thread per CPU in every container.
        environment={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // job.num_hosts)), **job.environment},
        spot=None,
        checkpoints=None,
        tensorboard=None,
        volume_kms_key=None,
        output_kms_key=None,
        training_plan=None,
        network_isolation=False,
        vpc=None,
        tune=None,
        keep_alive_s=None,
        max_retry_attempts=None,
    )
    return local, warnings


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(f"{name}.{key}", item)
    return flat
