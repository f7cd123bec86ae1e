"""The job file: its keys, and how it is read together with the options that override it.

The annotations of the classes are the one description of the keys: the reader checks against them, and the help of
``lightning-sm submit`` and the reference are made of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from lightning_sm.job.variables import JOB_SECRET, MAX_RESTARTS, MODEL
from lightning_sm.submit.job_keys import JobKey
from lightning_sm.submit.job_reader import JobReader
from lightning_sm.submit.overrides import Override, parse_overrides
from lightning_sm.submit.problems import JobSource, raise_problems

_DAY_S = 24 * 60 * 60  # the default of SageMaker's SDKs
# Names that the SDKs and the API have for what stands below ``request``.
_REQUESTED = (
    *("vpc", "vpc_config", "networking", "subnets", "subnet_ids", "security_groups", "security_group_ids"),
    *("volume_kms_key", "volume_kms_key_id", "output_kms_key", "kms_key", "kms_key_id"),
    *("tensorboard", "tensorboard_output_config", "tensor_board_output_config"),
    *("mlflow", "mlflow_config", "mlflow_experiment_name", "mlflow_resource_arn"),
    *("max_pending_time_in_seconds", "max_pending", "max_retry_attempts", "maximum_retry_attempts", "retry_strategy"),
    *("keep_alive_period_in_seconds", "keep_alive", "warm_pool", "training_plan", "training_plan_arn"),
    *("infra_check_config", "enable_infra_check", "remote_debug_config", "enable_remote_debug"),
    *("encrypt_inter_container_traffic", "enable_inter_container_traffic_encryption", "enable_network_isolation"),
    *("instance_preferences", "content_type", "file_system_id", "file_system_access_mode"),
)


@dataclass
class Group:
    """Hosts of one instance type."""

    instance_type: Annotated[
        str, JobKey("Instance type of the hosts.", "ml.g5.xlarge", ("instance", "type", "machine_type"))
    ]
    count: Annotated[
        int,
        JobKey(
            "Number of hosts.",
            "2",
            ("instance_count", "initial_instance_count", "num_hosts", "num_nodes", "hosts", "nodes"),
            least=1,
        ),
    ] = 1


@dataclass
class InputChannel:
    """Input data, which hosts see as a folder."""

    uri: Annotated[
        str,
        JobKey(
            "`s3://bucket/prefix`; with `--local` also `file:///folder`.",
            "s3://bucket/prefix",
            ("s3_uri", "s3_data", "path", "url", "data_source"),
        ),
    ]
    groups: Annotated[
        list[str] | None,
        JobKey(
            "Groups that receive the channel; without the key, all.",
            "[data]",
            ("instance_groups", "instance_group_names", "group"),
        ),
    ] = None
    mode: Annotated[
        Literal["File", "FastFile", "Pipe"],
        JobKey(
            "`File` copies all files before the script starts; `FastFile` downloads a file when it is read.",
            "FastFile",
            ("input_mode", "training_input_mode"),
        ),
    ] = "File"
    distribution: Annotated[
        Literal["FullyReplicated", "ShardedByS3Key"],
        JobKey(
            "With `ShardedByS3Key`, each host receives a different part of the files.",
            "FullyReplicated",
            ("s3_data_distribution_type", "data_distribution_type"),
        ),
    ] = "FullyReplicated"


@dataclass
class Spot:
    """Spot capacity: cheaper, but AWS may interrupt the job."""

    max_wait_s: Annotated[
        int,
        JobKey(
            "Seconds from submission to the end of the job, including waiting and restarts; at least `max_run_s`.",
            "7200",
            ("max_wait", "max_wait_time_in_seconds", "max_wait_time"),
            least=1,
            unit="seconds",
        ),
    ]


@dataclass
class Retries:
    """Resubmission when there is no capacity."""

    max_tries: Annotated[
        int,
        JobKey("Maximum number of submissions; 1 disables retries.", "5", ("max_retries", "tries"), least=1),
    ] = 5
    first_pause_s: Annotated[
        float,
        JobKey(
            "Seconds before the second submission; doubled each time and shortened at random by up to a half.",
            "60",
            ("pause_s", "first_pause"),
            least=0,
            unit="seconds",
        ),
    ] = 60.0
    max_pause_s: Annotated[
        float, JobKey("Longest pause in seconds.", "1800", ("max_pause",), least=0, unit="seconds")
    ] = 1800.0


@dataclass
class Range:
    """Values of a hyperparameter that a tuning job may try: all from min to max, or those of a list."""

    min: Annotated[
        int | float | None,
        JobKey(
            "Smallest value. If `min` and `max` are both whole numbers, only whole numbers are tried.",
            "1e-4",
            ("min_value", "low", "lower"),
        ),
    ] = None
    max: Annotated[int | float | None, JobKey("Largest value.", "1e-1", ("max_value", "high", "upper"))] = None
    values: Annotated[
        list[Any] | None,
        JobKey("The values, instead of `min` and `max`; they keep their types.", "[adam, sgd]", ("choices", "value")),
    ] = None
    scale: Annotated[
        Literal["auto", "linear", "log", "reverse_log"],
        JobKey(
            "With `log` or `reverse_log`, the values near `min` or near `max` are tried more often.",
            "log",
            ("scaling_type", "scaling"),
        ),
    ] = "auto"


@dataclass
class Tune:
    """A tuning job: many training jobs with different hyperparameters."""

    objective: Annotated[
        str,
        JobKey(
            "Name of the metric, as `LineProgress` prints it, or one of `metric_patterns`.",
            "val_acc",
            ("objective_metric_name", "metric", "metric_name", "monitor"),
        ),
    ]
    ranges: Annotated[
        dict[str, Range],
        JobKey(
            "What is tried, by the name of the hyperparameter.",
            "{model.learning_rate: {min: 1e-4, max: 1e-1}}",
            ("hyperparameter_ranges", "parameter_ranges", "parameters"),
        ),
    ]
    direction: Annotated[
        Literal["maximize", "minimize"],
        JobKey("Whether the metric is to be as large or as small as possible.", "maximize", ("objective_type", "mode")),
    ]
    strategy: Annotated[
        Literal["bayesian", "random", "hyperband", "grid"],
        JobKey("How the next values are chosen.", "bayesian", ("search", "algorithm")),
    ] = "bayesian"
    max_jobs: Annotated[
        int | None,
        JobKey(
            "Number of training jobs; without the key 10, with `grid` all combinations.",
            "20",
            ("max_number_of_training_jobs", "num_jobs", "num_trials", "trials"),
            least=1,
        ),
    ] = None
    parallel_jobs: Annotated[
        int,
        JobKey(
            "How many of them run at the same time.",
            "2",
            ("max_parallel_jobs", "max_parallel_training_jobs"),
            least=1,
        ),
    ] = 1
    request: Annotated[
        dict[str, Any],
        JobKey(
            "Everything else that CreateHyperParameterTuningJob takes, by its own names.",
            "{HyperParameterTuningJobConfig: {TrainingJobEarlyStoppingType: Auto, RandomSeed: 1}}",
            (
                *("early_stopping", "early_stopping_type", "training_job_early_stopping_type", "random_seed", "seed"),
                *("warm_start", "warm_start_config", "max_runtime_in_seconds", "min_resource", "max_resource"),
            ),
        ),
    ] = field(default_factory=dict)


@dataclass
class Job:
    """A training job.

    Relative paths in a job file, or in options that are given together with one, start from the folder of the file.

    Attributes:
        source: What the job was read from; a changed copy has none.
    """

    image: Annotated[
        str,
        JobKey(
            "Docker image: `<account>.dkr.ecr.<region>.amazonaws.com/name:tag`, in the region of the job; with "
            "`--local` any local image.",
            "111122223333.dkr.ecr.eu-west-1.amazonaws.com/lightning-sm:latest",
            ("image_uri", "training_image", "docker_image", "container"),
        ),
    ]
    groups: Annotated[
        dict[str, Group],
        JobKey(
            "Instance groups by name. With more than one the cluster is "
            "[heterogeneous](../heterogeneous-clusters.md): hosts of groups named `data*` build the batches.",
            "{trainer: {instance_type: ml.g5.xlarge, count: 2}}",
            ("instance_groups", "group", "cluster", "resource_config", "compute"),
        ),
    ]
    role: Annotated[
        str | None,
        JobKey(
            "ARN of the [role](../submit.md#permissions) that the job runs under; not needed with `--local`.",
            "arn:aws:iam::111122223333:role/training",
            ("role_arn", "iam_role", "execution_role"),
        ),
    ] = None
    name: Annotated[
        str,
        JobKey(
            "Start of the job's name; the time is appended.",
            "digits",
            ("job_name", "base_job_name", "training_job_name"),
        ),
    ] = "lightning"
    channels: Annotated[
        dict[str, InputChannel],
        JobKey(
            "Input channels by name. The service accepts `groups` for all channels or for none; missing ones are "
            "filled in.",
            "{training: {uri: s3://bucket/prefix, groups: [data]}}",
            ("channel", "inputs", "input_data_config", "data", "input_channels"),
        ),
    ] = field(default_factory=dict)
    config: Annotated[
        str | None,
        JobKey(
            "Configuration file of the script (LightningCLI); its content becomes hyperparameters.",
            "configs/digits.yaml",
            ("config_file", "configuration"),
        ),
    ] = None
    hyperparameters: Annotated[
        dict[str, Any],
        JobKey(
            "Options of the script by name. They override `config`, and `--hyperparameters.data.batch_size=32` "
            "overrides both.",
            "{data.batch_size: 64}",
            ("hyper_parameters", "hparams", "params", "arguments", "args"),
        ),
    ] = field(default_factory=dict)
    subcommand: Annotated[str | None, JobKey("Subcommand of the script; without the key `fit`.", "fit")] = None
    script: Annotated[
        str | None,
        JobKey(
            "Training script, a path in `source_dir`; without both, the image's script.",
            "train.py",
            ("entry_point", "entry_script", "program"),
        ),
    ] = None
    source_dir: Annotated[
        str | None,
        JobKey(
            "Folder with [your own code](../submit.md#your-own-code) for an unchanged image; its `requirements.txt` is "
            "installed, and the image's entry point starts `script`.",
            "src",
            ("source", "source_code", "code", "code_dir"),
        ),
    ] = None
    build: Annotated[
        str | None,
        JobKey(
            "Folder from which `image` is [built and pushed](../submit.md#the-image) before the job is submitted.",
            ".",
            ("docker_build", "build_context", "context"),
        ),
    ] = None
    dockerfile: Annotated[
        str | None,
        JobKey("Dockerfile of `build`, if it is another one than that folder's `Dockerfile`.", "docker/Dockerfile"),
    ] = None
    environment: Annotated[
        dict[str, str],
        JobKey(
            f"Environment variables of all hosts; `{JOB_SECRET.name}`, a random secret of the job, is added.",
            "{NCCL_DEBUG: INFO}",
            ("env", "environ", "environment_variables", "variables"),
        ),
    ] = field(default_factory=dict)
    not_secret: Annotated[
        list[str],
        JobKey(
            "Hyperparameters and variables whose names or values look like [secrets](../submit.md#secrets), and may be "
            "read by whoever may describe the job.",
            "[model.pooler_token]",
        ),
    ] = field(default_factory=list)
    output: Annotated[
        str | None,
        JobKey(
            "S3 prefix for `model.tar.gz` and `output.tar.gz`; `source_dir` is uploaded below it. Without the key, the "
            "account's own bucket `sagemaker-<region>-<account>`, which is created if it does not exist.",
            "s3://bucket/output",
            ("output_path", "output_s3_uri", "s3_output_path", "output_dir", "output_data_config"),
        ),
    ] = None
    checkpoints: Annotated[
        str | None,
        JobKey(
            "S3 prefix that is synchronized with the checkpoint folder, in both directions. No output can be below it.",
            "s3://bucket/checkpoints",
            ("checkpoint_s3_uri", "checkpoint", "checkpoint_dir", "checkpoint_config"),
        ),
    ] = None
    model: Annotated[
        Literal["full", "weights", "none"],
        JobKey(
            f"What the job leaves as its model (`{MODEL.name}`): `full` (checkpoint, weights and configuration), "
            "`weights` (without the checkpoint), or `none`.",
            "weights",
        ),
    ] = "full"
    metrics: Annotated[
        list[str],
        JobKey(
            "Names of metrics, as `LineProgress` prints them, for CloudWatch and the console.", "[val_acc]", ("metric",)
        ),
    ] = field(default_factory=list)
    metric_patterns: Annotated[
        dict[str, str],
        JobKey(
            "Metrics from other log lines: name and regular expression, whose first group is the number.",
            "{loss: 'loss is ([0-9.]+)'}",
            ("metric_definitions",),
        ),
    ] = field(default_factory=dict)
    max_run_s: Annotated[
        int,
        JobKey(
            "Maximum training time in seconds.",
            "3600",
            ("max_run", "max_runtime_in_seconds", "max_runtime", "stopping_condition", "timeout", "timeout_s"),
            least=1,
            unit="seconds",
        ),
    ] = _DAY_S
    prices: Annotated[
        dict[str, float],
        JobKey(
            "Hourly prices of a host, by instance type or group, from which the most that the job can cost follows.",
            "{ml.g5.xlarge: 1.41}",
            ("price", "per_hour"),
        ),
    ] = field(default_factory=dict)
    max_cost: Annotated[
        float | None,
        JobKey(
            "Do not submit a job that can cost more, at `prices`, until `max_run_s` is over.",
            "20",
            ("budget", "cost_limit"),
        ),
    ] = None
    spot: Annotated[
        Spot | None,
        JobKey(
            "Use spot capacity.",
            "{max_wait_s: 7200}",
            ("use_spot_instances", "use_spot", "enable_managed_spot_training", "spot_instances"),
        ),
    ] = None
    retries: Annotated[
        Retries,
        JobKey(
            "Resubmission when there is no capacity.",
            "{max_tries: 5, first_pause_s: 60, max_pause_s: 1800}",
            ("retry",),
        ),
    ] = field(default_factory=Retries)
    max_restarts: Annotated[
        int,
        JobKey(
            "How many times the scripts of all trainer hosts "
            "[restart together](../lifecycle.md#restart-within-the-job) on the same hosts, from the latest checkpoint, "
            f"when one has failed (`{MAX_RESTARTS.name}`).",
            "3",
            ("restarts",),
            least=0,
        ),
    ] = 0
    volume_gb: Annotated[
        int,
        JobKey(
            "Disk size of each host in GB; channels in `File` mode must fit.",
            "100",
            ("volume_size", "volume_size_in_gb", "disk_size", "disk_gb", "volume"),
            least=1,
            unit="GB",
        ),
    ] = 30
    tags: Annotated[dict[str, str], JobKey("Tags of the job.", "{project: digits}", ("tag", "labels"))] = field(
        default_factory=dict
    )
    request: Annotated[
        dict[str, Any],
        JobKey(
            "[Everything else](../submit.md#other-settings) that CreateTrainingJob takes, by its own names.",
            "{VpcConfig: {Subnets: [subnet-1], SecurityGroupIds: [sg-1]}}",
            _REQUESTED,
        ),
    ] = field(default_factory=dict)
    tune: Annotated[
        Tune | None,
        JobKey(
            "Run a [tuning job](../submit.md#tuning-jobs): many training jobs with different hyperparameters.",
            "{objective: val_acc, direction: maximize, ranges: {model.learning_rate: {min: 1e-4, max: 1e-1}}}",
            ("tuner", "tuning", "hyper_parameter_tuning_job_config"),
        ),
    ] = None
    source: JobSource = field(default_factory=JobSource, init=False, compare=False, repr=False)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of all groups."""
        return sum(group.count for group in self.groups.values())

    def requested(self, place: str) -> Any:
        """Return what ``request`` says at a place, such as ``OutputDataConfig.KmsKeyId``; None if it says nothing."""
        value: Any = self.request
        for name in place.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def parse_job(path: str | os.PathLike[str] | None, overrides: Sequence[Override] = ()) -> Job:
    """Read a job, and leave it to the checks to report what is wrong with it.

    Args:
        path: The job file; None for a job that is described by options alone.
        overrides: Options that override the file.

    Returns:
        The job; its ``source`` has the problems, and the values that these are about are defaults.

    Raises:
        SubmitError: The file cannot be read.
    """
    reader = JobReader(Job)
    if path is not None:
        reader.read_file(path)
    for override in overrides:
        reader.override(override)
    job: Job = reader.build()
    # Paths start from the file.
    folder = Path.cwd() if path is None else Path(path).absolute().parent
    for name in ("config", "source_dir", "build", "dockerfile"):
        if getattr(job, name) is not None:
            setattr(job, name, str(folder / getattr(job, name)))
    job.source = reader.source
    return job


def read_job(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """Read a job file.

    Args:
        path: The file.
        overrides: Options that override the file, such as ``["--groups.trainer.count=4"]``.

    Raises:
        SubmitError: The file cannot be read, lacks a required key, has an unknown one, or a value of the wrong type;
            the message lists all problems, each with its line.
    """
    job = parse_job(path, parse_overrides(overrides, Job)[0])
    raise_problems(job.source.problems, job.source)
    return job
