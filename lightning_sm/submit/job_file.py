"""Reading a job: from a YAML file and the options that win over it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_sm.errors import SubmitError

Mode = Literal["dry-run", "local", "cloud"]
# More than any job of a day needs, and the SDK's own default.
_DAY_S = 24 * 60 * 60


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
        groups: Names of the groups that get it (default: all).
        mode: File copies everything before the script starts; FastFile fetches what is read, when it is read.
        distribution: ShardedByS3Key gives each host another part of the files.
        content_type: MIME type, passed on.
    """

    uri: str
    groups: list[str] | None = None
    mode: Literal["File", "FastFile", "Pipe"] = "File"
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = "FullyReplicated"
    content_type: str | None = None


@dataclass
class Spot:
    """Spot capacity: cheaper, and interrupted at times.

    Attributes:
        max_wait_s: Seconds from submission to the end, waiting and restarts included; at least max_run_s.
    """

    max_wait_s: int


@dataclass
class Vpc:
    """The network that the hosts are put into.

    Attributes:
        subnets: Subnet ids.
        security_groups: Ids of security groups; one must allow all traffic from itself.
    """

    subnets: list[str]
    security_groups: list[str]


@dataclass
class Retries:
    """What to do when there is no capacity: submit again, later.

    Attributes:
        max_tries: Submissions at most; 1 for no second one.
        first_pause_s: Seconds before the second submission, doubled each time and drawn at random around that.
        max_pause_s: Longest pause.
    """

    max_tries: int = 5
    first_pause_s: float = 60.0
    max_pause_s: float = 1800.0


@dataclass
class Job:
    """A training job.

    Relative paths in a job file, or in options that go with one, start from the folder of the file.

    Attributes:
        image: The image: <account>.dkr.ecr.<region>.amazonaws.com/name:tag, or with --local any that Docker knows.
        groups: Instance groups by name. One makes an ordinary job, several a heterogeneous one; hosts of groups
            named data* make the batches.
        role: ARN of the role that the job runs under (needless with --local).
        name: Beginning of the job's name; the time is added.
        channels: Input channels by name.
        config: Configuration file of the script (LightningCLI); its content becomes hyperparameters.
        hyperparameters: Options of the script by name, such as data.batch_size. They win over the config file.
        subcommand: Subcommand of the script (default: fit).
        script: Training script, relative to source_dir (default: the one that the image names).
        source_dir: Folder with code of yours, which goes along with the job; its requirements.txt is installed.
        environment: Environment variables of all hosts.
        output: S3 prefix for the model and the logs (default: the bucket that the SDK makes for the account).
        checkpoints: S3 prefix that the checkpoint folder is synchronised with, in both directions.
        tensorboard: S3 prefix that TensorBoard files are uploaded to during training.
        metrics: Names of metrics, as LineProgress prints them, for CloudWatch.
        metric_patterns: Metrics from other lines: name and regular expression, whose first group is the number.
        max_run_s: Seconds of training at most.
        spot: Use spot capacity.
        retries: When there is no capacity.
        max_retry_attempts: How often the service itself restarts a job after one of its own errors (1 to 30).
        keep_alive_s: Seconds that the hosts are kept for the next job (warm pool), and paid for.
        volume_gb: Size of each host's disk; channels in File mode must fit.
        encrypt_between_hosts: Encrypt what hosts send to each other. It costs speed.
        vpc: Put the hosts into a network of yours.
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
    tensorboard: str | None = None
    metrics: list[str] = field(default_factory=list)
    metric_patterns: dict[str, str] = field(default_factory=dict)
    max_run_s: int = _DAY_S
    spot: Spot | None = None
    retries: Retries = field(default_factory=Retries)
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


_HYPERPARAMETER = "--hyperparameters."


def add_arguments(parser: ArgumentParser) -> None:
    """Add an option for every key of a job file, and one for the file itself.

    Args:
        parser: The parser.
    """
    parser.add_argument("--job", action="config", help="YAML file with any of the options below")
    parser.add_class_arguments(Job, as_group=False)


def parse_job(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Job, Namespace]:
    """Parse options, and make the job of them.

    Args:
        parser: Has the arguments of ``add_arguments``, and perhaps others.
        argv: The options.

    Returns:
        The job, and everything that was parsed.

    Raises:
        ArgumentError: The options or the file are wrong; the message names key and value.
    """
    words, hyperparameters = _split_hyperparameters(argv)
    options = parser.parse_args(words)
    # A key without a value, perhaps because all of its lines are comments, is as good as none.
    for name, default in vars(parser.get_defaults()).items():
        options[name] = default if options[name] is None else options[name]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.49
    values = vars(instantiate(options))
    # The last file, where there are several.
    folder = Path(os.fspath(options.job[-1])).absolute().parent if options.job else Path.cwd()
    for name in ("config", "source_dir"):
        values[name] = None if values[name] is None else str(folder / values[name])
    job = Job(**{name: values[name] for name in Job.__dataclass_fields__})
    _check_names(job)
    _override(job.hyperparameters, hyperparameters)
    return job, options


def _split_hyperparameters(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Take out ``--hyperparameters.NAME=VALUE``: NAME is one key, dots and all, and not a path into a dict."""
    words, hyperparameters, left = list[str](), dict[str, Any](), list(argv)
    values = ArgumentParser(exit_on_error=False)
    values.add_argument("--value", type=Any)  # reads text as values in a job file are read
    while left:
        word = left.pop(0)
        if not word.startswith(_HYPERPARAMETER):
            words.append(word)
            continue
        name, equals, text = word.removeprefix(_HYPERPARAMETER).partition("=")
        if not equals and not left:
            raise ArgumentError(None, f"{word}: expected a value, as in {word}=1.")
        text = text if equals else left.pop(0)
        hyperparameters[name] = values.parse_args([f"--value={text}"]).value
    return words, hyperparameters


def _override(hyperparameters: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Put options over the file's values: those of the same name, of a part of it, and of what it is a part of."""
    for name, value in options.items():
        for stated in [key for key in hyperparameters if key == name or key.startswith(f"{name}.")]:
            del hyperparameters[stated]
        hyperparameters[name] = value  # the last one wins, and what is dotted wins over a dict


def _check_names(job: Job) -> None:
    for key, value in vars(job).items():
        wrong = [name for name in value if not isinstance(name, str)] if isinstance(value, dict) else []
        if wrong:
            raise ArgumentError(None, f"{key}: the name {wrong[0]!r} is a {type(wrong[0]).__name__}; put it in quotes.")


def read_job(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """Read a job file.

    Args:
        path: The file.
        overrides: Options that win over the file, such as ``["--groups.trainer.count=4"]``.

    Raises:
        SubmitError: The file cannot be read, has an unknown key, a value of the wrong type, or lacks a key.
    """
    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    try:
        return parse_job(parser, ["--job", os.fspath(path), *overrides])[0]
    except ArgumentError as error:
        raise SubmitError(f"{os.fspath(path)}: {error}") from error
