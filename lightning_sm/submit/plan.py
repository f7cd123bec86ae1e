"""From a job file to what both SDKs need: everything is decided here, and only renamed there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_sm.errors import HyperparameterError
from lightning_sm.job.facts import CODE_CHANNEL, InstanceGroup, SageMakerJob
from lightning_sm.job.hyperparameters import encode
from lightning_sm.job.topology import Topology
from lightning_sm.submit.job_file import Channel, Group, Job
from lightning_sm.submit.metric_patterns import metric_definitions

_CODE_DIR = f"/opt/ml/input/data/{CODE_CHANNEL}"
DATA_GROUPS_VARIABLE = "LIGHTNING_SM_DATA_GROUPS"
# The SDK asks for a role in local mode, too, and never uses it.
_NO_ROLE = "arn:aws:iam::000000000000:role/local"


@dataclass(frozen=True)
class Plan:
    """A job, ready for either SDK.

    Attributes:
        job: What the file says.
        hyperparameters: Text by name, in JSON, within the service's limits per value.
        metrics: Metric definitions.
        channels: Input channels; with groups for all of them or for none, as the service wants it.
    """

    job: Job
    hyperparameters: Mapping[str, str]
    metrics: list[dict[str, str]]
    channels: Mapping[str, Channel]

    @property
    def single_group(self) -> Group | None:
        """The group of an ordinary job; None if the job is heterogeneous."""
        return next(iter(self.job.groups.values())) if len(self.job.groups) == 1 else None

    def with_code(self, uri: str) -> Plan:
        """The plan with a channel for the user's code, which all hosts get.

        Args:
            uri: Where the code is.
        """
        has_groups = any(channel.groups for channel in self.channels.values())
        code = Channel(uri, groups=list(self.job.groups) if has_groups else None)
        return replace(self, channels={**self.channels, CODE_CHANNEL: code})


def make_plan(job: Job, hyperparameters: Mapping[str, str]) -> Plan:
    """Fill in what the file left open.

    Args:
        job: What the file says.
        hyperparameters: What ``encode_hyperparameters`` made of it.
    """
    has_groups = len(job.groups) > 1 and any(channel.groups for channel in job.channels.values())
    return Plan(
        job=job,
        hyperparameters=hyperparameters,
        metrics=metric_definitions(job.metrics, job.metric_patterns),
        channels={
            name: replace(channel, groups=(channel.groups or list(job.groups)) if has_groups else None)
            for name, channel in job.channels.items()
        },
    )


def encode_hyperparameters(job: Job) -> dict[str, str]:
    """Join the config file, the hyperparameters, the subcommand and the script, and encode them.

    What overrides the config file becomes options of its own, ``{"data": {"size": 3}}`` thus ``data.size``: only the
    script knows how to merge them.

    Args:
        job: What the file says.

    Raises:
        HyperparameterError: A name or a value cannot be passed on, or the config file holds no names and values.
    """
    config: dict[str, Any] = {} if job.config is None else _read_config(Path(job.config))
    options: dict[str, Any] = dict(config)
    for name, value in job.hyperparameters.items():
        options |= _flat(name, value) if name in config else {name: value}
    # What the launcher takes for code that came with the job: SDK v3's own way replaces the entry point by a shell.
    special = {
        "subcommand": job.subcommand,
        "sagemaker_program": job.script,
        "sagemaker_submit_directory": None if job.source_dir is None else _CODE_DIR,
    }
    return encode(options | {name: value for name, value in special.items() if value is not None})


def data_groups(job: Job) -> list[str]:
    """Names of the groups whose hosts make batches, by the same rule as in the job.

    Args:
        job: What the file says.

    Raises:
        TopologyError: No group trains, training groups have different accelerators, or a named group does not exist.
    """
    stated = job.environment.get(DATA_GROUPS_VARIABLE)
    # One host for each: the rules are about types and names.
    groups = tuple(InstanceGroup(name, (name,), group.instance_type) for name, group in job.groups.items())
    hosts = tuple(job.groups)
    names = None if stated is None else tuple(filter(None, (name.strip() for name in stated.split(","))))
    topology = Topology.from_job(SageMakerJob(hosts[0], hosts, groups, "the job file", data_groups=names))
    return [name for name in job.groups if name in topology.data_hosts]


def for_local_mode(job: Job, folder: Path) -> tuple[Job, list[str]]:
    """Leave out what local mode refuses, and share this machine's CPUs among the hosts.

    Args:
        job: What the file says.
        folder: Where model and output go.

    Returns:
        The job for local mode, and a warning for each thing left out that the script might miss.
    """
    dropped = {"spot": job.spot, "checkpoints": job.checkpoints, "tensorboard": job.tensorboard, "vpc": job.vpc}
    warnings = [f"{name}: local mode has none; left out." for name, value in dropped.items() if value is not None]
    for name, channel in job.channels.items():
        if (channel.mode, channel.distribution) != ("File", "FullyReplicated"):
            warnings.append(f"channels.{name}: local mode copies all files (File, FullyReplicated).")
    local = replace(
        job,
        role=job.role or _NO_ROLE,
        channels={
            name: replace(channel, mode="File", distribution="FullyReplicated")
            for name, channel in job.channels.items()
        },
        output=folder.as_uri(),
        # PyTorch would start one thread per CPU in every container.
        environment={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // job.num_hosts)), **job.environment},
        spot=None,
        checkpoints=None,
        tensorboard=None,
        vpc=None,
        keep_alive_s=None,
        max_retry_attempts=None,
    )
    return local, warnings


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise HyperparameterError(f"config {path}: {error}") from error
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise HyperparameterError(f"config {path}: expected names and values, got {type(config).__name__}.")
    return config


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {path: leaf for key, item in value.items() for path, leaf in _flat(f"{name}.{key}", item).items()}
