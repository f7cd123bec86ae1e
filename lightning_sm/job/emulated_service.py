"""The emulator's assignment of hosts to instance groups, and its ``resourceconfig.json``, both like the service's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sm.job.facts import InstanceGroup

DEFAULT_INSTANCE_TYPE = "ml.m5.xlarge"


@dataclass(frozen=True)
class GroupSpec:
    """An instance group as requested by the user.

    Attributes:
        name: Name of the group; a name that starts with "data" makes its hosts serve data.
        num_hosts: Number of hosts.
        instance_type: The type in ``resourceconfig.json``, which affects roles but not speed.
    """

    name: str
    num_hosts: int
    instance_type: str = DEFAULT_INSTANCE_TYPE


def deal_hosts(specs: Sequence[GroupSpec], hosts: Sequence[str], draw: random.Random) -> tuple[InstanceGroup, ...]:
    """Assign the hosts to the groups at random, as the service does.

    Args:
        specs: The groups; their host counts must add up to ``len(hosts)``.
        hosts: Names of all hosts.
        draw: The random number generator. The same state assigns the same positions in ``hosts`` to the same groups.
    """
    unassigned = list(hosts)
    draw.shuffle(unassigned)
    groups = []
    for spec in specs:
        groups.append(InstanceGroup(spec.name, tuple(unassigned[: spec.num_hosts]), spec.instance_type))
        del unassigned[: spec.num_hosts]
    return tuple(groups)


def group_of(groups: Sequence[InstanceGroup], host: str) -> InstanceGroup:
    """Return the group of a host."""
    return next(group for group in groups if host in group.hosts)


def resource_config_of(groups: Sequence[InstanceGroup], host: str) -> dict[str, Any]:
    """Return the content of a host's ``resourceconfig.json``, without the network interface.

    Source:
        Logs of real jobs: ``hosts`` are sorted as text (algo-10 before algo-2); the hosts of a group are unsorted.
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
