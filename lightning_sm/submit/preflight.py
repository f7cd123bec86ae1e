"""Checks of a job, which find all problems at once, before anything is sent.

These rules relate one key to another, or the service applies them without documenting them in its API model. The
limits of single values are in ``service_limits``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from lightning_sm.errors import JobConfigError, TopologyError
from lightning_sm.job.facts import CODE_CHANNEL, InstanceGroup, SageMakerJob
from lightning_sm.job.instance_types import num_gpus
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_GROUPS, MAX_RESTARTS, SETTINGS, misspelled
from lightning_sm.submit.cost_limit import cost_problems
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.metric_patterns import pattern_problem
from lightning_sm.submit.problems import Findings, JobProblem
from lightning_sm.submit.secret_check import secret_problems
from lightning_sm.submit.service_limits import PLACES, matches
from lightning_sm.submit.source_archive import source_entries
from lightning_sm.submit.training_job import NAME_ENDING_CHARS
from lightning_sm.submit.tuning import tuning_problems

_MAX_NAME_CHARS = 63 - NAME_ENDING_CHARS
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
# Amazon ECR, "Private registry"; training images from elsewhere need a VPC and a private registry.
ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/[^\s:@]+([:@]\S+)?"
)
# Amazon S3, "General purpose bucket naming rules".
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")
# SageMaker API, StoppingCondition.MaxRuntimeInSeconds: "the maximum value is 28 days".
_MAX_RUN_S = 28 * 24 * 60 * 60
# Found beside code; large or secret, and of no use in a job.
_NOT_CODE = {".git", ".venv", "venv", ".aws"}
_LARGE_BYTES = 100_000_000


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
        *_build(job),
        *_metrics(job),
        *_environment(job),
        *_restarts(job),
        *_requested(job),
        *tuning_problems(job),
    ]
    warnings = [*_advice(job)]
    if mode == "local":
        problems += _local_channels(job)
    else:
        warnings += _source_advice(job)
        problems += [
            *cost_problems(job),
            *_addresses(job),
            *_region(job, region),
            *_overlaps(job),
            *secret_problems(job),
        ]
    findings = Findings([*job.source.problems], warnings, job.source)
    findings.add(problems)
    return findings


def with_placeholders(job: Job) -> Job:
    """Replace values that ``check`` has reported, so that the rest of the request can be checked without them."""
    return replace(
        job,
        name=job.name if _is_name(job.name) else "rehearsal",
        role=job.role if job.role and matches("RoleArn", job.role) else "arn:aws:iam::000000000000:role/rehearsal",
        output=job.output if job.output is None or _S3.fullmatch(job.output) else "s3://rehearsal",
        channels={
            name: channel if _S3.fullmatch(channel.uri) else replace(channel, uri="s3://rehearsal")
            for name, channel in job.channels.items()
        },
    )


def _groups(job: Job) -> Iterator[JobProblem]:
    if not job.groups:
        yield JobProblem(
            "groups",
            "groups is empty; name at least one group, as in {trainer: {instance_type: ml.g5.xlarge, count: 2}}.",
        )
        return
    for name, group in job.groups.items():
        if group.count < 1:
            yield JobProblem(
                f"groups.{name}.count",
                f"groups.{name}.count is {group.count}; a group needs at least 1 host. Raise it or remove the group.",
            )
    # One host per group is enough: the rules depend on types and names.
    groups = tuple(InstanceGroup(name, (name,), group.instance_type) for name, group in job.groups.items())
    hosts = tuple(job.groups)
    try:
        data_groups = DATA_GROUPS.read(job.environment)
    except JobConfigError:  # a problem of the environment
        return
    try:
        roles = {
            name: Topology.from_job(SageMakerJob(name, hosts, groups, "the job file", data_groups=data_groups)).role
            for name in hosts
        }
    except TopologyError as error:
        yield JobProblem("groups", f"groups: {error}", also=(f"environment.{DATA_GROUPS.name}",))
        return
    yield from _swapped(job, roles, data_groups)


def _swapped(job: Job, roles: Mapping[str, Role], data_groups: tuple[str, ...] | None) -> Iterator[JobProblem]:
    """Find GPUs on data hosts whose trainers have none, unless the job states which groups serve data."""
    types = {role: [job.groups[name].instance_type for name in roles if roles[name] is role] for role in Role}
    has_gpus = {role: [num_gpus(one) != 0 for one in found] for role, found in types.items()}
    if data_groups is None and any(has_gpus[Role.DATA]) and not any(has_gpus[Role.TRAINER]):
        names = ",".join(name for name in roles if roles[name] is Role.DATA)
        yield JobProblem(
            "groups",
            f"groups: the data hosts ({', '.join(types[Role.DATA])}) have GPUs, and the trainers "
            f"({', '.join(types[Role.TRAINER])}) have none. Swap the instance types; if that is meant, say so: "
            f"environment: {{{DATA_GROUPS.name}: '{names}'}}.",
            also=(f"environment.{DATA_GROUPS.name}",),
        )


def _environment(job: Job) -> Iterator[JobProblem]:
    for setting in SETTINGS:
        try:
            setting.read(job.environment)
        except JobConfigError as error:  # noqa: PERF203 - a problem for each
            yield JobProblem(f"environment.{setting.name}", f"environment: {error}")
    for name, near in misspelled(job.environment).items():
        yield JobProblem(f"environment.{name}", f"environment: nothing reads {name}. Did you mean {near}?")


def _restarts(job: Job) -> Iterator[JobProblem]:
    own = str(job.max_restarts)
    try:
        MAX_RESTARTS.parse(own)
    except ValueError as error:
        yield JobProblem("max_restarts", f"max_restarts is {own}; {error}.")


def _requested(job: Job) -> Iterator[JobProblem]:
    for key, places in PLACES.items():
        for place in places:
            if job.requested(place) is not None:
                yield JobProblem(f"request.{place}", f"request has {place}, which the key {key} decides. Use {key}.")


def _channels(job: Job) -> Iterator[JobProblem]:
    for name, channel in job.channels.items():
        unknown = sorted(set(channel.groups or []) - set(job.groups))
        if unknown:
            yield JobProblem(
                f"channels.{name}.groups",
                f"channels.{name}.groups names {', '.join(unknown)}, but the groups of the job are "
                f"{', '.join(sorted(job.groups)) or 'missing'}.",
                also=("groups",),
            )
        if channel.groups == []:
            yield JobProblem(
                f"channels.{name}.groups",
                f"channels.{name}.groups is empty, so no host would receive it. Remove the key to reach all groups.",
            )
        if name == CODE_CHANNEL and job.source_dir is not None:
            yield JobProblem(
                f"channels.{name}",
                f"channels.{name}: source_dir is set, and needs the name for the code; choose another.",
                also=("source_dir",),
            )


def _limits(job: Job) -> Iterator[JobProblem]:
    if not _is_name(job.name):
        yield JobProblem(
            "name",
            f"name is {job.name!r}; expected letters, digits and single hyphens, at most {_MAX_NAME_CHARS} characters "
            "(the time is appended).",
        )
    if job.spot is not None and job.spot.max_wait_s < job.max_run_s:
        yield JobProblem(
            "spot.max_wait_s",
            f"spot.max_wait_s is {job.spot.max_wait_s} and max_run_s is {job.max_run_s}; max_wait_s includes the "
            "running time. Raise spot.max_wait_s or lower max_run_s.",
            also=("max_run_s",),
        )
    if job.max_run_s > _MAX_RUN_S:
        yield JobProblem("max_run_s", f"max_run_s is {job.max_run_s}; the service allows {_MAX_RUN_S} (28 days).")


def _build(job: Job) -> Iterator[JobProblem]:
    if job.build is None:
        if job.dockerfile is not None:
            yield JobProblem("dockerfile", "dockerfile is set, but build is not: the folder from which to build.")
        return
    if not Path(job.build).is_dir():
        yield JobProblem("build", f"build is {job.build!r}, which is not a folder.")
    elif job.dockerfile is None and not (Path(job.build) / "Dockerfile").is_file():
        yield JobProblem(
            "build",
            f"build is {job.build!r}, in which there is no file Dockerfile. If it is elsewhere, set dockerfile.",
        )
    if job.dockerfile is not None and not Path(job.dockerfile).is_file():
        yield JobProblem("dockerfile", f"dockerfile is {job.dockerfile!r}; there is no such file.")
    if "@" in job.image:
        yield JobProblem(
            "image",
            f"image is {job.image!r}, which names a digest, but build is set. Name a tag; the job gets the digest that "
            "the image then has.",
            also=("build",),
        )


def _script(job: Job) -> Iterator[JobProblem]:
    if job.source_dir is None:
        return
    named = job.script or job.hyperparameters.get("sagemaker_program") or job.environment.get("SAGEMAKER_PROGRAM")
    if not named:
        yield JobProblem(
            "source_dir",
            "source_dir is set, but script is missing: the hosts would run the image's script. Set script to a path in "
            "source_dir, as in script: train.py.",
            also=("script",),
        )
    folder = Path(job.source_dir)
    if not folder.is_dir():
        yield JobProblem("source_dir", f"source_dir is {job.source_dir!r}, which is not a directory.")
        return
    entries = list(source_entries(folder))
    if not any(entry.problem or not entry.path.is_dir() for entry in entries):
        yield JobProblem("source_dir", f"source_dir is {job.source_dir!r}, which is empty.")
    for entry in entries:
        if entry.problem:
            yield JobProblem("source_dir", f"source_dir contains {entry.path}, which {entry.problem}.")
    if job.requested("EnableNetworkIsolation") and (folder / "requirements.txt").is_file():
        yield JobProblem(
            "request",
            f"request has EnableNetworkIsolation, but {folder / 'requirements.txt'} names packages, which hosts "
            "without a network cannot install. Install them in the image and remove the file.",
            also=("source_dir",),
        )
    if job.script and not (folder / job.script).is_file():
        yield JobProblem(
            "script",
            f"script is {job.script!r}, but {folder / job.script} does not exist. The path is relative to source_dir.",
            also=("source_dir",),
        )


def _metrics(job: Job) -> Iterator[JobProblem]:
    for name, pattern in job.metric_patterns.items():
        problem = pattern_problem(pattern)
        if problem is not None:
            yield JobProblem(f"metric_patterns.{name}", f"metric_patterns.{name} is {pattern!r}: {problem}.")


def _addresses(job: Job) -> Iterator[JobProblem]:
    if job.role is None:
        yield JobProblem(
            "role", "role is missing; set it to the ARN of the job's role, arn:aws:iam::<account>:role/<name>."
        )
    elif not matches("RoleArn", job.role):
        yield JobProblem(
            "role", f"role is {job.role!r}; expected an ARN, such as arn:aws:iam::111122223333:role/training."
        )
    if not ECR_IMAGE.fullmatch(job.image):
        yield JobProblem(
            "image",
            f"image is {job.image!r}; SageMaker needs an image in Amazon ECR, "
            "<account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>. Set build: . to have one built and pushed.",
        )
    for name, channel in job.channels.items():
        if not _S3.fullmatch(channel.uri):
            yield JobProblem(
                f"channels.{name}.uri",
                f"channels.{name}.uri is {channel.uri!r}; expected s3://bucket/prefix (to upload a folder: aws s3 cp "
                "--recursive). A file system is an entry of InputDataConfig in request.",
            )
    for key, uri in {name: getattr(job, name) for name in ("output", "checkpoints")}.items():
        if uri is not None and not _S3.fullmatch(uri):
            yield JobProblem(
                key, f"{key} is {uri!r}; expected s3://bucket/prefix (to upload a folder: aws s3 cp --recursive)."
            )


def _region(job: Job, region: str | None) -> Iterator[JobProblem]:
    image = ECR_IMAGE.fullmatch(job.image)
    if image is not None and region is not None and image["region"] != region:
        yield JobProblem(
            "image",
            f"image is in {image['region']}, but the job runs in {region}; SageMaker takes images of its own region "
            f"only. Push the image to {region}, or set AWS_DEFAULT_REGION={image['region']}.",
        )


def _overlaps(job: Job) -> Iterator[JobProblem]:
    """Find what hosts would download with the checkpoints, and so never be rid of."""
    checkpoints = f"{(job.checkpoints or '').rstrip('/')}/"
    output = f"{(job.output or '').rstrip('/')}/"
    if job.output is not None and job.checkpoints is not None and output.startswith(checkpoints):
        relation = "equal to" if output == checkpoints else "below"
        yield JobProblem(
            "output",
            f"output is {job.output}, which is {relation} checkpoints ({job.checkpoints}): the hosts of a restarted "
            "job would download it with the checkpoints. Choose a prefix beside it.",
            also=("checkpoints",),
        )


def _local_channels(job: Job) -> Iterator[JobProblem]:
    for name, channel in job.channels.items():
        folder = unquote(channel.uri.removeprefix("file://"))
        if _S3.fullmatch(channel.uri):
            continue
        if not channel.uri.startswith("file://") or not Path(folder).is_absolute():
            yield JobProblem(
                f"channels.{name}.uri",
                f"channels.{name}.uri is {channel.uri!r}; expected file:///absolute/folder or s3://<bucket>/<prefix>.",
            )
        elif not Path(folder).exists():
            yield JobProblem(
                f"channels.{name}.uri", f"channels.{name}.uri is {channel.uri!r}, but {folder} does not exist."
            )


def _advice(job: Job) -> Iterator[str]:
    if job.spot is not None and job.checkpoints is None:
        yield "spot without checkpoints: an interrupted job restarts from the beginning. Set checkpoints: s3://..."
    if job.max_restarts and job.checkpoints is None:
        yield "max_restarts without checkpoints: the scripts start again from the beginning. Set checkpoints: s3://..."


def _source_advice(job: Job) -> Iterator[str]:
    entries = list(source_entries(Path(job.source_dir))) if job.source_dir is not None else []
    size = sum(entry.size for entry in entries)
    if size > _LARGE_BYTES:
        yield (
            f"source_dir has {size / 1e6:.0f} MB in {len(entries)} files and folders, all of which are uploaded, and "
            "fetched by each host. Move what the job does not need."
        )
    for entry in entries:
        if entry.name in _NOT_CODE or re.fullmatch(r"\.env[^/]*", entry.name):
            yield f"source_dir contains {entry.name}, which is uploaded too. Move it if the job does not need it."


def _is_name(name: str) -> bool:
    return len(name) <= _MAX_NAME_CHARS and _NAME.fullmatch(name) is not None
