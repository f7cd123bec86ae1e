"""Running a job file locally, on an emulated cluster whose hosts are containers of the job's image."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lightning_sm.emulator.cluster import LocalCluster
from lightning_sm.emulator.container_hosts import CODE_DIR, ContainerRuntime
from lightning_sm.emulator.faults import FaultSettings
from lightning_sm.emulator.run_folders import default_parent, remove_old_runs
from lightning_sm.emulator.runner import run
from lightning_sm.emulator.spec import ClusterSpec
from lightning_sm.job.emulated_service import GroupSpec
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.training_job import script_options

# Keys that have no effect on this machine, although the script might rely on them.
_NOT_LOCAL = ("spot", "tune", "request")


def run_containers(job: Job) -> int:
    """Run a job in containers on this machine, and return its exit code; see ``emulator.runner.run``.

    Args:
        job: The job, as returned by ``prepared``.

    Raises:
        ContainerError: Docker is missing or does not have the image.
    """
    code = None if job.source_dir is None else Path(job.source_dir)
    runtime = ContainerRuntime(job.image, code, copies_code=True)
    base_dir = default_parent()
    with LocalCluster(cluster_spec(job), base_dir, runtime) as cluster:
        remove_old_runs(base_dir)
        return run(cluster, [], FaultSettings())


def ignored_keys(job: Job) -> list[str]:
    """Return a warning for each setting that the script might rely on, but that has no effect on this machine."""
    warnings = [f"{name} is ignored with --local." for name in _NOT_LOCAL if getattr(job, name)]
    for name, channel in job.channels.items():
        if (channel.mode, channel.distribution) != ("File", "FullyReplicated"):
            warnings.append(
                f"channels.{name} is {channel.mode} and {channel.distribution}; with --local it is File and "
                "FullyReplicated."
            )
    if job.checkpoints is not None:
        warnings.append(f"checkpoints is ignored with --local: the run has a folder of its own, not {job.checkpoints}.")
    return warnings


def cluster_spec(job: Job) -> ClusterSpec:
    """Return the specification of a job's cluster.

    Args:
        job: The job, as returned by ``prepared``.
    """
    hyperparameters: dict[str, Any] = script_options(job)
    channels = {name: Path(unquote(channel.uri.removeprefix("file://"))) for name, channel in job.channels.items()}
    groups = {name: channel.groups for name, channel in job.channels.items() if channel.groups is not None}
    if job.source_dir is not None:
        hyperparameters["sagemaker_submit_directory"] = CODE_DIR  # as in SDK v2 with local_code
    return ClusterSpec(
        groups=[GroupSpec(name, group.count, group.instance_type) for name, group in job.groups.items()],
        devices=None,
        hyperparameters=hyperparameters,
        channels=channels,
        channel_groups=groups,
        keeps_checkpoints=job.checkpoints is not None,
        environment=job.environment,
    )
