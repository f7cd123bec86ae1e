"""Instance groups on this machine: which host is in which group, and what the files of a host say of it.

The emulator and local mode stand in for the service here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sm.job.facts import InstanceGroup

DEFAULT_INSTANCE_TYPE = "ml.m5.xlarge"


@dataclass(frozen=True)
class GroupSpec:
    """One instance group as it is asked for.

    Attributes:
        name: Name of the group; a name that starts with "data" makes its hosts serve data.
        num_hosts: Number of hosts.
        instance_type: What ``resourceconfig.json`` claims; it decides roles, not speed.
    """

    name: str
    num_hosts: int
    instance_type: str = DEFAULT_INSTANCE_TYPE


def deal_hosts(specs: Sequence[GroupSpec], hosts: Sequence[str], draw: random.Random) -> tuple[InstanceGroup, ...]:
    """Deal the hosts out at random: on the service, too, any host may land in any group, in any order.

    Args:
        specs: The groups, which have as many hosts together as there are.
        hosts: Names of all hosts.
        draw: Decides. In the same state it deals the same positions of ``hosts`` to the same groups.
    """
    names = list(hosts)
    draw.shuffle(names)
    groups = []
    for spec in specs:
        own, names = names[: spec.num_hosts], names[spec.num_hosts :]
        groups.append(InstanceGroup(spec.name, tuple(own), spec.instance_type))
    return tuple(groups)


def group_of(groups: Sequence[InstanceGroup], host: str) -> InstanceGroup:
    """The group of a host.

    Args:
        groups: All groups.
        host: Name of the host.
    """
    return next(group for group in groups if host in group.hosts)


def resource_config_of(groups: Sequence[InstanceGroup], host: str) -> dict[str, Any]:
    """What the service writes into a host's ``resourceconfig.json``, but for the network interface.

    Args:
        groups: All groups of the job.
        host: Name of the host.

    Source:
        Logs of real jobs: ``hosts`` are sorted as text (algo-10 before algo-2), the hosts of a group are not.
    """
    current = group_of(groups, host)
    return {
        "current_group_name": current.name,
        "current_host": host,
        "current_instance_type": current.instance_type,
        "hosts": sorted(name for group in groups for name in group.hosts),
        "instance_groups": [
            {"instance_group_name": group.name, "instance_type": group.instance_type, "hosts": list(group.hosts)}
            for group in groups
        ],
    }
