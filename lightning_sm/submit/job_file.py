# ruff: noqa: RUF009 - key() creates the field of a dataclass
"""The job file: its keys, and how to read it together with the options that override it.

The fields of the classes are the only description of the keys. The reader checks files against them, and the help text
of ``lightning-sm submit`` and the reference are generated from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_sm.job.variables import JOB_SECRET, MAX_RESTARTS
from lightning_sm.submit.dataclass_fields import key
from lightning_sm.submit.job_reader import JobReader
from lightning_sm.submit.overrides import Override
from lightning_sm.submit.problems import Position

_DAY_S = 24 * 60 * 60  # the default time limit in SageMaker's SDKs


@dataclass
class Group:
    """Hosts of one instance type."""

    instance_type: str = key("Instance type of the hosts.", "ml.g5.xlarge")
    count: int = key("Number of hosts.", "2", ("instance_count", "num_hosts", "num_nodes"), least=1, default=1)


@dataclass
class InputChannel:
    """Input data, which hosts see as a folder."""

    uri: str = key("`s3://bucket/prefix`, or `file:///folder` with `--local`.", "s3://bucket/prefix", ("path", "url"))
    groups: list[str] | None = key(
        "Groups that receive the channel; defaults to all groups.", "[data]", ("instance_group_names",), default=None
    )
    mode: Literal["File", "FastFile", "Pipe"] = key(
        "`File` copies all files before the script starts; `FastFile` downloads a file when it is read.",
        "FastFile",
        default="File",
    )
    distribution: Literal["FullyReplicated", "ShardedByS3Key"] = key(
        "With `ShardedByS3Key`, each host receives a different part of the files.",
        "FullyReplicated",
        default="FullyReplicated",
    )


@dataclass
class Spot:
    """Spot capacity: cheaper, but AWS may interrupt the job."""

    max_wait_s: int = key(
        "Maximum seconds from submission to the job's end, including waiting and restarts; at least `max_run_s`.",
        "7200",
        ("max_wait", "max_wait_time_in_seconds"),
        least=1,
        unit="seconds",
    )


@dataclass
class Retries:
    """Resubmission when there is no capacity."""

    max_tries: int = key("Maximum number of submissions; 1 disables retries.", "5", least=1, default=5)
    first_pause_s: float = key(
        "Pause in seconds before the second submission; doubled each time, and randomly shortened by up to half.",
        "60",
        least=0,
        unit="seconds",
        default=60.0,
    )
    max_pause_s: float = key("Longest pause in seconds.", "1800", least=0, unit="seconds", default=1800.0)


@dataclass
class Range:
    """Values of a hyperparameter that a tuning job may try: a range from min to max, or a list."""

    min: float | None = key(
        "Smallest value. If `min` and `max` are both whole numbers, only whole numbers are tried.", "1e-4", default=None
    )
    max: float | None = key("Largest value.", "1e-1", default=None)
    values: list[Any] | None = key(
        "The values to try, instead of `min` and `max`; they keep their types.", "[adam, sgd]", default=None
    )
    scale: Literal["auto", "linear", "log", "reverse_log"] = key(
        "`log` tries values near `min` more often, and `reverse_log` values near `max`.", "log", default="auto"
    )


@dataclass
class Tune:
    """A tuning job: many training jobs with different hyperparameters."""

    objective: str = key("Name of the metric, as `LineProgress` prints it.", "val_acc", ("metric", "monitor"))
    ranges: dict[str, Range] = key(
        "Values to try, by hyperparameter name.", "{model.learning_rate: {min: 1e-4, max: 1e-1}}", ("parameters",)
    )
    direction: Literal["maximize", "minimize"] = key(
        "Whether to maximize or minimize the metric.", "maximize", ("objective_type", "mode")
    )
    strategy: Literal["bayesian", "random", "hyperband", "grid"] = key(
        "Algorithm that chooses the next values.", "bayesian", default="bayesian"
    )
    max_jobs: int | None = key(
        "Number of training jobs; defaults to 10, or to all combinations with `grid`.", "20", least=1, default=None
    )
    parallel_jobs: int = key("Number of training jobs to run at once.", "2", ("max_parallel_jobs",), least=1, default=1)
    request: dict[str, Any] = key(
        "Any other arguments of CreateHyperParameterTuningJob, under their API names.",
        "{HyperParameterTuningJobConfig: {TrainingJobEarlyStoppingType: Auto, RandomSeed: 1}}",
        ("early_stopping_type", "random_seed", "warm_start_config"),
        made=dict,
    )


@dataclass
class Job:
    """A training job.

    Relative paths in a job file, or in options given together with one, are relative to the file's folder.

    Attributes:
        positions: The position of each key.
    """

    image: str = key(
        "Docker image: `<account>.dkr.ecr.<region>.amazonaws.com/name:tag`, in the job's region, or any local "
        "image with `--local`.",
        "111122223333.dkr.ecr.eu-west-1.amazonaws.com/lightning-sm:latest",
        ("image_uri", "training_image", "container", "framework_version", "py_version"),
    )
    groups: dict[str, Group] = key(
        "Instance groups by name. With several, the cluster is [heterogeneous](../heterogeneous-clusters.md): "
        "hosts in groups named `data*` build the batches.",
        "{trainer: {instance_type: ml.g5.xlarge, count: 2}}",
        ("instance_groups", "resource_config", "compute"),
    )
    role: str | None = key(
        "ARN of the [role](../submit.md#permissions) that the job runs under; not needed with `--local`.",
        "arn:aws:iam::111122223333:role/training",
        default=None,
    )
    name: str = key(
        "Start of the job's name; the time is appended.", "digits", ("base_job_name", "job_name"), default="lightning"
    )
    channels: dict[str, InputChannel] = key(
        "Input channels by name. The service accepts `groups` for all channels or for none, so missing ones are "
        "filled in.",
        "{training: {uri: s3://bucket/prefix, groups: [data]}}",
        ("inputs", "input_data_config", "data"),
        made=dict,
    )
    config: str | None = key(
        "The script's configuration file (LightningCLI); its content becomes hyperparameters.",
        "configs/digits.yaml",
        default=None,
    )
    hyperparameters: dict[str, Any] = key(
        "Script options by name. They override `config`, and `--hyperparameters.data.batch_size=32` overrides both.",
        "{data.batch_size: 64}",
        ("hyper_parameters", "hparams", "params", "arguments", "args", "subcommand"),
        made=dict,
    )
    script: str | None = key(
        "Training script, as a path in `source_dir`. If neither key is set, the image's script runs.",
        "train.py",
        ("entry_point", "entry_script", "program"),
        default=None,
    )
    source_dir: str | None = key(
        "Folder with [your own code](../submit.md#your-own-code), to use with an unchanged image. Its "
        "`requirements.txt` is installed, and the image's entry point starts `script`.",
        "src",
        ("source", "source_code", "code"),
        default=None,
    )
    build: str | None = key(
        "Folder from which `image` is [built and pushed](../submit.md#the-image) before the job is submitted.",
        ".",
        default=None,
    )
    dockerfile: str | None = key(
        "Dockerfile for `build`; defaults to `Dockerfile` in that folder.", "docker/Dockerfile", default=None
    )
    environment: dict[str, str] = key(
        f"Environment variables for all hosts; `{JOB_SECRET.name}`, a random secret for the job, is added.",
        "{NCCL_DEBUG: INFO}",
        ("env", "variables"),
        made=dict,
    )
    not_secret: list[str] = key(
        "Hyperparameters and variables that look like [secrets](../submit.md#secrets), but may be shown to anyone who "
        "can describe the job.",
        "[model.pooler_token]",
        made=list,
    )
    output: str | None = key(
        "S3 prefix for `model.tar.gz` and `output.tar.gz`; `source_dir` is uploaded below it. Defaults to your "
        "account's bucket `sagemaker-<region>-<account>`, which is created if it does not exist.",
        "s3://bucket/output",
        ("output_path", "s3_output_path", "output_data_config"),
        default=None,
    )
    checkpoints: str | None = key(
        "S3 prefix that is synchronized with the checkpoint folder, in both directions. `output` must not be below it.",
        "s3://bucket/checkpoints",
        ("checkpoint_s3_uri", "checkpoint_config"),
        default=None,
    )
    metrics: list[str] = key(
        "Names of metrics, as `LineProgress` prints them, for CloudWatch and the console.",
        "[val_acc]",
        ("metric_definitions",),
        made=list,
    )
    max_run_s: int = key(
        "Maximum training time in seconds.",
        "3600",
        ("max_run", "max_runtime_in_seconds", "stopping_condition", "timeout"),
        least=1,
        unit="seconds",
        default=_DAY_S,
    )
    prices: dict[str, float] = key(
        "Hourly price of a host, by instance type or group; used to compute the job's maximum cost.",
        "{ml.g5.xlarge: 1.41}",
        least=0,
        made=dict,
    )
    max_cost: float | None = key(
        "Do not submit the job if it can cost more than this at `prices` within `max_run_s`.",
        "20",
        ("budget",),
        default=None,
    )
    spot: Spot | None = key(
        "Use spot capacity.", "{max_wait_s: 7200}", ("use_spot_instances", "enable_managed_spot_training"), default=None
    )
    retries: Retries = key(
        "Resubmission when there is no capacity.", "{max_tries: 5, first_pause_s: 60, max_pause_s: 1800}", made=Retries
    )
    max_restarts: int = key(
        "How many times the scripts of all trainer hosts [restart together](../lifecycle.md#restart-within-the-job) on "
        f"the same hosts, from the latest checkpoint, when one fails (`{MAX_RESTARTS.name}`).",
        "3",
        least=0,
        default=0,
    )
    volume_gb: int = key(
        "Disk size of each host in GB; channels in `File` mode must fit on it.",
        "100",
        ("volume_size", "volume_size_in_gb", "disk_size"),
        least=1,
        unit="GB",
        default=30,
    )
    tags: dict[str, str] = key("Tags of the job.", "{project: digits}", made=dict)
    # ``near`` lists the SDKs' names for settings that belong in ``request``.
    request: dict[str, Any] = key(
        "[Any other arguments](../submit.md#other-settings) of CreateTrainingJob, under their API names.",
        "{VpcConfig: {Subnets: [subnet-1], SecurityGroupIds: [sg-1]}}",
        (
            *("vpc_config", "networking", "subnets", "security_group_ids", "volume_kms_key", "output_kms_key"),
            *("tensorboard_output_config", "mlflow_config", "keep_alive_period_in_seconds", "max_retry_attempts"),
            *("training_plan", "enable_remote_debug", "enable_network_isolation", "encrypt_inter_container_traffic"),
            *("disable_profiler", "profiler_config", "debugger_hook_config"),
        ),
        made=dict,
    )
    tune: Tune | None = key(
        "Run a [tuning job](../submit.md#tuning-jobs): many training jobs with different hyperparameters.",
        "{objective: val_acc, direction: maximize, ranges: {model.learning_rate: {min: 1e-4, max: 1e-1}}}",
        ("tuner", "tuning"),
        default=None,
    )
    positions: Mapping[str, Position] = field(default_factory=dict, compare=False, repr=False)

    def requested(self, place: str) -> Any:
        """Return the value at a path in ``request``, such as ``OutputDataConfig.KmsKeyId``; None if there is none."""
        value: Any = self.request
        for name in place.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def read_job(path: str | os.PathLike[str] | None, overrides: Sequence[Override] = ()) -> Job:
    """Read a job file.

    Args:
        path: The file; None if options alone describe the job.
        overrides: Options that override the file.

    Raises:
        SubmitError: The file cannot be read, lacks a required key, or has an unknown key or a value of the wrong type.
            The message lists all problems, each with its line.
    """
    reader = JobReader(Job)
    if path is not None:
        reader.read_file(path)
    for override in overrides:
        reader.override(override)
    job: Job = reader.build()
    folder = Path.cwd() if path is None else Path(path).absolute().parent
    for name in ("config", "source_dir", "build", "dockerfile"):
        if getattr(job, name) is not None:
            setattr(job, name, str(folder / getattr(job, name)))
    job.positions = reader.positions
    return job
