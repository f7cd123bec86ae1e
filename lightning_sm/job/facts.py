"""The facts of a SageMaker training job, read once and frozen.

The service, the sagemaker-training toolkit, the local modes of SDK v2 and v3, and custom images each set a different
part of the container contract. ``SageMakerJob`` reads these sources in a fixed order, and records where the hosts
came from.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from lightning_sm.errors import JobConfigError
from lightning_sm.job.host_keys import job_key
from lightning_sm.job.hyperparameters import is_tuned, unquoted
from lightning_sm.job.variables import DATA_GROUPS, DEVICES, HOST_ADDRESSES, MAIN_PORT, Setting, whole_number

# The toolkit's name for the only group of a job without instance groups (sagemaker-training, environment.py).
SINGLE_GROUP = "homogeneousCluster"
# SDK v3 ships the user's code and its own drivers as input channels with these names. SDK v2 ships the code as a
# channel if the hosts have no network.
_SDK_V3_DRIVERS_CHANNEL = "sm_drivers"
CODE_CHANNEL = "code"
CODE_CHANNEL_DIR = f"/opt/ml/input/data/{CODE_CHANNEL}"
# Number of NVIDIA GPUs on this host, set by local mode and sagemaker-training.
_NUM_GPUS = Setting[int | None]("SM_NUM_GPUS", whole_number(0, 1024), None)
# The hyperparameter with which the SDK requests SageMaker's data parallel library (SMDDP).
_SMDDP = "sagemaker_distributed_dataparallel_enabled"

_T = TypeVar("_T")
_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Names = Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1)]


class _GroupEntry(msgspec.Struct):
    """An entry of ``instance_groups``."""

    instance_group_name: _Name
    hosts: _Names
    instance_type: str | None = None


class _ResourceConfig(msgspec.Struct):
    """The content of ``resourceconfig.json``."""

    hosts: _Names
    current_host: _Name
    network_interface_name: str | None = None
    current_instance_type: str | None = None
    instance_groups: list[_GroupEntry] | None = None


class _ChannelConfig(msgspec.Struct, rename="pascal"):
    """The settings of a channel in ``inputdataconfig.json``."""

    training_input_mode: str | None = None
    s3_distribution_type: str | None = None


class _Synchronised(msgspec.Struct, rename={"local_path": "LocalPath", "s3_uri": "S3Uri"}):
    """The content of ``checkpointconfig.json`` and ``tensorboardoutputconfig.json``."""

    local_path: str | None = None
    s3_uri: str | None = None


@dataclass(frozen=True)
class InstanceGroup:
    """One instance group of a job.

    Attributes:
        name: Name of the group, as given to ``Estimator(instance_groups=...)``.
        hosts: Names of its hosts, in the service's order (shuffled).
        instance_type: For example ``ml.g5.xlarge``; None if unknown.
    """

    name: str
    hosts: tuple[str, ...]
    instance_type: str | None = None


@dataclass(frozen=True)
class Channel:
    """One input channel as this host sees it.

    Attributes:
        name: Name of the channel, as given to ``Estimator.fit(inputs=...)``.
        path: Folder of the channel; in Pipe mode the common prefix of its FIFOs.
        mode: ``File``, ``FastFile`` or ``Pipe``.
        distribution: ``FullyReplicated``, or ``ShardedByS3Key`` if each host receives different files.
    """

    name: str
    path: Path
    mode: str = "File"
    distribution: str = "FullyReplicated"


@dataclass(frozen=True)
class SageMakerJob:
    """The facts of a training job, as seen from one of its hosts.

    Attributes:
        current_host: Name of this host, for example ``algo-1``.
        hosts: Names of all hosts, in the source's order (the service sorts them as text).
        groups: Instance groups; exactly one in a homogeneous job.
        source: File or variable that the hosts came from, for error messages.
        has_own_file: Whether the hosts came from ``resourceconfig.json``, which always describes this host.
            Variables may describe rank 0's host instead, if mpirun passed them on.
        base_dir: The folder that SageMaker calls ``/opt/ml``.
        network_interface: Interface named by the service. It may not exist (SDK v3 writes one that does not).
        channels: Input channels of this host, by name.
        hyperparameters: The strings of ``hyperparameters.json``, undecoded.
        checkpoint_dir: Folder that is synchronised with S3, or None if the job has no checkpoint configuration.
        checkpoint_uri: S3 address of the checkpoint folder, if the job has one.
        tensorboard_dir: Folder that is uploaded during training, or None if the job has no TensorBoard output.
        name: Name of the training job, if known.
        run_key: 32 hexadecimal digits by which loggers recognise the job: the same in every attempt, but different for
            a job with the same name in another account or region. None if the job's name is unknown.
        num_gpus: Number of NVIDIA GPUs on this host.
        addresses: IP address by host name, for hosts whose names do not resolve (``LIGHTNING_SM_HOST_ADDRESSES``).
        data_groups: Groups that serve data (``LIGHTNING_SM_DATA_GROUPS``), or None to choose by rule.
        main_port: Port of rank 0 (``LIGHTNING_SM_MAIN_PORT``), or None to derive it from the job.
        devices: Number of processes on each trainer host (``LIGHTNING_SM_DEVICES``), or None for all accelerators.
    """

    current_host: str
    hosts: tuple[str, ...]
    groups: tuple[InstanceGroup, ...]
    source: str
    base_dir: Path = Path("/opt/ml")
    network_interface: str | None = None
    channels: Mapping[str, Channel] = field(default_factory=dict)
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    checkpoint_dir: Path | None = None
    checkpoint_uri: str | None = None
    tensorboard_dir: Path | None = None
    name: str | None = None
    run_key: str | None = None
    num_gpus: int = 0
    addresses: Mapping[str, str] = field(default_factory=dict)
    data_groups: tuple[str, ...] | None = None
    main_port: int | None = None
    devices: int | None = None
    has_own_file: bool = True

    @property
    def is_heterogeneous(self) -> bool:
        """Whether the job has more than one instance group; ``instance_groups`` exists in homogeneous jobs, too."""
        return len(self.groups) > 1

    @property
    def current_group(self) -> InstanceGroup:
        """The instance group of this host."""
        return next(group for group in self.groups if self.current_host in group.hosts)

    @property
    def shares_machine(self) -> bool:
        """Whether the job's hosts share this machine, in which case this host has a loopback address."""
        try:
            return ipaddress.ip_address(self.addresses.get(self.current_host, "")).is_loopback
        except ValueError:
            return False

    @property
    def asks_for_smddp(self) -> bool:
        """Whether ``distribution={...}`` requests SageMaker's data parallel library (SMDDP).

        Also true for ``pytorchddp``, for which SDK v2 sends the same hyperparameters (sagemaker 2.257.7,
        pytorch/estimator.py, ``PyTorch.__init__``).
        """
        return self.hyperparameters.get(_SMDDP, "").lower() == "true"

    @property
    def has_upload_agent(self) -> bool:
        """Whether SageMaker's agent uploads the checkpoint folder while the job runs."""
        return self.checkpoint_dir is not None and self.checkpoint_uri is not None

    @property
    def model_dir(self) -> Path:
        """Folder that becomes ``model.tar.gz`` when the job ends; one archive holds the files of all hosts."""
        return self.base_dir / "model"

    @property
    def output_dir(self) -> Path:
        """Folder of the ``failure`` file."""
        return self.base_dir / "output"

    @property
    def host_output_dir(self) -> Path:
        """This host's folder in ``output.tar.gz``, separate so that files of the same name do not collide."""
        return self.output_dir / "data" / self.current_host

    @property
    def code_dir(self) -> Path:
        """Folder of the user's code, by sagemaker-training's convention."""
        return self.base_dir / "code"

    @classmethod
    def from_environment(
        cls, env: Mapping[str, str] = os.environ, base_dir: str | os.PathLike[str] | None = None
    ) -> SageMakerJob | None:
        """Read the facts of the job that this process runs in.

        Hosts and groups come from ``resourceconfig.json``, else ``SM_RESOURCE_CONFIG``, else ``SM_HOSTS`` and
        ``SM_CURRENT_HOST``. Only the file always describes this host, because mpirun passes rank 0's variables to all
        hosts.

        Args:
            env: Environment variables.
            base_dir: The folder to use for ``/opt/ml``. Defaults to ``SAGEMAKER_BASE_DIR``, else ``/opt/ml``.

        Returns:
            The job, or None outside SageMaker, where neither the file nor the variables exist.

        Raises:
            JobConfigError: A source is present but malformed; the message names the file, field and value.

        Source:
            SageMaker developer guide, "How Amazon SageMaker Provides Training Information"; for
            ``checkpointconfig.json`` and ``tensorboardoutputconfig.json``, the containers that read them
            (sagemaker-xgboost-container, sagemaker-debugger).
        """
        base = Path(base_dir) if base_dir is not None else base_directory(env)
        config_dir = base / "input" / "config"
        source, resources = _read_resources(env, config_dir)
        if resources is None:
            return None
        hosts = resources.hosts
        if resources.current_host not in hosts:
            raise JobConfigError(f"{source}: current_host is {resources.current_host!r}, not one of {list(hosts)}.")
        hyperparameters = _hyperparameters(env, config_dir)
        checkpoint = read_json_file(config_dir / "checkpointconfig.json", _Synchronised)
        tensorboard = read_json_file(config_dir / "tensorboardoutputconfig.json", _Synchronised)
        name = env.get("TRAINING_JOB_NAME") or env.get("SAGEMAKER_JOB_NAME") or _name_from_toolkit(env)
        identity = env.get("TRAINING_JOB_ARN") or name
        return cls(
            current_host=resources.current_host,
            hosts=hosts,
            groups=_groups(source, resources),
            source=source,
            has_own_file=(config_dir / "resourceconfig.json").exists(),
            base_dir=base,
            network_interface=resources.network_interface_name or None,
            channels=_channels(env, base, config_dir, hyperparameters),
            hyperparameters=hyperparameters,
            checkpoint_dir=_checkpoint_dir(checkpoint, base, hyperparameters, name),
            checkpoint_uri=(checkpoint.s3_uri or None) if checkpoint else None,
            tensorboard_dir=_local_path(tensorboard, base / "output" / "tensorboard"),
            name=name,
            run_key=None if identity is None else job_key("runs of loggers", identity, env).hex()[:32],
            num_gpus=_num_gpus(env),
            addresses=HOST_ADDRESSES.read(env),
            data_groups=DATA_GROUPS.read(env),
            main_port=MAIN_PORT.read(env),
            devices=DEVICES.read(env),
        )


def _checkpoint_dir(
    checkpoint: _Synchronised | None, base: Path, hyperparameters: Mapping[str, str], name: str | None
) -> Path | None:
    """Return the checkpoint folder; in a tuning job, a subfolder for this training job.

    All training jobs of a tuning job have the same S3 address; without subfolders, one would resume from another's
    checkpoint.
    """
    folder = _local_path(checkpoint, base / "checkpoints")
    return folder / name if folder is not None and name is not None and is_tuned(hyperparameters) else folder


def base_directory(env: Mapping[str, str]) -> Path:
    """Return the folder that SageMaker calls ``/opt/ml``, or its replacement, ``SAGEMAKER_BASE_DIR``."""
    return Path(env.get("SAGEMAKER_BASE_DIR") or "/opt/ml")


def _read_resources(env: Mapping[str, str], config_dir: Path) -> tuple[str, _ResourceConfig | None]:
    """Return the name of the file or variable with the hosts, and its content."""
    file = config_dir / "resourceconfig.json"
    config = read_json_file(file, _ResourceConfig)
    if config is not None:
        return str(file), config
    config = _read_variable(env, "SM_RESOURCE_CONFIG", _ResourceConfig)
    if config is not None:
        return "SM_RESOURCE_CONFIG", config
    hosts = _read_variable(env, "SM_HOSTS", _Names)
    if hosts is None:
        return "", None
    fields = {
        "hosts": hosts,
        "current_host": env.get("SM_CURRENT_HOST"),
        "network_interface_name": env.get("SM_NETWORK_INTERFACE_NAME"),
        "instance_groups": list((_read_variable(env, "SM_INSTANCE_GROUPS_DICT", dict[str, Any]) or {}).values()),
    }
    source = "SM_HOSTS/SM_CURRENT_HOST"
    return source, _converted(source, fields, _ResourceConfig)


def _groups(source: str, resources: _ResourceConfig) -> tuple[InstanceGroup, ...]:
    """Return the instance groups after checking that they partition the hosts."""
    groups = tuple(
        InstanceGroup(group.instance_group_name, group.hosts, group.instance_type or None)
        for group in resources.instance_groups or ()
    )
    if not groups:  # local modes of SDK v2 and v3 write none
        groups = (InstanceGroup(SINGLE_GROUP, resources.hosts, resources.current_instance_type or None),)
    hosts = [host for group in groups for host in group.hosts]
    names = [group.name for group in groups]
    if sorted(hosts) != sorted(set(resources.hosts)) or len(set(names)) < len(names):
        raise JobConfigError(
            f"{source}: the groups {names} have the hosts {hosts}; expected distinct names, and each of the hosts "
            f"{list(resources.hosts)} once."
        )
    return groups


def _channels(
    env: Mapping[str, str], base: Path, config_dir: Path, hyperparameters: Mapping[str, str]
) -> dict[str, Channel]:
    kind = dict[str, _ChannelConfig]
    configs = read_json_file(config_dir / "inputdataconfig.json", kind)
    if configs is None:
        configs = _read_variable(env, "SM_INPUT_DATA_CONFIG", kind) or {}
    channels = {
        name: Channel(
            name,
            base / "input" / "data" / name,
            config.training_input_mode or "File",
            config.s3_distribution_type or "FullyReplicated",
        )
        for name, config in configs.items()
    }
    code = unquoted(hyperparameters.get("sagemaker_submit_directory")) or ""
    if _SDK_V3_DRIVERS_CHANNEL in channels or f"{code}/".startswith(f"{CODE_CHANNEL_DIR}/"):
        for name in (_SDK_V3_DRIVERS_CHANNEL, CODE_CHANNEL):
            channels.pop(name, None)
    return channels


def _hyperparameters(env: Mapping[str, str], config_dir: Path) -> dict[str, str]:
    values = read_json_file(config_dir / "hyperparameters.json", dict[str, Any])
    if values is not None:
        # The API accepts only strings, but containers that write the file themselves may use other JSON values.
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    # The toolkit decoded these values; turn them back into text, as in the file.
    decoded = _read_variable(env, "SM_HPS", dict[str, Any]) or {}
    return {name: json.dumps(value) for name, value in decoded.items()}


def _local_path(stated: _Synchronised | None, default: Path) -> Path | None:
    return None if stated is None else Path(stated.local_path or default)


def _name_from_toolkit(env: Mapping[str, str]) -> str | None:
    """Return the job's name from the toolkit's variables, the only ones that its mpirun passes to other hosts."""
    training = _read_variable(env, "SM_TRAINING_ENV", dict[str, Any]) or {}
    return str(training.get("job_name") or "") or None


def read_json_file(path: Path, kind: type[_T]) -> _T | None:
    """Read one of SageMaker's files; return None if it does not exist.

    Args:
        path: The file.
        kind: The type of its content.

    Raises:
        JobConfigError: The file cannot be read, or its content has another type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise JobConfigError(f"{path}: cannot be read ({error}).") from error
    return _decoded(str(path), text, kind)


def _read_variable(env: Mapping[str, str], name: str, kind: type[_T]) -> _T | None:
    """Read JSON from an environment variable; return None if it is unset or empty."""
    text = env.get(name)
    return _decoded(name, text, kind) if text else None


def _decoded(source: str, text: str, kind: type[_T]) -> _T:
    try:
        value = json.loads(text)  # msgspec's parser rejects NaN, which the toolkit writes
    except (ValueError, RecursionError) as error:  # numbers of more than 4300 digits raise ValueError, too
        raise JobConfigError(f"{source}: not valid JSON ({error}).") from error
    return _converted(source, value, kind)


def _converted(source: str, value: object, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise JobConfigError(f"{source}: {error}.") from error


def _num_gpus(env: Mapping[str, str]) -> int:
    num_gpus = _NUM_GPUS.read(env)
    if num_gpus is not None:
        return num_gpus
    try:
        # Count device files: torch takes 2 s to import, and slim images lack nvidia-smi.
        return sum(1 for entry in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", entry))
    except OSError:
        return 0
