"""A job file on this machine: an emulated cluster whose hosts are containers of the job's image."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from lightning_sm._log import command_logger
from lightning_sm.cloud.aws import Clients, new_session
from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.container_hosts import CODE_DIR, ContainerRuntime
from lightning_sm.emulator.faults import FaultSettings
from lightning_sm.emulator.run_folders import default_parent, remove_old_runs
from lightning_sm.emulator.runner import run
from lightning_sm.emulator.spec import ClusterSpec
from lightning_sm.errors import SubmitError
from lightning_sm.job.emulated_service import GroupSpec
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.request import TrainingRequest, script_options

_LOG = command_logger(__name__)

# Keys without a counterpart on this machine, which the script might miss.
_NOT_LOCAL = ("spot", "tune", "request")


def run_containers(plan: TrainingRequest, timeout_s: float | None) -> int:
    """Run a job in containers on this machine, and return its exit code; see ``emulator.runner.run``.

    Args:
        plan: The job.
        timeout_s: Seconds after which the job is stopped; None for no limit.

    Raises:
        ContainerError: Docker is missing, or does not have the image.
        SubmitError: A channel cannot be copied.
    """
    source_dir = plan.job.source_dir
    runtime = ContainerRuntime(plan.job.image, None if source_dir is None else Path(source_dir), copies_code=True)
    base_dir = default_parent()
    with tempfile.TemporaryDirectory(prefix="lightning-sm-submit-") as folder:
        spec = cluster_spec(plan, Path(folder))
        with LocalCluster(spec, base_dir, runtime) as cluster:
            remove_old_runs(base_dir)
            return run(cluster, [], FaultSettings(), timeout_s=timeout_s)


def ignored_keys(job: Job) -> list[str]:
    """Return a warning for each setting that has no effect on this machine, and that the script might miss."""
    warnings = [f"{name} is ignored with --local." for name in _NOT_LOCAL if getattr(job, name)]
    for name, channel in job.channels.items():
        if (channel.mode, channel.distribution) != ("File", "FullyReplicated"):
            warnings.append(
                f"channels.{name} is {channel.mode} and {channel.distribution}; with --local it is File and "
                "FullyReplicated."
            )
    if job.checkpoints is not None:
        warnings.append(f"checkpoints is a folder of this run with --local, not {job.checkpoints}.")
    return warnings


def cluster_spec(plan: TrainingRequest, folder: Path) -> ClusterSpec:
    """Describe the cluster of a job.

    Args:
        plan: The job.
        folder: Receives the channels that are in S3, until the job has ended.

    Raises:
        SubmitError: A channel cannot be copied.
    """
    job = plan.job
    hyperparameters: dict[str, Any] = script_options(job)
    channels = {name: _folder_of(name, channel.uri, folder) for name, channel in plan.channels.items()}
    groups = {name: channel.groups for name, channel in plan.channels.items() if channel.groups is not None}
    if job.source_dir is not None:
        hyperparameters["sagemaker_submit_directory"] = CODE_DIR  # as SDK v2 has it with local_code
    return ClusterSpec(
        groups=[GroupSpec(name, group.count, group.instance_type) for name, group in job.groups.items()],
        devices=None,
        hyperparameters=hyperparameters,
        channels=channels,
        channel_groups=groups,
        keeps_checkpoints=job.checkpoints is not None,
        environment=job.environment,
    )


def _folder_of(name: str, uri: str, folder: Path) -> Path:
    """Return a channel's folder on this machine, to which an address in S3 is copied."""
    address = urlsplit(uri)
    if address.scheme != "s3":
        return Path(unquote(address.path))
    target = folder / "channels" / name
    target.mkdir(parents=True)
    _LOG.info("copying channel %s from %s", name, uri)
    try:
        _download(Clients(new_session()).s3, address.netloc, address.path.lstrip("/"), target)
    except (ClientError, BotoCoreError, OSError) as error:
        raise SubmitError(f"channels.{name}: {uri} cannot be copied to this machine: {error}") from error
    return target


def _download(s3: Any, bucket: str, prefix: str, target: Path) -> None:
    """Copy all objects whose keys begin with a prefix, as the service does in mode File."""
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Contents", []):
            key = str(found["Key"])
            path = target / (key[len(prefix) :].lstrip("/") or key.rpartition("/")[2])
            if key.endswith("/"):  # the console makes such objects for folders
                continue
            if not path.resolve().is_relative_to(target.resolve()):
                raise SubmitError(f"The key {key!r} in bucket {bucket} leads out of the channel's folder.")
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, key, str(path))
