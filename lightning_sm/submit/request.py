"""A job, ready to be sent: everything that the job file leaves open is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_sm.job.facts import CODE_CHANNEL, CODE_CHANNEL_DIR
from lightning_sm.job.hyperparameters import encode
from lightning_sm.job.secret import new_secret
from lightning_sm.job.variables import MAX_RESTARTS, MODEL
from lightning_sm.job.yaml_file import read_mapping
from lightning_sm.submit.job_file import Group, InputChannel, Job
from lightning_sm.submit.metric_patterns import metric_definitions
from lightning_sm.submit.source_archive import ARCHIVE_NAME


@dataclass(frozen=True)
class TrainingRequest:
    """A job, ready for the service or for containers on this machine.

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

    def with_image(self, image: str) -> TrainingRequest:
        """Return the plan with another name of its image."""
        return replace(self, job=replace(self.job, image=image))

    def with_code(self, archive: str) -> TrainingRequest:
        """Return the plan with the job's own code, which each host's launcher fetches before it starts the script.

        Hosts without a network cannot: they receive the archive as a channel, as from SDK v2.

        Args:
            archive: Its address in S3.
        """
        if self.job.requested("EnableNetworkIsolation"):
            return self.with_code_channel(archive, f"{CODE_CHANNEL_DIR}/{ARCHIVE_NAME}")
        return self._with_submit_directory(archive)

    def with_code_channel(self, uri: str, place: str = CODE_CHANNEL_DIR) -> TrainingRequest:
        """Return the plan with a channel for the job's own code, which all hosts receive.

        Args:
            uri: Address of the code.
            place: Its path on the hosts: the channel's folder, or the archive in it.
        """
        has_groups = any(channel.groups for channel in self.channels.values())
        code = InputChannel(uri, groups=list(self.job.groups) if has_groups else None)
        return replace(self, channels={**self.channels, CODE_CHANNEL: code})._with_submit_directory(place)

    def _with_submit_directory(self, place: str) -> TrainingRequest:
        return replace(self, hyperparameters={**self.hyperparameters, **encode({"sagemaker_submit_directory": place})})


def make_request(job: Job, hyperparameters: Mapping[str, str]) -> TrainingRequest:
    """Fill in what the job file left open, and give the hosts the variables that follow from it, and a new secret.

    Args:
        job: The content of the job file.
        hyperparameters: The result of ``encode_hyperparameters``.
    """
    has_groups = len(job.groups) > 1 and any(channel.groups for channel in job.channels.values())
    channels: dict[str, InputChannel] = {}
    for name, channel in job.channels.items():
        groups = (channel.groups or list(job.groups)) if has_groups else None
        channels[name] = replace(channel, groups=groups)
    model = {} if job.model == MODEL.default.value else {MODEL.name: job.model}
    restarts = {MAX_RESTARTS.name: str(job.max_restarts)} if job.max_restarts else {}
    job = replace(job, environment={**new_secret(), **model, **restarts, **job.environment})
    metrics = list(job.metrics)
    objective = None if job.tune is None else job.tune.objective
    if objective is not None and objective not in {*job.metrics, *job.metric_patterns}:
        metrics.append(objective)
    return TrainingRequest(job, hyperparameters, metric_definitions(metrics, job.metric_patterns, objective), channels)


def encode_hyperparameters(job: Job) -> dict[str, str]:
    """Join the config file, the hyperparameters, the subcommand and the script, and encode them.

    Raises:
        HyperparameterError: A name or a value cannot be passed on.
        JobConfigError: The config file cannot be read, or is not a mapping.
    """
    return encode(script_options(job))


def script_options(job: Job) -> dict[str, Any]:
    """Join the config file, the hyperparameters, the subcommand and the script.

    Hyperparameters that override parts of the config file become options of their own, for example
    ``{"data": {"size": 3}}`` becomes ``data.size``: only the script knows how to merge them. Those that a tuning job
    chooses are left out.

    Raises:
        JobConfigError: The config file cannot be read, or is not a mapping.
    """
    config: dict[str, Any] = {} if job.config is None else read_mapping(Path(job.config), "config")
    options: dict[str, Any] = dict(config)
    for name, value in job.hyperparameters.items():
        options |= _flat(name, value) if name in config else {name: value}
    special = {"subcommand": job.subcommand, "sagemaker_program": job.script}
    options |= {name: value for name, value in special.items() if value is not None}
    tuned = set() if job.tune is None else set(job.tune.ranges)
    return {name: value for name, value in options.items() if name not in tuned}


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(f"{name}.{key}", item)
    return flat
