"""The description of an emulated job, and of each of its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_sm.job.emulated_service import GroupSpec
from lightning_sm.job.topology import Role

CONTROL, CHECKPOINTS = "control", "checkpoints"


@dataclass(frozen=True)
class ClusterSpec:
    """The description of a job to emulate.

    Attributes:
        groups: The instance groups.
        devices: Processes per trainer host; None to leave the number unset, as on the service.
        hyperparameters: Values as a user would pass them to the Estimator.
        channels: Folder of each input channel.
        channel_groups: Names of the groups that see each channel. A channel not listed here is visible to all groups.
        bucket: The folder that stands in for the checkpoints' location in S3, or None for a job without checkpoints.
        keeps_checkpoints: If True and ``bucket`` is None, a folder inside the job's folder stands in for S3.
        upload_delay_s: How long the upload of a checkpoint file takes, in seconds.
        environment: Variables as a user would pass them to ``Estimator(environment=...)``.
        seed: Seed for assigning hosts to groups; None for a different assignment each time, as on the service.
    """

    groups: Sequence[GroupSpec] = (GroupSpec("trainer", 1),)
    devices: int | None = 1
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    channels: Mapping[str, Path] = field(default_factory=dict)
    channel_groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    bucket: Path | None = None
    keeps_checkpoints: bool = False
    upload_delay_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None

    @property
    def host_names(self) -> list[str]:
        """The names of all hosts, in numerical order."""
        return [f"algo-{number}" for number in range(1, sum(group.num_hosts for group in self.groups) + 1)]

    def channels_of(self, group: str) -> dict[str, Path]:
        """Return the folders of the channels that a group sees."""
        return {name: path for name, path in self.channels.items() if group in self.channel_groups.get(name, [group])}


@dataclass(frozen=True)
class LocalHost:
    """The description of one emulated host.

    Attributes:
        name: Its name, such as ``algo-1``.
        group: Name of its instance group.
        role: Its role in the job.
        folder: The folder that takes the place of ``/opt/ml``, as the emulator sees it.
        env: The environment of its processes, with paths as the host sees them.
        channels: Folder of each input channel of the host's group, as the emulator sees it.
        bucket: The folder that stands in for S3, to which an agent uploads the host's checkpoints, or None.
        upload_delay_s: How long the upload of a file takes, in seconds.
    """

    name: str
    group: str
    role: Role
    folder: Path
    env: Mapping[str, str]
    channels: Mapping[str, Path] = field(default_factory=dict)
    bucket: Path | None = None
    upload_delay_s: float = 0.0

    @property
    def control_dir(self) -> Path:
        """The folder in which the host's processes report their progress."""
        return self.folder / CONTROL

    @property
    def checkpoint_dir(self) -> Path:
        """The host's checkpoint folder, which exists if the job has checkpoints."""
        return self.folder / CHECKPOINTS
