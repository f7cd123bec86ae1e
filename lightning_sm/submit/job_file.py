"""The job file: its keys, and how it is read together with the options that override it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_sm.errors import SubmitError
from lightning_sm.job.redaction import HIDDEN

_DAY_S = 24 * 60 * 60  # the SDK's own default
_HYPERPARAMETER = "--hyperparameters."


@dataclass
class Group:
    """Hosts of one instance type.

    Attributes:
        instance_type: For example ml.g5.xlarge.
        count: Number of hosts.
    """

    instance_type: str
    count: int = 1


@dataclass
class Channel:
    """Input data, which hosts see as a folder.

    Attributes:
        uri: s3://bucket/prefix; with --local also file:///folder.
        groups: Names of the groups that receive the channel (default: all).
        mode: File copies all files before the script starts; FastFile downloads a file when it is read.
        distribution: With ShardedByS3Key each host receives a different part of the files.
        content_type: MIME type.
    """

    uri: str
    groups: list[str] | None = None
    mode: Literal["File", "FastFile", "Pipe"] = "File"
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    content_type: str | None = None


@dataclass
class Spot:
    """Spot capacity: cheaper, but AWS may interrupt the job.

    Attributes:
        max_wait_s: Seconds from submission to the end of the job, including waiting and restarts; at least max_run_s.
    """

    max_wait_s: int


@dataclass
class Vpc:
    """The network in which the hosts run.

    Attributes:
        subnets: Subnet ids.
        security_groups: Ids of security groups; one must allow all traffic from itself.
    """

    subnets: list[str]
    security_groups: list[str]


@dataclass
class Retries:
    """Resubmission when there is no capacity.

    Attributes:
        max_tries: Maximum number of submissions; 1 disables retries.
        first_pause_s: Seconds before the second submission; doubled each time and shortened at random by up to a half.
        max_pause_s: Longest pause.
    """

    max_tries: int = 5
    first_pause_s: float = 60.0
    max_pause_s: float = 1800.0


@dataclass
class Job:
    """A training job.

    Relative paths in a job file, or in options that are given together with one, start from the folder of the file.

    Attributes:
        image: Docker image: <account>.dkr.ecr.<region>.amazonaws.com/name:tag, or with --local any local image.
        groups: Instance groups by name. With more than one the cluster is heterogeneous; hosts of groups named data*
            build the batches.
        role: ARN of the role that the job runs under (not needed with --local).
        name: Start of the job's name; the time is appended.
        channels: Input channels by name.
        config: Configuration file of the script (LightningCLI); its content becomes hyperparameters.
        hyperparameters: Options of the script by name, such as data.batch_size. They override the config file.
        subcommand: Subcommand of the script (default: fit).
        script: Training script, relative to source_dir (default: the image's script).
        source_dir: Folder with your own code, which is sent with the job; its requirements.txt is installed.
        environment: Environment variables of all hosts.
        output: S3 prefix for the model and the logs (default: the bucket that the SDK creates for the account).
        checkpoints: S3 prefix that is synchronized with the checkpoint folder, in both directions.
        model: What the job leaves as its model (LIGHTNING_SM_MODEL): full (checkpoint, weights and configuration),
            weights (without the checkpoint), or none.
        tensorboard: S3 prefix to which TensorBoard files are uploaded during training.
        metrics: Names of metrics, as LineProgress prints them, for CloudWatch.
        metric_patterns: Metrics from other log lines: name and regular expression, whose first group is the number.
        max_run_s: Maximum training time in seconds.
        spot: Use spot capacity.
        retries: Resubmission when there is no capacity.
        max_restarts: How often the scripts of all trainer hosts are started again together, from the latest checkpoint,
            when one has failed (LIGHTNING_SM_MAX_RESTARTS).
        max_retry_attempts: How often SageMaker itself restarts a job after an internal error (1 to 30).
        keep_alive_s: Seconds that the hosts are kept, and billed, for the next job (warm pool).
        volume_gb: Disk size of each host in GB; channels in File mode must fit.
        encrypt_between_hosts: Encrypt the traffic between hosts, which makes it slower.
        vpc: Run the hosts in your own network.
        tags: Tags of the job.
        remote_debug: Allow a shell on the running hosts (SSM).
    """

    image: str
    groups: dict[str, Group]
    role: str | None = None
    name: str = "lightning"
    channels: dict[str, Channel] = field(default_factory=dict)
    config: str | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    subcommand: str | None = None
    script: str | None = None
    source_dir: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    output: str | None = None
    checkpoints: str | None = None
    model: Literal["full", "weights", "none"] = "full"
    tensorboard: str | None = None
    metrics: list[str] = field(default_factory=list)
    metric_patterns: dict[str, str] = field(default_factory=dict)
    max_run_s: int = _DAY_S
    spot: Spot | None = None
    retries: Retries = field(default_factory=Retries)
    max_restarts: int = 0
    max_retry_attempts: int | None = None
    keep_alive_s: int | None = None
    volume_gb: int = 30
    encrypt_between_hosts: bool = False
    vpc: Vpc | None = None
    tags: dict[str, str] = field(default_factory=dict)
    remote_debug: bool = False

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all groups."""
        return sum(group.count for group in self.groups.values())


def add_arguments(parser: ArgumentParser) -> None:
    """Add an option for every key of a job file, and ``--job`` for the file itself."""
    parser.add_argument("--job", action="config", help="job file: YAML with any of the options below")
    parser.add_class_arguments(Job, as_group=False)


def parse_job(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Job, Namespace]:
    """Parse options into a job.

    Args:
        parser: Has the arguments of ``add_arguments``, and perhaps others.
        argv: The options.

    Returns:
        The job, and all parsed options.

    Raises:
        ArgumentError: The options or the file are wrong; the message names key and value.
    """
    words, hyperparameters = _split_hyperparameters(argv)
    try:
        options = parser.parse_args(words)
    except ArgumentError as error:
        raise ArgumentError(None, _without_values(str(error))) from error
    # A key without a value, perhaps because all lines below it are comments, counts as missing.
    for name, default in vars(parser.get_defaults()).items():
        if options[name] is None:
            options[name] = default
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.49
    values = vars(instantiate(options))
    # Paths start from the last file if there are several.
    folder = Path(os.fspath(options.job[-1])).absolute().parent if options.job else Path.cwd()
    for name in ("config", "source_dir"):
        if values[name] is not None:
            values[name] = str(folder / values[name])
    job = Job(**{name: values[name] for name in Job.__dataclass_fields__})
    _check_names(job)
    for name, value in hyperparameters.items():
        # An option replaces the file's value of the same hyperparameter and of its parts. A value that contains it
        # can stay, because the script applies data.size after data.
        for stated in list(job.hyperparameters):
            if stated == name or stated.startswith(f"{name}."):
                del job.hyperparameters[stated]
        job.hyperparameters[name] = value
    return job, options


def read_job(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """Read a job file.

    Args:
        path: The file.
        overrides: Options that override the file, such as ``["--groups.trainer.count=4"]``.

    Raises:
        SubmitError: The file cannot be read, lacks a required key, has an unknown one, or a value of the wrong type.
    """
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    try:
        return parse_job(parser, ["--job", os.fspath(path), *overrides])[0]
    except ArgumentError as error:
        raise SubmitError(f"{os.fspath(path)}: {error}") from error


def _split_hyperparameters(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate ``--hyperparameters.NAME=VALUE`` from the other options.

    Dots in NAME are part of the hyperparameter's name; jsonargparse would take them for a path into nested dicts.
    """
    others: list[str] = []
    hyperparameters: dict[str, Any] = {}
    values = ArgumentParser(exit_on_error=False)
    values.add_argument("--value", type=Any)  # converts text as in a job file
    words = iter(argv)
    for word in words:
        if not word.startswith(_HYPERPARAMETER):
            others.append(word)
            continue
        name, equals, text = word.removeprefix(_HYPERPARAMETER).partition("=")
        value = text if equals else next(words, None)
        if value is None:
            raise ArgumentError(None, f"{word}: expected a value, as in {word}=1.")
        hyperparameters[name] = values.parse_args([f"--value={value}"]).value
    return others, hyperparameters


def _without_values(message: str) -> str:
    """Leave out of an error of jsonargparse the values of dicts, which may be secrets."""
    if not re.search(r'"(environment|hyperparameters)', message):
        return message
    return re.sub(r"(?is)(got value: ).*", rf"\g<1>{HIDDEN}", message)


def _check_names(job: Job) -> None:
    for key, value in vars(job).items():
        for name in value if isinstance(value, dict) else ():
            if not isinstance(name, str):
                raise ArgumentError(None, f"{key}: the name {name!r} is of type {type(name).__name__}; quote it.")
