"""The rules for a job, all of which are checked before anything is sent.

These rules relate keys to each other, or are enforced by the service but not documented in its API model. For limits of
single values, see ``request_limits``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from lightning_sm._arguments import did_you_mean
from lightning_sm.errors import HyperparameterError, JobConfigError, TopologyError
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.hyperparameters import encode
from lightning_sm.job.instance_types import num_gpus
from lightning_sm.job.redaction import is_secret, shown
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_GROUPS, JOB_SECRET, MAX_RESTARTS, SETTINGS, misspelled
from lightning_sm.submit.cost_limit import cost_problems
from lightning_sm.submit.job_file import Job
from lightning_sm.submit.problems import Findings, JobProblem
from lightning_sm.submit.request_limits import IF_NEW, PLACES, matches, values_of
from lightning_sm.submit.training_job import MAX_NAME_CHARS, config_of, prepared, script_options
from lightning_sm.submit.tuning import tuning_problems

# https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StoppingCondition.html
_MAX_RUN_S = 28 * 24 * 3600
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
# Amazon ECR, "Private registry"; training images from elsewhere need a VPC and a private registry.
ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/[^\s:@]+([:@]\S+)?"
)
# Amazon S3, "General purpose bucket naming rules".
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")
# Often found next to code, but large or secret, and useless in a job.
_NOT_CODE = (".aws", ".env", ".git", ".venv", "venv")
_ADVICE_ON_SECRETS = (
    "SageMaker shows it to anyone who can describe the job. Keep secrets in AWS Secrets Manager, and read them in the "
    "script, with the job's role (docs/submit.md, Secrets)."
)


def check(job: Job, mode: Literal["cloud", "local"], region: str | None = None) -> Findings:
    """Check a job against all rules.

    Args:
        job: The content of the job file.
        mode: Where the job will run. Local mode needs no role, registry or S3.
        region: Region of the job, if known.
    """
    options = [*_options(job)]
    problems = [
        *options,
        *_groups(job),
        *_channels(job),
        *_limits(job),
        *_script(job),
        *_build(job),
        *_environment(job),
        *_requested(job),
        *tuning_problems(job),
    ]
    if mode == "local":
        problems += _local_channels(job)
    else:
        problems += [*cost_problems(job), *_instance_types(job), *_addresses(job, region)]
        problems += [] if options else _secrets(job)
    return Findings(problems, [*_advice(job, mode)], job.positions)


def _options(job: Job) -> Iterator[JobProblem]:
    try:
        encode(script_options(job))
    except JobConfigError as error:
        yield JobProblem("config", str(error))
    except HyperparameterError as error:
        yield JobProblem("hyperparameters", f"config, hyperparameters: {error}")


def _groups(job: Job) -> Iterator[JobProblem]:
    if not job.groups:
        yield JobProblem(
            "groups",
            "groups is empty; name at least one group, as in {trainer: {instance_type: ml.g5.xlarge, count: 2}}.",
        )
        return
    # One host per group is enough, because the rules only depend on types and names.
    groups = tuple(InstanceGroup(name, (name,), group.instance_type) for name, group in job.groups.items())
    hosts = tuple(job.groups)
    try:
        data_groups = DATA_GROUPS.read(job.environment)
        jobs = [SageMakerJob(name, hosts, groups, "the job file", data_groups=data_groups) for name in hosts]
        roles = {host.current_host: Topology.from_job(host).role for host in jobs}
    except JobConfigError:  # a problem with the environment
        return
    except TopologyError as error:
        yield JobProblem("groups", f"groups: {error}")
        return
    types = {role: [job.groups[name].instance_type for name in hosts if roles[name] is role] for role in Role}
    has_gpus = {role: any(num_gpus(kind) != 0 for kind in kinds) for role, kinds in types.items()}
    if data_groups is None and has_gpus[Role.DATA] and not has_gpus[Role.TRAINER]:
        names = ",".join(name for name in hosts if roles[name] is Role.DATA)
        yield JobProblem(
            "groups",
            f"groups: the data hosts ({', '.join(types[Role.DATA])}) have GPUs, and the trainers "
            f"({', '.join(types[Role.TRAINER])}) have none. Swap the instance types, or if this is intended, set "
            f"environment: {{{DATA_GROUPS.name}: '{names}'}}.",
        )


def _channels(job: Job) -> Iterator[JobProblem]:
    for name, channel in job.channels.items():
        unknown = sorted(set(channel.groups or []) - set(job.groups))
        if unknown:
            yield JobProblem(
                f"channels.{name}.groups",
                f"channels.{name}.groups names {', '.join(unknown)}, but the job's groups are "
                f"{', '.join(sorted(job.groups)) or 'missing'}.",
            )


def _limits(job: Job) -> Iterator[JobProblem]:
    if len(job.name) > MAX_NAME_CHARS or not _NAME.fullmatch(job.name):
        yield JobProblem(
            "name",
            f"name is {job.name!r}; expected at most {MAX_NAME_CHARS} letters, digits and hyphens, with no hyphen at "
            "either end (the time is appended).",
        )
    if job.max_run_s > _MAX_RUN_S:
        yield JobProblem(
            "max_run_s", f"max_run_s is {job.max_run_s}; the service allows at most {_MAX_RUN_S} (28 days)."
        )
    if repeated := [name for name, number in Counter(job.metrics).items() if number > 1]:
        yield JobProblem("metrics", f"metrics names {', '.join(repeated)} more than once.")
    for tag in job.tags:
        if tag.lower().startswith("aws:"):
            yield JobProblem(f"tags.{tag}", f"tags: {tag} begins with aws:, a prefix that only AWS may use.")
    if job.spot is not None and job.spot.max_wait_s < job.max_run_s:
        yield JobProblem(
            "spot.max_wait_s",
            f"spot.max_wait_s is {job.spot.max_wait_s} and max_run_s is {job.max_run_s}; max_wait_s includes the "
            "running time. Raise spot.max_wait_s or lower max_run_s.",
        )


def _script(job: Job) -> Iterator[JobProblem]:
    if job.source_dir is None:
        return
    folder = Path(job.source_dir)
    if not folder.is_dir():
        yield JobProblem("source_dir", f"source_dir is {job.source_dir!r}, which is not a directory.")
    elif not (job.script or job.hyperparameters.get("sagemaker_program") or job.environment.get("SAGEMAKER_PROGRAM")):
        yield JobProblem(
            "source_dir",
            "source_dir is set, but script is missing: the hosts would run the image's script. Set script to a path in "
            "source_dir, as in script: train.py.",
        )
    elif job.script and not (_is_below(job.script) and (folder / job.script).is_file()):
        yield JobProblem(
            "script",
            f"script is {job.script!r}, which is not a file in source_dir, {folder}. Only that folder is sent with the "
            "job; script is a path in it.",
        )
    for path in folder.rglob("*"):
        # Use os.path.realpath, since Path.resolve raises an error for a link to itself.
        is_loop = path.is_symlink() and Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(path))
        if is_loop or not (path.is_file() or path.is_dir()):
            no_file = "a broken link" if path.is_symlink() else "neither a file nor a folder"
            what = "a link to a folder that contains it" if is_loop else no_file
            yield JobProblem("source_dir", f"source_dir has {path.relative_to(folder)}, which is {what}. Remove it.")
    if job.requested("EnableNetworkIsolation"):
        yield JobProblem(
            "source_dir",
            "source_dir is set, but request has EnableNetworkIsolation: hosts without a network cannot fetch the code. "
            "Put it into the image.",
        )


def _is_below(path: str) -> bool:
    return not Path(path).is_absolute() and ".." not in Path(path).parts


def _build(job: Job) -> Iterator[JobProblem]:
    if job.build is None:
        if job.dockerfile is not None:
            yield JobProblem("dockerfile", "dockerfile is set, but build is not. Set build to the build context.")
        return
    file = Path(job.build, "Dockerfile") if job.dockerfile is None else Path(job.dockerfile)
    if not file.is_file():
        key = "build" if job.dockerfile is None else "dockerfile"
        yield JobProblem(key, f"{key}: there is no file {file}. If the Dockerfile is elsewhere, set dockerfile.")
    if "@" in job.image:
        yield JobProblem("image", f"image is {job.image}; with build, expected a tag in place of the digest.")


def _environment(job: Job) -> Iterator[JobProblem]:
    environment = prepared(job).environment
    if job.max_restarts and MAX_RESTARTS.name in job.environment:
        yield JobProblem(
            f"environment.{MAX_RESTARTS.name}",
            f"environment has {MAX_RESTARTS.name}, which the key max_restarts sets. Use max_restarts.",
        )
    for setting in SETTINGS:
        try:
            setting.read(environment)
        except JobConfigError as error:  # noqa: PERF203 - each setting is reported
            yield JobProblem(f"environment.{setting.name}", f"environment: {error}")
    for name, near in misspelled(environment).items():
        yield JobProblem(f"environment.{name}", f"environment: nothing reads {name}. Did you mean {near}?")


def _requested(job: Job) -> Iterator[JobProblem]:
    for key, places in PLACES.items():
        for place in places:
            if job.requested(place) is not None:
                yield JobProblem(f"request.{place}", f"request has {place}, which the key {key} sets. Use {key}.")


def _instance_types(job: Job) -> Iterator[JobProblem]:
    known = values_of("TrainingInstanceType")
    for name, kind in ((name, group.instance_type) for name, group in job.groups.items()):
        if kind not in known:
            key, near = f"groups.{name}.instance_type", did_you_mean(kind, known)
            yield JobProblem(key, f"{key} is {kind!r}, which is not an instance type for training jobs.{near} {IF_NEW}")


def _addresses(job: Job, region: str | None) -> Iterator[JobProblem]:
    if job.role is None or not matches("RoleArn", job.role):
        stated = "missing" if job.role is None else repr(job.role)
        yield JobProblem("role", f"role is {stated}; expected an ARN, such as arn:aws:iam::111122223333:role/training.")
    image = ECR_IMAGE.fullmatch(job.image)
    if image is None:
        yield JobProblem(
            "image",
            f"image is {job.image!r}; SageMaker needs an image in Amazon ECR, "
            "<account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>. With `build: .`, it is built and pushed.",
        )
    elif region is not None and image["region"] != region:
        yield JobProblem(
            "image",
            f"image is in {image['region']}, but the job runs in {region}; SageMaker only accepts images in the job's "
            f"region. Push the image to {region}, or set AWS_DEFAULT_REGION={image['region']}.",
        )
    uris: dict[str, str | None] = {f"channels.{name}.uri": channel.uri for name, channel in job.channels.items()}
    for key, uri in {**uris, "output": job.output, "checkpoints": job.checkpoints}.items():
        if uri is not None and not _S3.fullmatch(uri):
            yield JobProblem(key, f"{key} is {uri!r}; expected s3://bucket/prefix (to upload: aws s3 cp --recursive).")
    if job.output and job.checkpoints and _as_folder(job.output).startswith(_as_folder(job.checkpoints)):
        yield JobProblem(
            "output",
            f"output is {job.output}, which is equal to checkpoints ({job.checkpoints}) or below it: the hosts of a "
            "restarted job would download it with the checkpoints. Choose another prefix.",
        )


def _as_folder(uri: str) -> str:
    return f"{uri.rstrip('/')}/"


def _secrets(job: Job) -> Iterator[JobProblem]:
    """Yield a problem for each value that looks like a secret by name or form, unless ``not_secret`` names it."""
    environment = {name: value for name, value in job.environment.items() if name != JOB_SECRET.name}
    sources = {"config": config_of(job), "hyperparameters": job.hyperparameters, "environment": environment}
    sources["tune.ranges"] = {} if job.tune is None else {name: span.values for name, span in job.tune.ranges.items()}
    for source, values in sources.items():
        for key in _hidden(source, values):
            name = key.removeprefix(f"{source}.")
            if name not in job.not_secret:
                allowed = f"If it is not a secret, set not_secret: [{', '.join([*job.not_secret, name])}]."
                yield JobProblem(key, f"{key} looks like a secret. {_ADVICE_ON_SECRETS} {allowed}")


def _hidden(name: str, value: Any) -> Iterator[str]:
    """Yield the names of all values that must be hidden, at any depth."""
    if isinstance(value, Mapping) and not is_secret(name):
        for key, item in value.items():
            yield from _hidden(f"{name}.{key}", item)
    elif [shown(name, value)] != [value]:  # compare in lists, where nan equals itself
        yield name


def _local_channels(job: Job) -> Iterator[JobProblem]:
    for name, channel in job.channels.items():
        folder = Path(unquote(channel.uri.removeprefix("file://")))
        if not (channel.uri.startswith("file:///") and folder.exists()):
            yield JobProblem(
                f"channels.{name}.uri",
                f"channels.{name}.uri is {channel.uri!r}; with --local, expected an existing folder, as in "
                "file:///folder (to copy a prefix: aws s3 cp --recursive).",
            )


def _advice(job: Job, mode: Literal["cloud", "local"]) -> Iterator[str]:
    if job.checkpoints is None and (job.spot is not None or job.max_restarts):
        key = "spot" if job.spot is not None else "max_restarts"
        yield f"{key} without checkpoints: scripts start again from the beginning. Set checkpoints: s3://..."
    known = [*job.groups, *(group.instance_type for group in job.groups.values())]
    for name in sorted(job.prices.keys() - set(known)):
        yield f"prices has {name}, which is neither an instance type nor a group of the job.{did_you_mean(name, known)}"
    if mode == "cloud" and job.source_dir is not None:
        for name in _NOT_CODE:
            if Path(job.source_dir, name).exists():
                yield f"source_dir contains {name}, which is uploaded too. Move it if the job does not need it."
