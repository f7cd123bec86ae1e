"""The hosts of a job, as the service describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The service's name for the only group of a job without instance groups.
_ONLY_GROUP = "homogeneousCluster"


@dataclass(frozen=True)
class HostGroup:
    """Hosts of one type.

    Attributes:
        name: Name of the instance group.
        num_hosts: Number of hosts.
        instance_type: For example ml.g5.xlarge.
    """

    name: str
    num_hosts: int
    instance_type: str


def groups_of(description: Mapping[str, Any]) -> list[HostGroup]:
    """Return the instance groups of a training job; one without groups has a single one.

    Args:
        description: An answer of DescribeTrainingJob.
    """
    resources = description.get("ResourceConfig", {})
    groups = resources.get("InstanceGroups")
    if groups:
        return [
            HostGroup(group["InstanceGroupName"], group["InstanceCount"], group["InstanceType"]) for group in groups
        ]
    preferred = resources.get("InstancePreferences", [])
    if preferred and "SelectedInstanceType" not in resources:  # the service has not chosen yet
        counts = [one.get("InstanceCount", resources.get("InstanceCount", 0)) for one in preferred]
        return [HostGroup(_ONLY_GROUP, counts[0], " or ".join(one["InstanceType"] for one in preferred))]
    instance_type = resources.get("SelectedInstanceType") or resources.get("InstanceType", "unknown")
    count = resources.get("SelectedInstanceCount") or resources.get("InstanceCount", 0)
    return [HostGroup(_ONLY_GROUP, count, instance_type)]


def shown_hosts(description: Mapping[str, Any]) -> str:
    """Return the hosts in words, such as ``2 ml.g5.xlarge + 1 ml.c5.xlarge``."""
    return " + ".join(f"{group.num_hosts} {group.instance_type}" for group in groups_of(description))
