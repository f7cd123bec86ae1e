"""The instance groups of a CreateTrainingJob request, and the channels that each of them sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sm.errors import ChannelError, JobConfigError, TopologyError
from lightning_sm.job.emulated_service import GroupSpec

# The service's name for the only group of a job without instance groups.
_SINGLE_GROUP = "homogeneousCluster"


def requested_groups(resource_config: Mapping[str, Any]) -> tuple[GroupSpec, ...]:
    """Read the groups of a request's ``ResourceConfig``; a homogeneous job has one group, as on the service.

    Raises:
        TopologyError: A group has no name, no type or no host, or a name is used twice.
    """
    entries = resource_config.get("InstanceGroups")
    if entries is None:
        return (GroupSpec(_SINGLE_GROUP, resource_config["InstanceCount"], resource_config["InstanceType"]),)
    if not entries:
        raise TopologyError("instance_groups is empty; name at least one group, or pass instance_type instead.")
    groups: list[GroupSpec] = []
    for entry in entries:
        name = entry.get("InstanceGroupName")
        instance_type = entry.get("InstanceType")
        num_hosts = entry.get("InstanceCount")
        if not name or not instance_type:
            raise TopologyError(
                f"InstanceGroup({name!r}, {instance_type!r}, {num_hosts!r}): a group needs a name and an instance type."
            )
        if not isinstance(num_hosts, int) or num_hosts < 1:
            raise TopologyError(f"Instance group {name!r} has {num_hosts!r} hosts; a group needs at least 1 host.")
        if any(group.name == name for group in groups):
            raise TopologyError(f"Instance group {name!r} is named twice; every group needs its own name.")
        groups.append(GroupSpec(name, num_hosts, instance_type))
    return tuple(groups)


def check_no_pipe(algorithm: Mapping[str, Any], channels: Sequence[Mapping[str, Any]]) -> None:
    """Reject Pipe mode, which local mode would silently ignore. The SDK itself rejects the rest.

    Args:
        algorithm: The field ``AlgorithmSpecification`` of CreateTrainingJob.
        channels: The field ``InputDataConfig``.

    Raises:
        JobConfigError: The job or a channel uses Pipe mode.
    """
    if algorithm.get("TrainingInputMode") == "Pipe":
        raise JobConfigError("Pipe mode (input_mode='Pipe') is not supported in local mode; use 'File'.")
    for channel in channels:
        if channel.get("InputMode") == "Pipe":
            raise JobConfigError(
                f"Channel {channel['ChannelName']!r} has input_mode='Pipe', which local mode does not support; use "
                "'File'."
            )


def groups_by_channel(channels: Sequence[Mapping[str, Any]], specs: Sequence[GroupSpec]) -> dict[str, frozenset[str]]:
    """Return the names of the groups that see each channel.

    Args:
        channels: The field ``InputDataConfig`` of CreateTrainingJob.
        specs: All groups of the job, which see every channel without ``instance_groups``.

    Raises:
        ChannelError: A channel names a group that the job does not have.
    """
    known = frozenset(spec.name for spec in specs)
    groups: dict[str, frozenset[str]] = {}
    for channel in channels:
        name = channel["ChannelName"]
        source = (channel.get("DataSource") or {}).get("S3DataSource") or {}
        stated = source.get("InstanceGroupNames")
        groups[name] = known if stated is None else frozenset(stated)
        unknown = sorted(groups[name] - known)
        if unknown:
            raise ChannelError(
                f"Channel {name!r} is assigned to the instance groups {unknown} "
                f"(TrainingInput(instance_groups={stated!r})), but the job has the groups {sorted(known)}."
            )
    return groups
