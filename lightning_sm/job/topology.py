"""The layout of a job: roles, ranks, main host and ports, computed identically on every host.

Pure logic over the facts of a job. The service assigns hosts to groups at random and does not sort the hosts of a
group, so all ranks come from one list: the sorted hosts of all training groups.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_sm._table import draw_table
from lightning_sm.errors import TopologyError
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.instance_types import is_accelerated, num_gpus
from lightning_sm.job.variables import DATA_GROUPS, DEVICES

# Stay below Linux's default ephemeral range (32768-60999), where an outgoing connection could occupy a port, and away
# from the toolkits' ports (7777 torchrun, 7592 SMDDP).
_FIRST_PORT = 20_000
_NUM_PORTS = 10_000
# The job's other ports are this far below the main port, outside the main port's range and the ephemeral range.
_PEERS_BELOW_MAIN = 5_000
_DATA_BELOW_MAIN = 10_000
_FIRST_UNPRIVILEGED_PORT = 1024

# Maximum number of rows per role in a short table.
_MAX_ROWS = 4


class Role(Enum):
    """The role of a host in a job."""

    TRAINER = "trainer"
    DATA = "data"


@dataclass(frozen=True)
class Topology:
    """The layout of a job, as seen from one of its hosts.

    Attributes:
        current_host: Name of this host.
        trainer_hosts: Hosts of all training groups, sorted; the position of a host is its node rank.
        data_hosts: Hosts of all data groups, sorted.
        groups: All instance groups of the job.
        main_port: Port on which rank 0 listens, the same on every host.
        source: File or variable that the hosts came from, for error messages.
    """

    current_host: str
    trainer_hosts: tuple[str, ...]
    data_hosts: tuple[str, ...]
    groups: tuple[InstanceGroup, ...]
    main_port: int
    source: str

    @classmethod
    def from_job(cls, job: SageMakerJob, *, data_groups: Sequence[str] | None = None) -> Topology:
        """Derive the layout from the facts of a job.

        Args:
            job: The facts of the job.
            data_groups: Names of the groups that serve data. Defaults to ``job.data_groups``. If that is also None,
                groups whose names start with "data" serve data; else CPU-only groups if another group has accelerators;
                else none, and every host trains.

        Raises:
            TopologyError: A named group does not exist, no group trains, or training hosts have different
                numbers of GPUs; the message includes the table of groups.
        """
        names = _data_group_names(job, data_groups if data_groups is not None else job.data_groups)
        training = [group for group in job.groups if group.name not in names]
        if not training:
            msg = (
                f"No group trains: every instance group of the job serves data ({', '.join(sorted(names))}).\n"
                f"{_groups_table(job.groups, names)}\n"
                f"Add a training group, or name the data groups: {DATA_GROUPS.name}=name,name (empty: none)."
            )
            raise TopologyError(msg)
        _check_equal_accelerators(job, training, names)
        return cls(
            current_host=job.current_host,
            trainer_hosts=tuple(sorted(host for group in training for host in group.hosts)),
            data_hosts=tuple(sorted(host for group in job.groups if group.name in names for host in group.hosts)),
            groups=job.groups,
            main_port=job.main_port or _port_of(job),
            source=job.source,
        )

    @property
    def role(self) -> Role:
        """The role of this host."""
        return self.role_of(self.current_host)

    def role_of(self, host: str) -> Role:
        """Return the role of a host of the job.

        Args:
            host: Name of the host.
        """
        return Role.TRAINER if host in self.trainer_hosts else Role.DATA

    @property
    def peers_port(self) -> int:
        """Port on which the main host's launcher accepts connections from the job's other launchers."""
        port = self.main_port - _PEERS_BELOW_MAIN
        return port if port >= _FIRST_UNPRIVILEGED_PORT else self.main_port + _PEERS_BELOW_MAIN

    @property
    def data_port(self) -> int:
        """Port of the data hosts, unless ``--data_service.port`` overrides it."""
        return max(_FIRST_UNPRIVILEGED_PORT, self.main_port - _DATA_BELOW_MAIN)

    @property
    def num_nodes(self) -> int:
        """Number of trainer hosts, Lightning's ``num_nodes``."""
        return len(self.trainer_hosts)

    @property
    def main_host(self) -> str:
        """Name of the trainer host with node rank 0."""
        return self.trainer_hosts[0]

    @property
    def node_rank(self) -> int:
        """Position of this host among the trainer hosts.

        Raises:
            TopologyError: This host serves data, so it has no rank.
        """
        if self.role is not Role.TRAINER:
            raise TopologyError(
                f"Host {self.current_host!r} serves data and has no rank. Its script must serve batches, not train. "
                "Use lightning_sm.SageMakerCLI instead of LightningCLI, or lightning_sm.SageMakerTrainer instead of "
                f"Trainer. Or let all groups train: set {DATA_GROUPS.name}= (empty) in the "
                "job's environment.\n"
                f"{self.table()}"
            )
        return self.trainer_hosts.index(self.current_host)

    def table(self, devices: int | None = None, *, is_short: bool = False) -> str:
        """Draw a table of the job's hosts: host, group, instance type, role, node rank, global ranks.

        Args:
            devices: Number of processes on each trainer host, if known.
            is_short: Whether to leave out hosts in the middle of a long list.
        """
        headers = ["host", "group", "instance", "role", "node rank", "ranks"]
        rows = [
            row
            for hosts in (self.trainer_hosts, self.data_hosts)
            for row in _shortened([self._row(host, devices) for host in hosts], is_short=is_short)
        ]
        return draw_table(rows, headers)

    def _row(self, host: str, devices: int | None) -> list[str]:
        group = next(group for group in self.groups if host in group.hosts)
        role = self.role_of(host)
        node_rank = "-"
        ranks = "-"
        if role is Role.TRAINER:
            rank = self.trainer_hosts.index(host)
            node_rank = str(rank)
            ranks = _span(rank * devices, devices) if devices else "?"
        marker = "*" if host == self.current_host else ""
        return [host + marker, group.name, group.instance_type or "-", role.value, node_rank, ranks]


def _shortened(rows: list[list[str]], *, is_short: bool) -> list[list[str]]:
    if not is_short or len(rows) <= _MAX_ROWS:
        return rows
    left_out = len(rows) - _MAX_ROWS + 1
    row = [f"... {left_out} more hosts", *["..."] * (len(rows[0]) - 1)]
    return [*rows[: _MAX_ROWS - 2], row, rows[-1]]


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _data_group_names(job: SageMakerJob, requested: Sequence[str] | None) -> frozenset[str]:
    if requested is not None:
        unknown = sorted(set(requested) - {group.name for group in job.groups})
        if unknown:
            msg = (
                f"Data groups {unknown} were requested (by data_groups= or {DATA_GROUPS.name}), but the job "
                f"({job.source}) has no such group.\n{_groups_table(job.groups, frozenset())}"
            )
            raise TopologyError(msg)
        return frozenset(requested)
    named = frozenset(group.name for group in job.groups if group.name.lower().startswith("data"))
    if named:
        return named
    accelerated = {group.name: is_accelerated(group.instance_type) for group in job.groups}
    if any(accelerated.values()):
        return frozenset(name for name, has_accelerator in accelerated.items() if has_accelerator is False)
    return frozenset()


def _check_equal_accelerators(job: SageMakerJob, training: list[InstanceGroup], names: frozenset[str]) -> None:
    """Refuse training groups with unequal accelerator counts, since Lightning numbers ranks as node rank x devices."""
    counts = {group.name: num_gpus(group.instance_type) for group in training}
    known = {count for count in counts.values() if count is not None}
    suits_all = job.devices is not None and job.devices <= min(known, default=0)
    if len(known) > 1 and not suits_all:
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items() if count is not None)
        msg = (
            f"Training groups have different numbers of GPUs per host ({shown}), but Lightning needs the same number "
            f"of devices on every training host.\n{_groups_table(job.groups, names)}\n"
            "Give all training groups one instance type, name the CPU groups that serve data "
            f"({DATA_GROUPS.name}=name,name), or use the same number of GPUs on every host "
            f"(for example {DEVICES.name}=1)."
        )
        raise TopologyError(msg)


def _groups_table(groups: Sequence[InstanceGroup], data_names: frozenset[str]) -> str:
    rows = [
        [
            group.name,
            group.instance_type or "-",
            (Role.DATA if group.name in data_names else Role.TRAINER).value,
            " ".join(group.hosts),
        ]
        for group in groups
    ]
    return draw_table(rows, ["group", "instance", "role", "hosts"])


def _port_of(job: SageMakerJob) -> int:
    """Return a port that is the same on every host, and probably different for other jobs on the network."""
    identity = job.name or " ".join(sorted(job.hosts))
    return _FIRST_PORT + zlib.crc32(identity.encode()) % _NUM_PORTS
