"""Who does what in a job: roles, ranks, main address and main port, computed alike on every host.

Pure rules over the facts in ``job.py``. The service shuffles which host lands in which group and leaves the hosts
of a group unsorted, so that every number here comes from one list: the sorted hosts of all training groups.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tabulate import tabulate

from lightning_sm.errors import TopologyError
from lightning_sm.job.facts import InstanceGroup, SageMakerJob

# Families with accelerators: P and G (NVIDIA), Trn and Inf (Neuron), DL (Gaudi). Amazon EC2 instance types,
# "Accelerated computing". All others have CPUs only.
_ACCELERATED_FAMILIES = frozenset({"p", "g", "gr", "trn", "inf", "dl"})

# GPUs by instance size ("Accelerated computing" again). What is not listed here counts as unknown, not as wrong.
_G_SIZES = {
    "xlarge": 1,
    "2xlarge": 1,
    "4xlarge": 1,
    "8xlarge": 1,
    "16xlarge": 1,
    "12xlarge": 4,
    "24xlarge": 4,
    "48xlarge": 8,
}
_GPUS_BY_SIZE = {
    "g4dn": _G_SIZES,
    "g5": _G_SIZES,
    "g6": _G_SIZES,
    "g6e": _G_SIZES,
    "p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"4xlarge": 1, "48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
    "p6-b200": {"48xlarge": 8},
}

# Ports below Linux's default ephemeral range (32768-60999), where an outgoing connection could sit on one, and
# away from those of the toolkits (7777 torchrun, 7592 SMDDP).
_FIRST_PORT, _NUM_PORTS = 20000, 10000
# The other ports of a job lie this far below: apart from it, and from those that the system hands out.
_PEERS_BELOW_MAIN, _DATA_BELOW_MAIN = 5_000, 10_000
_FIRST_UNPRIVILEGED_PORT = 1024


class Role(Enum):
    """What a host does in a job."""

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
        """Apply the rules to a job.

        Args:
            job: The facts.
            data_groups: Names of the groups that serve data. Default: ``job.data_groups``; if that is None too,
                groups whose name starts with "data"; else those of CPU-only instances when another group has
                accelerators; else none, and every host trains.

        Raises:
            TopologyError: A named group does not exist, no group trains, or training hosts have different
                accelerators; the message has the table of groups.
        """
        names = _data_group_names(job, data_groups if data_groups is not None else job.data_groups)
        training = [group for group in job.groups if group.name not in names]
        if not training:
            msg = (
                f"No group trains: every instance group of the job serves data ({', '.join(sorted(names))}).\n"
                f"{_groups_table(job.groups, names)}\n"
                "Add a training group, or name the data groups: LIGHTNING_SM_DATA_GROUPS=name,name (empty: none)."
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
        """What this host does."""
        return self.role_of(self.current_host)

    def role_of(self, host: str) -> Role:
        """What a host does.

        Args:
            host: Name of a host of the job.
        """
        return Role.TRAINER if host in self.trainer_hosts else Role.DATA

    @property
    def peers_port(self) -> int:
        """Port of the main host's launcher, through which the launchers of a job hear of each other."""
        port = self.main_port - _PEERS_BELOW_MAIN
        return port if port >= _FIRST_UNPRIVILEGED_PORT else self.main_port + _PEERS_BELOW_MAIN

    @property
    def data_port(self) -> int:
        """Port of the data hosts, unless ``--data_service.port`` names another."""
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
            TopologyError: This host serves data; data hosts have no rank.
        """
        if self.role is not Role.TRAINER:
            msg = f"Host {self.current_host!r} serves data and has no rank.\n{self.table()}"
            raise TopologyError(msg)
        return self.trainer_hosts.index(self.current_host)

    def table(self, devices: int | None = None) -> str:
        """Draw the hosts of the job, one line each: host, group, instance type, role, node rank, global ranks.

        Args:
            devices: Processes on each trainer host, if known.
        """
        group_of = {host: group for group in self.groups for host in group.hosts}
        rows = []
        for host in (*self.trainer_hosts, *self.data_hosts):
            group, role = group_of[host], self.role_of(host)
            node_rank, ranks = "-", "-"
            if role is Role.TRAINER:
                rank = self.trainer_hosts.index(host)
                node_rank = str(rank)
                ranks = _span(rank * devices, devices) if devices else "?"
            marker = "*" if host == self.current_host else ""
            rows.append([host + marker, group.name, group.instance_type or "-", role.value, node_rank, ranks])
        headers = ["host", "group", "instance", "role", "node rank", "ranks"]
        return tabulate(rows, headers=headers, disable_numparse=True)


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _data_group_names(job: SageMakerJob, stated: Sequence[str] | None) -> frozenset[str]:
    if stated is not None:
        unknown = sorted(set(stated) - {group.name for group in job.groups})
        if unknown:
            msg = (
                f"Data groups {unknown} were asked for (data_groups= or LIGHTNING_SM_DATA_GROUPS), but the job "
                f"({job.source}) has no such group.\n{_groups_table(job.groups, frozenset())}"
            )
            raise TopologyError(msg)
        return frozenset(stated)
    named = frozenset(group.name for group in job.groups if group.name.lower().startswith("data"))
    if named:
        return named
    accelerated = {group.name: _is_accelerated(group.instance_type) for group in job.groups}
    if any(accelerated.values()):
        return frozenset(name for name, has_accelerator in accelerated.items() if has_accelerator is False)
    return frozenset()


def _is_accelerated(instance_type: str | None) -> bool | None:
    """Whether the instance type has accelerators; None for what is no EC2 type, such as local mode's "local"."""
    match = re.match(r"ml\.([a-z]+)\d", instance_type or "")
    return match.group(1) in _ACCELERATED_FAMILIES if match else None


def _num_gpus(instance_type: str | None) -> int | None:
    """GPUs of an instance type; 0 for CPU families, None for types that are not listed."""
    if _is_accelerated(instance_type) is False:
        return 0
    family, _, size = (instance_type or "").removeprefix("ml.").partition(".")
    return _GPUS_BY_SIZE.get(family, {}).get(size)


def _check_equal_accelerators(job: SageMakerJob, training: list[InstanceGroup], names: frozenset[str]) -> None:
    """Refuse training groups with unequal accelerator counts: Lightning numbers ranks as node rank x devices."""
    counts = {group.name: _num_gpus(group.instance_type) for group in training}
    known = {count for count in counts.values() if count is not None}
    is_stated = job.devices is not None and job.devices <= min(known, default=0)
    if len(known) > 1 and not is_stated:
        stated = ", ".join(f"{name}: {count}" for name, count in counts.items() if count is not None)
        msg = (
            f"Training groups have different numbers of GPUs per host ({stated}), but Lightning needs the same number "
            f"of devices on every training host.\n{_groups_table(job.groups, names)}\n"
            "Give all training groups one instance type, name the CPU groups that serve data "
            "(LIGHTNING_SM_DATA_GROUPS=name,name), or use as many GPUs on every host (LIGHTNING_SM_DEVICES=1)."
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
    return tabulate(rows, headers=["group", "instance", "role", "hosts"], disable_numparse=True)


def _port_of(job: SageMakerJob) -> int:
    """A port that is the same on every host and likely differs between jobs that meet on one network."""
    identity = job.name or " ".join(sorted(job.hosts))
    return _FIRST_PORT + zlib.crc32(identity.encode()) % _NUM_PORTS
