"""The hosts of an emulated job: their folders, files and environments, as on the service."""

from __future__ import annotations

import json
import math
import os
import random
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_sm._linux import LOOPBACK_INTERFACE, loopback_addresses, require_linux, usable_cpus
from lightning_sm.emulator.agent import UploadAgent, download
from lightning_sm.emulator.ports import reserve_ports
from lightning_sm.emulator.run_folders import create_run_folder
from lightning_sm.errors import JobConfigError, OutputDirectoryError, PortInUseError
from lightning_sm.job.emulated_service import GroupSpec, deal_hosts, resource_config_of
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.hyperparameters import encode
from lightning_sm.job.secret import new_secret
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import (
    CONTROL_DIR,
    DEVICES,
    HOST_ADDRESSES,
    INSTALL_REQUIREMENTS,
    MAIN_PORT,
    PREFIX,
    PRICES,
    REPORT_S,
    Install,
)

# Variables that a launcher, a toolkit or another job may have left in this shell: the hosts would mistake them for
# their own.
_LEAKING_PREFIXES = (PREFIX, "MASTER_", "OMPI_", "PMI", "SAGEMAKER_", "SLURM_", "SM_", "TORCHELASTIC_", "TRAINING_JOB_")
_LEAKING_NAMES = frozenset(
    {
        "CURRENT_HOST",
        "GROUP_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "PL_GLOBAL_SEED",
        "RANK",
        "WORLD_SIZE",
    }
)
# Loopback addresses from 127.0.0.2.
_MAX_HOSTS = 253
# Ports are derived from the name, out of 10000: if so many names in a row have no free ports, something else is wrong.
_NAME_ATTEMPTS = 50
_CHANNEL_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # API_Channel
_CHANNEL_CONFIG = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}


@dataclass(frozen=True)
class ClusterSpec:
    """The description of a job to emulate.

    Attributes:
        groups: The instance groups.
        devices: Processes on each trainer host.
        hyperparameters: Values as a user would pass them to the Estimator.
        channels: Folder of each input channel.
        checkpoint_dir: Checkpoint folder that all hosts share, or None for a job without one.
        keeps_checkpoints: Whether the job needs a checkpoint folder, which is inside its own folder if
            ``checkpoint_dir`` is None.
        upload_delay_s: How long the upload of a file takes, in seconds, if each host has a checkpoint folder of its own
            and ``checkpoint_dir`` stands for S3. None for a folder that all hosts share.
        environment: Variables as a user would pass them to ``Estimator(environment=...)``.
        seed: Seed of the assignment of hosts to groups; None for a different one each time, as on the service.
    """

    groups: Sequence[GroupSpec] = (GroupSpec("trainer", 1),)
    devices: int = 1
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    channels: Mapping[str, Path] = field(default_factory=dict)
    checkpoint_dir: Path | None = None
    keeps_checkpoints: bool = False
    upload_delay_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class LocalHost:
    """One emulated host.

    Attributes:
        name: Its name, ``algo-1`` and so on.
        group: Name of its instance group.
        role: Its role in the job.
        base_dir: The folder that takes the place of ``/opt/ml``.
        env: The complete environment of its processes.
        control_dir: The folder in which its training processes report where they stand.
        checkpoint_dir: Its checkpoint folder, or None; all hosts may share one.
    """

    name: str
    group: str
    role: Role
    base_dir: Path
    env: Mapping[str, str]
    control_dir: Path
    checkpoint_dir: Path | None


class LocalCluster:
    """The folders of an emulated job; a context manager that removes them unless ``keep`` is set.

    Args:
        spec: The description of the job.
        base_dir: Parent of the job's folder.

    Attributes:
        name: Name of the job.
        job_dir: Folder of the job, with one folder per host.
        checkpoint_dir: Checkpoint folder that all hosts share, or that stands for S3, or None.
        attempt: Number of the current attempt, from 1.
        hosts: The hosts, in the order of their numbers.
        main_host: The host of rank 0.
        keep: Whether to keep the folders on exit.

    Raises:
        JobConfigError: A group, a channel or a value is wrong.
        TopologyError: The groups contradict each other, or none of them trains.
        HyperparameterError: A hyperparameter has a value that the service cannot pass on.
        OutputDirectoryError: A folder cannot be created.
        PortInUseError: No free ports were found.
        NeedsLinuxError: There are data hosts, and this system is not Linux.
    """

    def __init__(self, spec: ClusterSpec, base_dir: Path) -> None:
        _check(spec)
        self.keep = False
        self.attempt = 1
        self._spec = spec
        self._hyperparameters = encode(spec.hyperparameters)
        self._shared = _shared_environment(spec)
        groups = deal_hosts(spec.groups, _host_names(spec), random.Random(spec.seed))  # noqa: S311 - no secret
        # Without --devices, which the service does not have: reject hosts with unequal GPUs, as the service would.
        self._stated = {**self._shared, DEVICES.name: spec.environment.get(DEVICES.name, "")}
        self.name, topology, self._ports = _name_with_ports(groups, self._stated)
        base_dir = base_dir.expanduser().absolute()
        self.job_dir = base_dir / self.name
        own_checkpoint_dir = self.job_dir / "checkpoints" if spec.keeps_checkpoints else None
        self.checkpoint_dir = spec.checkpoint_dir.absolute() if spec.checkpoint_dir else own_checkpoint_dir
        self._made_base_dir = not base_dir.exists()
        self._lock = -1
        try:
            self._lock = create_run_folder(self.job_dir)
            if self.checkpoint_dir is not None:
                self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self._make_hosts(groups, topology)
        except OSError as error:
            self._ports.close()
            self.remove()
            self._release()
            raise OutputDirectoryError(
                f"{error.filename or base_dir}: cannot be written ({error.strerror})."
            ) from error

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._ports.close()
        if not self.keep:
            self.remove()
        self._release()

    def remove(self) -> None:
        """Remove the folder of the job, and its parent if that was created for this job and is empty."""
        shutil.rmtree(self.job_dir, ignore_errors=True)
        if self._made_base_dir:
            try:
                self.job_dir.parent.rmdir()
            except OSError:
                return  # another job uses it

    def _release(self) -> None:
        """Unlock the folder of the run, which --clean may then remove."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def next_attempt(self) -> None:
        """Reassign the hosts to groups at random, with empty folders at the same paths; only checkpoints remain.

        The folders of the last attempt are moved away, because a path there that a checkpoint names must not exist, as
        on the service.

        Raises:
            OutputDirectoryError: A folder cannot be created.
        """
        aside = self.job_dir / f"attempt-{self.attempt}"
        self.attempt += 1
        groups = deal_hosts(self._spec.groups, _host_names(self._spec), self.draw("groups"))
        try:
            aside.mkdir()
            for host in self.hosts:
                host.base_dir.rename(aside / host.name)
            self._make_hosts(groups, _topology(groups, self._stated, self.name))
        except OSError as error:
            raise OutputDirectoryError(f"{error.filename}: cannot be written ({error.strerror}).") from error

    @property
    def uploads(self) -> bool:
        """Whether each host has a checkpoint folder of its own, which an agent uploads."""
        return self._spec.upload_delay_s is not None

    def start_agent(self, host: LocalHost) -> UploadAgent | None:
        """Start the agent that uploads a host's checkpoint folder; None if the hosts share one, or have none."""
        if self._spec.upload_delay_s is None or self.checkpoint_dir is None or host.checkpoint_dir is None:
            return None
        return UploadAgent(host.checkpoint_dir, self.checkpoint_dir, host.name, self._spec.upload_delay_s)

    def draw(self, purpose: str) -> random.Random:
        """Return random numbers for one purpose in this attempt, which repeat with the seed."""
        seed = self._spec.seed
        # The seed is a text because the first draws of similar numbers are similar.
        return random.Random(None if seed is None else f"{seed} {self.attempt} {purpose}")  # noqa: S311 - no secret

    def _make_hosts(self, groups: Sequence[InstanceGroup], topology: Topology) -> None:
        self.hosts = tuple(self._make_host(name, groups, topology) for name in _host_names(self._spec))
        self.main_host = next(host for host in self.hosts if host.name == topology.main_host)

    def _make_host(self, name: str, groups: Sequence[InstanceGroup], topology: Topology) -> LocalHost:
        base_dir = self.job_dir / name
        config_dir = base_dir / "input" / "config"
        data_dir = base_dir / "input" / "data"
        control_dir = base_dir / "control"
        for folder in (config_dir, data_dir, base_dir / "model", base_dir / "output" / "data", control_dir):
            folder.mkdir(parents=True)
        resources = {**resource_config_of(groups, name), "network_interface_name": LOOPBACK_INTERFACE}
        _write_json(config_dir / "resourceconfig.json", resources)
        _write_json(config_dir / "hyperparameters.json", self._hyperparameters)
        _write_json(config_dir / "inputdataconfig.json", dict.fromkeys(self._spec.channels, _CHANNEL_CONFIG))
        for channel, folder in self._spec.channels.items():
            (data_dir / channel).symlink_to(folder.absolute(), target_is_directory=True)
        checkpoint_dir = self.checkpoint_dir
        if self.checkpoint_dir is not None:
            if self.uploads:
                checkpoint_dir = base_dir / "checkpoints"
                download(self.checkpoint_dir, checkpoint_dir)
            paths = {"LocalPath": str(checkpoint_dir), "S3Uri": self.checkpoint_dir.as_uri()}
            _write_json(config_dir / "checkpointconfig.json", paths)
        env = {
            **self._shared,
            "SAGEMAKER_BASE_DIR": str(base_dir),
            "TRAINING_JOB_NAME": self.name,
            CONTROL_DIR.name: str(control_dir),
        }
        role = topology.role_of(name)
        return LocalHost(name, resources["current_group_name"], role, base_dir, env, control_dir, checkpoint_dir)


def _check(spec: ClusterSpec) -> None:
    for index, group in enumerate(spec.groups):
        if group.num_hosts < 1:
            raise JobConfigError(f"Group {group.name!r} has {group.num_hosts} hosts; a group needs at least 1 host.")
        if any(other.name == group.name for other in spec.groups[:index]):
            raise JobConfigError(f"Group {group.name!r} is named twice; every group needs its own name.")
    total = sum(group.num_hosts for group in spec.groups)
    if not 1 <= total <= _MAX_HOSTS:
        raise JobConfigError(f"The groups have {total} hosts; the emulator supports 1 to {_MAX_HOSTS}.")
    if spec.devices < 1:
        raise JobConfigError(f"--devices is {spec.devices}; a trainer host needs at least 1 process.")
    if spec.upload_delay_s is not None and not 0 <= spec.upload_delay_s < math.inf:
        raise JobConfigError(f"--upload-delay {spec.upload_delay_s:g}: expected 0 seconds or more.")
    if INSTALL_REQUIREMENTS.read(spec.environment) in (Install.ALWAYS, Install.UNPROTECTED):
        raise JobConfigError(
            f"--env {INSTALL_REQUIREMENTS.name}={spec.environment[INSTALL_REQUIREMENTS.name]}: emulated hosts use the "
            "packages of this Python, and install none. Leave the variable out, and install the requirements yourself."
        )
    for name, folder in spec.channels.items():
        if not _CHANNEL_NAME.fullmatch(name) or name in {".", ".."}:
            raise JobConfigError(f"Channel {name!r}: expected at most 64 letters, digits, '.', '-' or '_'.")
        if not folder.is_dir():
            raise JobConfigError(f"Channel {name!r}: the folder {str(folder)!r} does not exist.")


def _host_names(spec: ClusterSpec) -> list[str]:
    return [f"algo-{number}" for number in range(1, sum(group.num_hosts for group in spec.groups) + 1)]


def _shared_environment(spec: ClusterSpec) -> dict[str, str]:
    hosts = _host_names(spec)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _LEAKING_NAMES and not name.startswith(_LEAKING_PREFIXES)
    }
    num_processes = len(hosts) * spec.devices
    return {
        "AWS_REGION": "us-east-1",
        # All hosts share this machine's CPUs, and PyTorch would start one thread per CPU in every process.
        "OMP_NUM_THREADS": str(max(1, usable_cpus() // num_processes)),
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        # Lightning's switch against Apple's GPU (accelerators/mps.py), on which it refuses to train on several hosts.
        "DISABLE_MPS": "1",
        "SM_NUM_GPUS": "0",
        "PYTHONUNBUFFERED": "1",
        DEVICES.name: str(spec.devices),
        **new_secret(),
        # These two concern what this machine reports about a job, not what the job does.
        **{setting.name: os.environ[setting.name] for setting in (REPORT_S, PRICES) if setting.name in os.environ},
        HOST_ADDRESSES.name: json.dumps(dict(zip(hosts, loopback_addresses(len(hosts)), strict=True))),
        **spec.environment,
        INSTALL_REQUIREMENTS.name: Install.NEVER.value,
    }


def _name_with_ports(groups: Sequence[InstanceGroup], shared: Mapping[str, str]) -> tuple[str, Topology, ExitStack]:
    """Choose a job name whose ports are free; they are derived from the name."""
    for _ in range(_NAME_ATTEMPTS):
        name = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        topology = _topology(groups, shared, name)
        if topology.data_hosts:
            require_linux(
                f"A cluster with data hosts ({', '.join(topology.data_hosts)})",
                "Leave the data groups out, or run it in a Linux container.",
            )
        try:
            return name, topology, reserve_ports(topology)
        except PortInUseError as error:
            if shared.get(MAIN_PORT.name):  # a port that does not depend on the name
                raise
            last = error
    raise PortInUseError(
        f"Tried {_NAME_ATTEMPTS} job names, none of which has free ports. Last error: {last}"
    ) from last


def _topology(groups: Sequence[InstanceGroup], shared: Mapping[str, str], name: str) -> Topology:
    resources = json.dumps(resource_config_of(groups, groups[0].hosts[0]))
    env = {**shared, "SM_RESOURCE_CONFIG": resources, "TRAINING_JOB_NAME": name}
    # A folder that does not exist, so that the job is read from the variable.
    job = SageMakerJob.from_environment(env, base_dir=name)
    if job is None:
        raise JobConfigError(f"The job {name} has no hosts.")
    return Topology.from_job(job)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
