"""The hosts of an emulated job, with folders, files and environments as on the service."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_sm.emulator.agent import download
from lightning_sm.emulator.hosts import HostRuntime
from lightning_sm.emulator.process_hosts import ProcessRuntime
from lightning_sm.emulator.run_folders import create_run_folder, run_name
from lightning_sm.emulator.spec import CHECKPOINTS, CONTROL, ClusterSpec, LocalHost
from lightning_sm.errors import JobConfigError, OutputDirectoryError, PortInUseError
from lightning_sm.job.emulated_service import deal_hosts, group_of, resource_config_of
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.hyperparameters import encode
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import CONTROL_DIR, DEVICES, MAIN_PORT

_PROCESSES = ProcessRuntime()
# The number of loopback addresses from 127.0.0.2 to 127.0.0.254.
_MAX_HOSTS = 253
# A job's ports are derived from its name, which selects one of 10000 ports. If this many names have no free ports,
# something else is wrong.
_NAME_ATTEMPTS = 50
_CHANNEL_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # API_Channel
_CHANNEL_CONFIG = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}


class LocalCluster:
    """The folders of an emulated job; a context manager that removes them unless ``keep`` is set.

    Args:
        spec: The description of the job.
        base_dir: Parent of the job's folder.
        runtime: The system that runs the hosts.

    Attributes:
        runtime: The system that runs the hosts.
        name: Name of the job.
        job_dir: Folder of the job, with one folder per host.
        bucket: The folder that stands in for the checkpoints' location in S3, or None.
        attempt: Number of the current attempt, counted from 1.
        hosts: The hosts, in numerical order.
        main_host: The host that runs rank 0.
        keep: Whether to keep the folders on exit.

    Raises:
        JobConfigError: A group, a channel or a value is invalid.
        TopologyError: The groups contradict each other, or no group trains.
        HyperparameterError: A hyperparameter has a value that the service cannot pass on.
        OutputDirectoryError: A folder cannot be created.
        PortInUseError: No free ports were found.
        NeedsLinuxError: There are data hosts, and this system is not Linux.
    """

    def __init__(self, spec: ClusterSpec, base_dir: Path, runtime: HostRuntime = _PROCESSES) -> None:
        _check(spec)
        self.runtime = runtime
        self.keep = False
        self.attempt = 1
        self._spec = spec
        self._hyperparameters = encode(spec.hyperparameters)
        self._shared = runtime.shared_environment(spec)
        groups = deal_hosts(spec.groups, spec.host_names, random.Random(spec.seed))  # noqa: S311 - no secret
        # Leave out --devices, which the service lacks, so that hosts with unequal GPUs are rejected as on the service.
        self._stated = {**self._shared, DEVICES.name: spec.environment.get(DEVICES.name, "")}
        self.name, topology, self._held = _name_with_ports(runtime, groups, self._stated)
        base_dir = base_dir.expanduser().absolute()
        self.job_dir = base_dir / self.name
        own_bucket = self.job_dir / CHECKPOINTS if spec.keeps_checkpoints else None
        self.bucket = spec.bucket.absolute() if spec.bucket else own_bucket
        try:
            self._held.callback(os.close, create_run_folder(self.job_dir))
            if self.bucket is not None:
                self.bucket.mkdir(parents=True, exist_ok=True)
            self._make_hosts(groups, topology)
        except OSError as error:
            self.remove()
            self._held.close()
            raise OutputDirectoryError(f"{error.filename or base_dir}: not writable ({error.strerror}).") from error

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.keep:
            self.remove()
        self._held.close()

    def remove(self) -> None:
        """Remove the job's folder."""
        shutil.rmtree(self.job_dir, ignore_errors=True)

    def next_attempt(self) -> None:
        """Reassign the hosts to groups at random, and give them empty folders at the same paths; keep only checkpoints.

        The old folders are moved aside, so that paths stored in a checkpoint no longer exist, as on the service.

        Raises:
            OutputDirectoryError: A folder cannot be created.
        """
        aside = self.job_dir / f"attempt-{self.attempt}"
        self.attempt += 1
        groups = deal_hosts(self._spec.groups, self._spec.host_names, self.draw("groups"))
        try:
            aside.mkdir()
            for host in self.hosts:
                host.folder.rename(aside / host.name)
            self._make_hosts(groups, _topology(groups, self._stated, self.name))
        except OSError as error:
            raise OutputDirectoryError(f"{error.filename}: not writable ({error.strerror}).") from error

    def draw(self, purpose: str) -> random.Random:
        """Return a random number generator for one purpose in this attempt, reproducible if the job has a seed."""
        seed = self._spec.seed
        # Seed it with a string, because similar integers give similar first values.
        return random.Random(None if seed is None else f"{seed} {self.attempt} {purpose}")  # noqa: S311 - no secret

    def _make_hosts(self, groups: Sequence[InstanceGroup], topology: Topology) -> None:
        self.hosts = tuple(self._make_host(name, groups, topology) for name in self._spec.host_names)
        self.main_host = next(host for host in self.hosts if host.name == topology.main_host)
        seen_as = self.runtime.base_dir(self.main_host.folder)
        if seen_as != self.main_host.folder and seen_as.is_relative_to(self.job_dir):
            # Let the user open the paths in the log, most of which come from the main host.
            seen_as.unlink(missing_ok=True)
            seen_as.symlink_to(self.main_host.folder.name)

    def _make_host(self, name: str, groups: Sequence[InstanceGroup], topology: Topology) -> LocalHost:
        folder = self.job_dir / name
        base_dir = self.runtime.base_dir(folder)
        group = group_of(groups, name).name
        channels = self._spec.channels_of(group)
        config_dir = folder / "input" / "config"
        data_dir = folder / "input" / "data"
        for made in (config_dir, data_dir, folder / "model", folder / "output" / "data", folder / CONTROL):
            made.mkdir(parents=True)
        resources = {**resource_config_of(groups, name), "network_interface_name": self.runtime.interface}
        _write_json(config_dir / "resourceconfig.json", resources)
        _write_json(config_dir / "hyperparameters.json", self._hyperparameters)
        _write_json(config_dir / "inputdataconfig.json", dict.fromkeys(channels, _CHANNEL_CONFIG))
        for channel, source in channels.items():
            self.runtime.add_channel(data_dir / channel, source)
        if self.bucket is not None:
            download(self.bucket, folder / CHECKPOINTS)
            paths = {"LocalPath": str(base_dir / CHECKPOINTS), "S3Uri": self.bucket.as_uri()}
            _write_json(config_dir / "checkpointconfig.json", paths)
        env = {
            **self._shared,
            "TRAINING_JOB_NAME": self.name,
            CONTROL_DIR.name: str(base_dir / CONTROL),
            **self.runtime.host_environment(folder),
        }
        role, delay_s = topology.role_of(name), self._spec.upload_delay_s
        return LocalHost(name, group, role, folder, env, channels, self.bucket, delay_s)


def _check(spec: ClusterSpec) -> None:
    for index, group in enumerate(spec.groups):
        if group.num_hosts < 1:
            raise JobConfigError(f"Group {group.name!r} has {group.num_hosts} hosts; a group needs at least 1 host.")
        if any(other.name == group.name for other in spec.groups[:index]):
            raise JobConfigError(f"Group {group.name!r} is named twice; every group needs its own name.")
    total = sum(group.num_hosts for group in spec.groups)
    if not 1 <= total <= _MAX_HOSTS:
        raise JobConfigError(f"The groups have {total} hosts; the emulator supports 1 to {_MAX_HOSTS}.")
    if spec.devices is not None and spec.devices < 1:
        raise JobConfigError(f"--devices is {spec.devices}; a trainer host needs at least 1 process.")
    if not 0 <= spec.upload_delay_s < math.inf:
        raise JobConfigError(f"--upload-delay {spec.upload_delay_s:g}: expected 0 seconds or more.")
    for name, folder in spec.channels.items():
        if not _CHANNEL_NAME.fullmatch(name) or name in {".", ".."}:
            raise JobConfigError(f"Channel {name!r}: expected at most 64 letters, digits, '.', '-' or '_'.")
        if not folder.is_dir():
            raise JobConfigError(f"Channel {name!r}: the folder {str(folder)!r} does not exist.")


def _name_with_ports(
    runtime: HostRuntime, groups: Sequence[InstanceGroup], shared: Mapping[str, str]
) -> tuple[str, Topology, ExitStack]:
    """Choose a job name whose ports are free, and reserve the ports, which are derived from the name."""
    for _ in range(_NAME_ATTEMPTS):
        name = run_name()
        topology = _topology(groups, shared, name)
        try:
            return name, topology, runtime.reserve(topology)
        except PortInUseError as error:
            if shared.get(MAIN_PORT.name):  # the port does not depend on the name, so another name cannot help
                raise
            last = error
    raise PortInUseError(f"Tried {_NAME_ATTEMPTS} job names, but none had free ports. Last error: {last}") from last


def _topology(groups: Sequence[InstanceGroup], shared: Mapping[str, str], name: str) -> Topology:
    resources = json.dumps(resource_config_of(groups, groups[0].hosts[0]))
    env = {**shared, "SM_RESOURCE_CONFIG": resources, "TRAINING_JOB_NAME": name}
    # The base folder does not exist, so the job is read from the environment variable.
    job = SageMakerJob.from_environment(env, base_dir=name)
    if job is None:
        raise JobConfigError(f"The job {name} has no hosts.")
    return Topology.from_job(job)


def _write_json(path: Path, value: object) -> None:
    path.touch(0o600, exist_ok=False)  # hyperparameters may be secret
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
