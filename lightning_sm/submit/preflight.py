"""Checks of a job, which find all problems at once, before anything is sent.

These rules relate one key to another, or the service applies them without documenting them in its API model. The
limits of single values are in ``service_limits``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lightning_sm._log import command_logger
from lightning_sm.errors import JobConfigError, SubmitError, TopologyError
from lightning_sm.job.facts import CODE_CHANNEL, InstanceGroup, SageMakerJob
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import DATA_GROUPS, MAX_RESTARTS, MODEL, SETTINGS, misspelled
from lightning_sm.submit.file_systems import file_system_folder, file_system_problems
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.metric_patterns import pattern_problem
from lightning_sm.submit.mlflow import mlflow_problems
from lightning_sm.submit.service_limits import matches
from lightning_sm.submit.tuning import advice as tuning_advice
from lightning_sm.submit.tuning import tuning_problems

_LOG = command_logger(__name__)

# The SDKs append the time: 24 of 63 characters in version 2.
_MAX_NAME_CHARS = 63 - 24
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
# Amazon ECR, "Private registry"; training images from elsewhere need a VPC and a private registry.
_ECR = re.compile(r"\d{12}\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/[^\s:@]+([:@]\S+)?")
# Amazon S3, "General purpose bucket naming rules".
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")
# SageMaker API, StoppingCondition.MaxRuntimeInSeconds: "the maximum value is 28 days".
_MAX_RUN_S = 28 * 24 * 60 * 60
# Found beside code; large or secret, and of no use in a job.
_NOT_CODE = {".git", ".venv", "venv", ".aws"}


@dataclass
class Findings:
    """Result of the checks.

    Attributes:
        problems: Why the job cannot be submitted, each with what to change.
        warnings: What is allowed but rarely intended.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def report(self) -> None:
        """Log the warnings, and raise all problems as one error.

        Raises:
            SubmitError: There are problems.
        """
        for warning in self.warnings:
            _LOG.warning("warning: %s", warning)
        problems = list(dict.fromkeys(self.problems))
        if problems:
            title = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise SubmitError(f"{title}; nothing was sent:\n{listed}")


def check(job: Job, mode: Literal["cloud", "local"], region: str | None = None) -> Findings:
    """Apply the rules.

    Args:
        job: The content of the job file.
        mode: Local mode needs no role, no registry and no S3.
        region: Region of the job, if known.
    """
    problems = [
        *_groups(job),
        *_channels(job),
        *_limits(job),
        *_script(job),
        *_metrics(job),
        *_environment(job),
        *_restarts(job),
        *mlflow_problems(job),
        *tuning_problems(job),
    ]
    problems += _local_channels(job) if mode == "local" else [*_addresses(job), *file_system_problems(job)]
    return Findings(problems, [*_advice(job, region), *tuning_advice(job)])


def with_placeholders(job: Job) -> Job:
    """Replace values that the SDK would fail on, so that the rest of the request can be checked.

    ``check`` has reported the values that are replaced here.
    """
    return replace(
        job,
        name=job.name if _is_name(job.name) else "rehearsal",
        role=job.role if job.role and matches("RoleArn", job.role) else "arn:aws:iam::000000000000:role/rehearsal",
        output=job.output if job.output is None or _S3.fullmatch(job.output) else "s3://rehearsal",
        channels={
            name: channel if _is_address(channel.uri) else replace(channel, uri="s3://rehearsal")
            for name, channel in job.channels.items()
        },
    )


def _groups(job: Job) -> Iterator[str]:
    if not job.groups:
        yield "groups is empty; name at least one group, as in {trainer: {instance_type: ml.g5.xlarge, count: 2}}."
        return
    for name, group in job.groups.items():
        if group.count < 1:
            yield f"groups.{name}.count is {group.count}; a group needs at least 1 host. Raise it or remove the group."
    # One host per group is enough: the rules depend on types and names.
    groups = tuple(InstanceGroup(name, (name,), group.instance_type) for name, group in job.groups.items())
    hosts = tuple(job.groups)
    data_groups = DATA_GROUPS.read(job.environment)
    try:
        Topology.from_job(SageMakerJob(hosts[0], hosts, groups, "the job file", data_groups=data_groups))
    except TopologyError as error:
        yield f"groups: {error}"


def _environment(job: Job) -> Iterator[str]:
    for setting in SETTINGS:
        try:
            setting.read(job.environment)
        except JobConfigError as error:  # noqa: PERF203 - a problem for each
            yield f"environment: {error}"
    stated = job.environment.get(MODEL.name, job.model)
    if job.model not in (MODEL.default.value, stated):
        yield f"model is {job.model}, but environment sets {MODEL.name}={stated}. Remove one of them."
    for name, near in misspelled(job.environment).items():
        yield f"environment: nothing reads {name}. Did you mean {near}?"


def _restarts(job: Job) -> Iterator[str]:
    own = str(job.max_restarts)
    try:
        MAX_RESTARTS.parse(own)
    except ValueError as error:
        yield f"max_restarts is {own}; {error}."
    stated = job.environment.get(MAX_RESTARTS.name, own)
    if job.max_restarts and stated != own:
        yield f"max_restarts is {own}, but environment sets {MAX_RESTARTS.name}={stated}. Remove one of them."


def _channels(job: Job) -> Iterator[str]:
    for name, channel in job.channels.items():
        unknown = sorted(set(channel.groups or []) - set(job.groups))
        if unknown:
            yield f"channels.{name}.groups names {unknown}, but the groups of the job are {sorted(job.groups)}."
        if channel.groups == []:
            yield f"channels.{name}.groups is empty, so no host would receive it. Remove the key to reach all groups."
        if name == CODE_CHANNEL:
            yield f"channels.{name}: the name is reserved for source_dir; choose another."


def _limits(job: Job) -> Iterator[str]:
    if not _is_name(job.name):
        yield (
            f"name is {job.name!r}; expected letters, digits and single hyphens, at most {_MAX_NAME_CHARS} characters "
            "(the time is appended)."
        )
    if job.spot is not None and job.spot.max_wait_s < job.max_run_s:
        yield (
            f"spot.max_wait_s is {job.spot.max_wait_s} and max_run_s is {job.max_run_s}; max_wait_s includes the "
            "running time. Raise spot.max_wait_s or lower max_run_s."
        )
    if job.max_run_s > _MAX_RUN_S:
        yield f"max_run_s is {job.max_run_s}; the service allows {_MAX_RUN_S} (28 days)."
    # "Managed warm pools", considerations.
    if job.keep_alive_s and job.spot is not None:
        yield f"keep_alive_s is {job.keep_alive_s} and spot is set; warm pools cannot use spot capacity. Remove one."
    if job.keep_alive_s and len(job.groups) > 1:
        yield (
            f"keep_alive_s is {job.keep_alive_s} and there are {len(job.groups)} groups; warm pools do not support "
            "heterogeneous clusters. Remove keep_alive_s."
        )


def _script(job: Job) -> Iterator[str]:
    for key, name in (("subcommand", "subcommand"), ("script", "sagemaker_program")):
        stated = getattr(job, key)
        other = job.hyperparameters.get(name)
        if None not in {stated, other} and stated != other:
            yield f"{key} is {stated!r} and hyperparameters.{name} is {other!r}; remove one."
    if job.local_script is not None and not Path(job.local_script).is_file():
        yield f"local_script is {job.local_script!r}, which does not exist."
    if job.source_dir is None:
        return
    folder = Path(job.source_dir)
    if not folder.is_dir():
        yield f"source_dir is {job.source_dir!r}, which is not a directory."
        return
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    if not files:
        yield f"source_dir is {job.source_dir!r}, which is empty."
    for path in files:
        if not os.access(path, os.R_OK):
            yield f"source_dir contains {path}, which cannot be read{' (broken link)' if path.is_symlink() else ''}."
    if job.network_isolation and (folder / "requirements.txt").is_file():
        yield (
            f"network_isolation is set, but {folder / 'requirements.txt'} names packages, which hosts without a "
            "network cannot install. Install them in the image and remove the file."
        )
    if job.script and not (folder / job.script).is_file() and not (folder / "setup.py").is_file():
        yield f"script is {job.script!r}, but {folder / job.script} does not exist. The path is relative to source_dir."


def _metrics(job: Job) -> Iterator[str]:
    for name in sorted(set(job.metrics) & set(job.metric_patterns)):
        yield f"metrics: {name!r} is in metrics and in metric_patterns; remove one."
    for name, pattern in job.metric_patterns.items():
        problem = pattern_problem(pattern)
        if problem is not None:
            yield f"metric_patterns.{name} is {pattern!r}: {problem}."


def _addresses(job: Job) -> Iterator[str]:
    if job.role is None:
        yield "role is missing; set it to the ARN of the job's role, arn:aws:iam::<account>:role/<name>."
    elif not matches("RoleArn", job.role):
        yield f"role is {job.role!r}; expected an ARN, such as arn:aws:iam::111122223333:role/training."
    if not _ECR.fullmatch(job.image):
        yield (
            f"image is {job.image!r}; SageMaker needs an image in Amazon ECR, "
            "<account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>. README.md shows how to push one."
        )
    for name, channel in job.channels.items():
        if not _is_address(channel.uri):
            yield (
                f"channels.{name}.uri is {channel.uri!r}; expected s3://bucket/prefix (to upload a folder: aws s3 cp "
                "--recursive), fsx://<id>/<mount name>/folder or efs://<id>/folder."
            )
    if job.output_kms_key is not None and job.output is None:
        yield "output_kms_key is set, but output is missing; the key applies to a bucket of yours. Set output."
    for key, uri in {name: getattr(job, name) for name in ("output", "checkpoints", "tensorboard")}.items():
        if uri is not None and not _S3.fullmatch(uri):
            yield f"{key} is {uri!r}; expected s3://bucket/prefix (to upload a folder: aws s3 cp --recursive)."


def _local_channels(job: Job) -> Iterator[str]:
    for name, channel in job.channels.items():
        folder = channel.uri.removeprefix("file://")
        if _S3.fullmatch(channel.uri):
            continue
        if folder == channel.uri or not Path(folder).is_absolute():
            yield f"channels.{name}.uri is {channel.uri!r}; expected file:///absolute/folder or s3://<bucket>/<prefix>."
        elif not Path(folder).exists():
            yield f"channels.{name}.uri is {channel.uri!r}, but {folder} does not exist."


def _advice(job: Job, region: str | None) -> Iterator[str]:
    if job.spot is not None and job.checkpoints is None:
        yield "spot without checkpoints: an interrupted job restarts from the beginning. Set checkpoints: s3://..."
    if job.max_restarts and job.checkpoints is None:
        yield "max_restarts without checkpoints: the scripts start again from the beginning. Set checkpoints: s3://..."
    for name, channel in job.channels.items():
        if channel.mode == "Pipe":
            yield f"channels.{name}.mode is Pipe: the script sees a named pipe instead of a folder."
        if channel.distribution == "ShardedByS3Key":
            yield (
                f"channels.{name}.distribution is ShardedByS3Key: every host sees different files, which Lightning's "
                "samplers do not take into account."
            )
    for path in sorted(Path(job.source_dir).glob("*")) if job.source_dir is not None else ():
        if path.name in _NOT_CODE or path.name.startswith(".env"):
            yield f"source_dir contains {path.name}, which is uploaded too. Move it if the job does not need it."
        elif path.is_dir() and path.is_symlink():
            yield f"source_dir contains {path.name}, a link to a folder, which the SDK does not upload."
    image = _ECR.fullmatch(job.image)
    if image is not None and region is not None and image["region"] != region:
        yield f"image is in {image['region']}, but the job runs in {region}; SageMaker requires the same region."


def _is_address(uri: str) -> bool:
    return bool(_S3.fullmatch(uri)) or file_system_folder(uri) is not None


def _is_name(name: str) -> bool:
    return len(name) <= _MAX_NAME_CHARS and _NAME.fullmatch(name) is not None
