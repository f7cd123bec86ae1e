"""What a CreateTrainingJob request says of instance groups: which there are, and which channels each of them sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sm.errors import ChannelError, JobConfigError, TopologyError
from lightning_sm.job.emulated_service import GroupSpec

# The service's name for the only group of a job without instance groups.
_SINGLE_GROUP = "homogeneousCluster"


def requested_groups(resource_config: Mapping[str, Any]) -> tuple[GroupSpec, ...]:
    """Read the groups of a request; a homogeneous job has one, as on the service.

    Args:
        resource_config: The field ``ResourceConfig`` of CreateTrainingJob.

    Raises:
        TopologyError: A group has no name, no type or no host, or the name of another one.
    """
    entries = resource_config.get("InstanceGroups")
    if entries is None:
        instance_type, num_hosts = resource_config["InstanceType"], resource_config["InstanceCount"]
        return (GroupSpec(_SINGLE_GROUP, num_hosts, instance_type),)
    if not entries:
        raise TopologyError("instance_groups is empty; name at least one group, or give instance_type instead.")
    groups: list[GroupSpec] = []
    for entry in entries:
        name, instance_type, num_hosts = (entry.get(f"Instance{key}") for key in ("GroupName", "Type", "Count"))
        if not name or not instance_type:
            raise TopologyError(
                f"InstanceGroup({name!r}, {instance_type!r}, {num_hosts!r}): a group needs a name and an instance type."
            )
        if not isinstance(num_hosts, int) or num_hosts < 1:
            raise TopologyError(f"Instance group {name!r} has {num_hosts!r} hosts; a group needs at least 1.")
        if any(group.name == name for group in groups):
            raise TopologyError(f"Instance group {name!r} is named twice; every group needs a name of its own.")
        groups.append(GroupSpec(name, num_hosts, instance_type))
    return tuple(groups)


def groups_by_channel(channels: Sequence[Mapping[str, Any]], specs: Sequence[GroupSpec]) -> dict[str, frozenset[str]]:
    """Which groups see which channel.

    Args:
        channels: The field ``InputDataConfig`` of CreateTrainingJob.
        specs: All groups of the job; they see every channel that names no groups.

    Raises:
        ChannelError: A channel names a group that the job does not have.
    """
    known = frozenset(spec.name for spec in specs)
    return {channel["ChannelName"]: _groups_of_channel(channel, known) for channel in channels}


def _groups_of_channel(channel: Mapping[str, Any], known: frozenset[str]) -> frozenset[str]:
    source = (channel.get("DataSource") or {}).get("S3DataSource") or {}
    names = source.get("InstanceGroupNames")
    if names is None:
        return known
    unknown = sorted(set(names) - known)
    if unknown:
        raise ChannelError(
            f"Channel {channel['ChannelName']!r} is meant for the instance groups {unknown} "
            f"(TrainingInput(instance_groups={list(names)!r})), but the job has the groups {sorted(known)}."
        )
    return frozenset(names)


def check_supported(
    request: Mapping[str, Any], channels: Sequence[Mapping[str, Any]], algorithm: Mapping[str, Any]
) -> None:
    """Refuse what local mode would ignore without a word.

    Args:
        request: Further fields of CreateTrainingJob.
        channels: The field ``InputDataConfig``.
        algorithm: The field ``AlgorithmSpecification``.

    Raises:
        JobConfigError: The job asks for spot instances, a checkpoint folder in S3, Pipe mode or sharded channels.
    """
    if request.get("EnableManagedSpotTraining"):
        raise JobConfigError(
            "Spot training (use_spot_instances=True) is not supported in local mode, where nothing is ever "
            "interrupted. Set use_spot_instances=False here."
        )
    if request.get("CheckpointConfig"):
        raise JobConfigError(
            f"A checkpoint folder (checkpoint_s3_uri, checkpoint_local_path: {request['CheckpointConfig']!r}) is not "
            "supported in local mode. Leave it out here."
        )
    if algorithm.get("TrainingInputMode") == "Pipe":
        raise JobConfigError("Pipe mode (input_mode='Pipe') is not supported in local mode; use 'File' here.")
    for channel in channels:
        if channel.get("InputMode") == "Pipe":
            raise JobConfigError(
                f"Channel {channel['ChannelName']!r} has input_mode='Pipe', which local mode does not support; use "
                "'File' here."
            )
        source = (channel.get("DataSource") or {}).get("S3DataSource") or {}
        distribution = source.get("S3DataDistributionType") or "FullyReplicated"
        if distribution != "FullyReplicated":
            raise JobConfigError(
                f"Channel {channel['ChannelName']!r} has distribution={distribution!r}, which local mode does not "
                "support; use 'FullyReplicated' here."
            )
