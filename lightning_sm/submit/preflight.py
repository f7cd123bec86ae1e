"""What is wrong with a job, all at once and before anything is sent.

Here are the rules that relate one key to another, or that the service applies without saying so in its model; the
limits of single values are in ``limits``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_sm.errors import SubmitError, TopologyError
from lightning_sm.job.facts import CODE_CHANNEL
from lightning_sm.submit.job_file import Job, Mode
from lightning_sm.submit.metric_patterns import pattern_problem
from lightning_sm.submit.plan import data_groups
from lightning_sm.submit.service_limits import matches

# The SDKs add the time: 24 characters of 63 in version 2.
_MAX_NAME_CHARS = 63 - 24
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
# Amazon ECR, "Private registry"; training images from elsewhere need a VPC and a registry of one's own.
_ECR = re.compile(r"\d{12}\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/[^\s:@]+([:@]\S+)?")
# Amazon S3, "General purpose bucket naming rules".
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")
# SageMaker API, StoppingCondition.MaxRuntimeInSeconds: "the maximum value is 28 days".
_MAX_RUN_S = 28 * 24 * 60 * 60
# What lies beside code, is large or secret, and is of no use in a job.
_NOT_CODE = {".git", ".venv", "venv", ".aws"}
# Only to find out what else is wrong.
_STAND_IN_ROLE, _STAND_IN_URI = "arn:aws:iam::000000000000:role/rehearsal", "s3://rehearsal"


@dataclass
class Findings:
    """What the rules found.

    Attributes:
        problems: Why the job cannot be submitted, each with what to change.
        warnings: What is allowed and rarely meant.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Raise all problems as one error, if there are any.

        Raises:
            SubmitError: There are.
        """
        if self.problems:
            title = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            listed = "\n".join(f"  - {problem}" for problem in dict.fromkeys(self.problems))
            raise SubmitError(f"{title}; nothing was sent:\n{listed}")


def check(job: Job, mode: Mode, region: str | None = None) -> Findings:
    """Apply the rules.

    Args:
        job: What the file says.
        mode: What is to be done with it; local mode needs no role, no registry and no S3.
        region: Where the job is to run, if known.
    """
    problems = [*_groups(job), *_channels(job), *_limits(job), *_script(job), *_metrics(job)]
    problems += _local_channels(job) if mode == "local" else _addresses(job)
    return Findings(problems, [*_advice(job, region)])


def presentable(job: Job) -> Job:
    """The job with stand-ins for what the SDK would stumble over, so that the rest of the request can be checked.

    Args:
        job: What the file says; ``check`` has reported what is replaced here.
    """
    return replace(
        job,
        name=job.name if _is_name(job.name) else "rehearsal",
        role=job.role if job.role and matches("RoleArn", job.role) else _STAND_IN_ROLE,
        output=job.output if job.output is None or _S3.fullmatch(job.output) else _STAND_IN_URI,
        channels={
            name: channel if _S3.fullmatch(channel.uri) else replace(channel, uri=_STAND_IN_URI)
            for name, channel in job.channels.items()
        },
    )


def _groups(job: Job) -> Iterator[str]:
    if not job.groups:
        yield "groups: there is none; name one, as in {trainer: {instance_type: ml.g5.xlarge, count: 2}}."
        return
    for name, group in job.groups.items():
        if group.count < 1:
            yield f"groups.{name}.count is {group.count}; a group has at least one host. Remove the group, or say 1."
    try:
        data_groups(job)
    except TopologyError as error:
        yield f"groups: {error}"


def _channels(job: Job) -> Iterator[str]:
    for name, channel in job.channels.items():
        unknown = sorted(set(channel.groups or []) - set(job.groups))
        if unknown:
            yield f"channels.{name}.groups names {unknown}, but the groups of the job are {sorted(job.groups)}."
        if channel.groups == []:
            yield f"channels.{name}.groups is empty: nobody would get it. Leave it out for all groups."
        if name == CODE_CHANNEL:
            yield f"channels.{name}: this name is taken for source_dir; choose another."


def _limits(job: Job) -> Iterator[str]:
    if not _is_name(job.name):
        yield (
            f"name is {job.name!r}; expected letters, digits and single hyphens, {_MAX_NAME_CHARS} characters at most "
            "(the time is added)."
        )
    if job.spot is not None and job.spot.max_wait_s < job.max_run_s:
        yield (
            f"spot.max_wait_s is {job.spot.max_wait_s} and max_run_s {job.max_run_s}; waiting includes running. Raise "
            "the first or lower the second."
        )
    if job.max_run_s > _MAX_RUN_S:
        yield f"max_run_s is {job.max_run_s}; the service allows {_MAX_RUN_S} (28 days)."
    # "Managed warm pools", considerations.
    if job.keep_alive_s and job.spot is not None:
        yield f"keep_alive_s is {job.keep_alive_s} and spot is set; warm pools take no spot capacity. Remove one."
    if job.keep_alive_s and len(job.groups) > 1:
        yield (
            f"keep_alive_s is {job.keep_alive_s} and there are {len(job.groups)} groups; warm pools take no "
            "heterogeneous clusters. Remove keep_alive_s."
        )
    if job.retries.max_tries < 1:
        yield f"retries.max_tries is {job.retries.max_tries}; 1 submits once."
    if job.retries.first_pause_s < 0 or job.retries.max_pause_s < job.retries.first_pause_s:
        yield (
            f"retries.first_pause_s is {job.retries.first_pause_s:g} and retries.max_pause_s "
            f"{job.retries.max_pause_s:g}; expected 0 <= first_pause_s <= max_pause_s."
        )


def _script(job: Job) -> Iterator[str]:
    for key, name in (("subcommand", "subcommand"), ("script", "sagemaker_program")):
        stated, other = getattr(job, key), job.hyperparameters.get(name)
        if None not in {stated, other} and stated != other:
            yield f"{key} is {stated!r} and hyperparameters.{name} is {other!r}; remove one."
    if job.source_dir is None:
        return
    folder = Path(job.source_dir)
    if not folder.is_dir():
        yield f"source_dir is {job.source_dir!r}, which is no folder."
        return
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    if not files:
        yield f"source_dir is {job.source_dir!r}, which is empty."
    for path in files:
        if not os.access(path, os.R_OK):
            yield f"source_dir holds {path}, which cannot be read{' (a broken link)' if path.is_symlink() else ''}."
    if job.script and not (folder / job.script).is_file() and not (folder / "setup.py").is_file():
        yield f"script is {job.script!r}, but there is no {folder / job.script}. It is relative to source_dir."


def _metrics(job: Job) -> Iterator[str]:
    for name in sorted({name for name in job.metrics if job.metrics.count(name) > 1 or name in job.metric_patterns}):
        yield f"metrics: {name!r} is named twice, in metrics or in metrics and metric_patterns; remove one."
    for name, pattern in job.metric_patterns.items():
        problem = pattern_problem(pattern)
        if problem is not None:
            yield f"metric_patterns.{name} is {pattern!r}: {problem}."


def _addresses(job: Job) -> Iterator[str]:
    if job.role is None:
        yield "role: there is none; name the ARN of the job's role, arn:aws:iam::<account>:role/<name>."
    elif not matches("RoleArn", job.role):
        yield f"role is {job.role!r}; expected its ARN, such as arn:aws:iam::111122223333:role/training."
    if not _ECR.fullmatch(job.image):
        yield (
            f"image is {job.image!r}; the service takes images from Amazon ECR: "
            "<account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>. How to push one there: README.md."
        )
    uris = {f"channels.{name}.uri": channel.uri for name, channel in job.channels.items()}
    uris |= {name: uri for name in ("output", "checkpoints", "tensorboard") if (uri := getattr(job, name)) is not None}
    for key, uri in uris.items():
        if not _S3.fullmatch(uri):
            yield f"{key} is {uri!r}; expected s3://bucket/prefix (to upload a folder: aws s3 cp --recursive)."


def _local_channels(job: Job) -> Iterator[str]:
    for name, channel in job.channels.items():
        folder = channel.uri.removeprefix("file://")
        if _S3.fullmatch(channel.uri):
            continue
        if folder == channel.uri or not Path(folder).is_absolute():
            yield f"channels.{name}.uri is {channel.uri!r}; expected file:///absolute/folder or s3://<bucket>/<prefix>."
        elif not Path(folder).exists():
            yield f"channels.{name}.uri is {channel.uri!r}, but there is no {folder}."


def _advice(job: Job, region: str | None) -> Iterator[str]:
    if job.spot is not None and job.checkpoints is None:
        yield "spot without checkpoints: an interrupted job starts from the beginning. Set checkpoints: s3://..."
    for name, channel in job.channels.items():
        if channel.mode == "Pipe":
            yield f"channels.{name}.mode is Pipe: scripts see a named pipe instead of a folder."
        if channel.distribution == "ShardedByS3Key":
            yield (
                f"channels.{name}.distribution is ShardedByS3Key: every host sees other files, of which Lightning's "
                "samplers know nothing."
            )
    for path in [] if job.source_dir is None else sorted(Path(job.source_dir).glob("*")):
        if path.name in _NOT_CODE or path.name.startswith(".env"):
            yield f"source_dir holds {path.name}, which is uploaded with the rest; move it if the job needs none."
        elif path.is_dir() and path.is_symlink():
            yield f"source_dir holds {path.name}, a link to a folder, which the SDK does not upload."
    image = _ECR.fullmatch(job.image)
    if image is not None and region is not None and image["region"] != region:
        yield f"image lies in {image['region']}, but the job is to run in {region}; the service wants them together."


def _is_name(name: str) -> bool:
    return len(name) <= _MAX_NAME_CHARS and _NAME.fullmatch(name) is not None
