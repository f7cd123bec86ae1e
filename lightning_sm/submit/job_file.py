"""The job file: its keys, and how it is read together with the options that override it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_sm.errors import SubmitError
from lightning_sm.job.redaction import HIDDEN

_DAY_S = 24 * 60 * 60  # the SDK's own default
_HYPERPARAMETER = "--hyperparameters."
# How jsonargparse names a key that it does not know.
_UNKNOWN_KEY = re.compile(
    r"""[Oo]ption ['"]([\w.]+)['"] is not accepted|does not accept option ['"]([\w.]+)['"]|"""
    r"""[Kk]ey ['"]([\w.]+)['"] is not expected|[Uu]nrecognized arguments: --([\w-]+)"""
)


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
class InputChannel:
    """Input data, which hosts see as a folder.

    Attributes:
        uri: s3://bucket/prefix; a folder of a file system, fsx://<id>/<mount name>/folder (FSx for Lustre) or
            efs://<id>/folder; with --local also file:///folder.
        groups: Names of the groups that receive the channel (default: all). All hosts mount a file system.
        mode: File copies all files before the script starts; FastFile downloads a file when it is read.
        distribution: With ShardedByS3Key each host receives a different part of the files.
        content_type: MIME type.
        access: Whether the script may write to a file system (rw) or only read (ro).
    """

    uri: str
    groups: list[str] | None = None
    mode: Literal["File", "FastFile", "Pipe"] = "File"
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    content_type: str | None = None
    access: Literal["ro", "rw"] = "ro"


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
class Range:
    """Values of a hyperparameter that a tuning job may try: all from min to max, or those of a list.

    Attributes:
        min: Smallest value. If min and max are both whole numbers, only whole numbers are tried.
        max: Largest value.
        values: The values, instead of min and max.
        scale: With log or reverse_log, the values near min or near max are tried more often.
    """

    min: int | float | None = None
    max: int | float | None = None
    values: list[Any] | None = None
    scale: Literal["auto", "linear", "log", "reverse_log"] = "auto"


@dataclass
class Tune:
    """A tuning job: many training jobs with different hyperparameters.

    Attributes:
        objective: Name of the metric, as LineProgress prints it, or one of metric_patterns.
        ranges: What is tried, by the name of the hyperparameter.
        direction: Whether the metric is to be as large or as small as possible.
        strategy: How the next values are chosen.
        max_jobs: Number of training jobs (default: 10; with grid: all combinations).
        parallel_jobs: How many of them run at the same time.
        max_run_s: Seconds after which the tuning job ends.
        early_stopping: Stop training jobs that are unlikely to become the best one.
        min_epochs: With hyperband: a training job is not stopped before it has logged the metric this many times.
        max_epochs: With hyperband: maximum number of times that a training job logs the metric.
        warm_start: Names of earlier tuning jobs whose results are used.
        warm_start_kind: Whether data and script are those of the earlier jobs (identical), or not (transfer).
        seed: Seed of the choice of values.
    """

    objective: str
    ranges: dict[str, Range]
    direction: Literal["maximize", "minimize"]
    strategy: Literal["bayesian", "random", "hyperband", "grid"] = "bayesian"
    max_jobs: int | None = None
    parallel_jobs: int = 1
    max_run_s: int | None = None
    early_stopping: bool = False
    min_epochs: int | None = None
    max_epochs: int | None = None
    warm_start: list[str] = field(default_factory=list)
    warm_start_kind: Literal["identical", "transfer"] = "transfer"
    seed: int | None = None


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
        local_script: A copy of the image's script on this machine, against which the hyperparameters are checked
            before anything is sent (default: script in source_dir).
        environment: Environment variables of all hosts.
        output: S3 prefix for the model and the logs (default: the bucket that the SDK creates for the account).
        checkpoints: S3 prefix that is synchronized with the checkpoint folder, in both directions.
        model: What the job leaves as its model (LIGHTNING_SM_MODEL): full (checkpoint, weights and configuration),
            weights (without the checkpoint), or none.
        tensorboard: S3 prefix to which TensorBoard files are uploaded during training.
        mlflow: ARN of a tracking server or an app of SageMaker's managed MLflow, or another tracking URI, for a script
            that logs with an MLFlowLogger (MLFLOW_TRACKING_URI).
        metrics: Names of metrics, as LineProgress prints them, for CloudWatch.
        metric_patterns: Metrics from other log lines: name and regular expression, whose first group is the number.
        max_run_s: Maximum training time in seconds.
        spot: Use spot capacity.
        retries: Resubmission when there is no capacity.
        max_restarts: How many times the scripts of all trainer hosts restart together, from the latest checkpoint,
            when one has failed (LIGHTNING_SM_MAX_RESTARTS).
        max_retry_attempts: How many times SageMaker itself restarts a job after an internal error (1 to 30).
        keep_alive_s: Seconds that the hosts are kept, and billed, for the next job (warm pool).
        volume_gb: Disk size of each host in GB; channels in File mode must fit.
        volume_kms_key: KMS key (id, alias or ARN) with which the disks of the hosts are encrypted.
        output_kms_key: KMS key with which model and output are encrypted.
        training_plan: ARN of a training plan, whose reserved hosts are used.
        encrypt_between_hosts: Encrypt the traffic between hosts, which makes it slower.
        network_isolation: The hosts reach each other and nothing else; the service copies channels and output.
        vpc: Run the hosts in your own network.
        tags: Tags of the job.
        remote_debug: Allow a shell on the running hosts (SSM).
        tune: Run a tuning job: many training jobs with different hyperparameters.
    """

    image: str
    groups: dict[str, Group]
    role: str | None = None
    name: str = "lightning"
    channels: dict[str, InputChannel] = field(default_factory=dict)
    config: str | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    subcommand: str | None = None
    script: str | None = None
    source_dir: str | None = None
    local_script: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    output: str | None = None
    checkpoints: str | None = None
    model: Literal["full", "weights", "none"] = "full"
    tensorboard: str | None = None
    mlflow: str | None = None
    metrics: list[str] = field(default_factory=list)
    metric_patterns: dict[str, str] = field(default_factory=dict)
    max_run_s: int = _DAY_S
    spot: Spot | None = None
    retries: Retries = field(default_factory=Retries)
    max_restarts: int = 0
    max_retry_attempts: int | None = None
    keep_alive_s: int | None = None
    volume_gb: int = 30
    volume_kms_key: str | None = None
    output_kms_key: str | None = None
    training_plan: str | None = None
    encrypt_between_hosts: bool = False
    network_isolation: bool = False
    vpc: Vpc | None = None
    tags: dict[str, str] = field(default_factory=dict)
    remote_debug: bool = False
    tune: Tune | None = None

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
        raise ArgumentError(None, _with_similar_key(_without_values(str(error)))) from error
    # A key without a value, perhaps because all lines below it are comments, counts as missing.
    for name, default in vars(parser.get_defaults()).items():
        if options[name] is None:
            options[name] = default
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.49
    values = vars(instantiate(options))
    # Paths start from the last file if there are several.
    folder = Path(os.fspath(options.job[-1])).absolute().parent if options.job else Path.cwd()
    for name in ("config", "source_dir", "local_script"):
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


def _with_similar_key(message: str) -> str:
    """Add the key that was probably meant to an error about an unknown one."""
    unknown = _UNKNOWN_KEY.search(message)
    if unknown is None:
        return message
    word = next(filter(None, unknown.groups()))
    close = difflib.get_close_matches(word, _all_keys(Job), n=1)
    return f"{message}\nDid you mean {close[0]}?" if close else message


def _all_keys(section: type) -> set[str]:
    """Return the keys of a section of a job file, and of the sections below it."""
    keys: set[str] = set()
    for name, kind in get_type_hints(section).items():
        keys.add(name)
        for part in (kind, *get_args(kind)):
            if is_dataclass(part):
                keys |= _all_keys(cast(type, part))
    return keys


def _check_names(job: Job) -> None:
    for key, value in vars(job).items():
        for name in value if isinstance(value, dict) else ():
            if not isinstance(name, str):
                raise ArgumentError(None, f"{key}: the name {name!r} is of type {type(name).__name__}; quote it.")
