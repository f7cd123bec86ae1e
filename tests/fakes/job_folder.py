"""The configuration files that SageMaker writes to ``/opt/ml/input/config``, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sm.job.facts import InstanceGroup, SageMakerJob

# Verbatim from SageMaker SDK v2 (2.257) local mode with two hosts: no groups, and host names with a suffix.
SDK_V2_LOCAL = (
    '{"current_host": "algo-2-d0zia", "hosts": ["algo-1-d0zia", "algo-2-d0zia"], '
    '"network_interface_name": "eth0", "current_instance_type": "local"}'
)
# Verbatim from SageMaker SDK v3 (3.27) local mode: no container has this network interface.
SDK_V3_LOCAL = (
    '{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"], '
    '"network_interface_name": "ethwe", "current_instance_type": "local_cpu"}'
)
# Verbatim from a job on the service (ultralytics/yolov5 issue 12811): "hosts" is sorted, but not within the group.
SERVICE = (
    '{"current_host":"algo-1","current_instance_type":"ml.g4dn.xlarge","current_group_name":"homogeneousCluster",'
    '"hosts":["algo-1","algo-2","algo-3","algo-4"],"instance_groups":[{"instance_group_name":"homogeneousCluster",'
    '"instance_type":"ml.g4dn.xlarge","hosts":["algo-3","algo-1","algo-4","algo-2"]}],"network_interface_name":"eth0"}'
)
TWO_GROUPS = {"data_group": ["algo-3"], "gpu_group": ["algo-2", "algo-1"]}
TYPES = {"data_group": "ml.c5.xlarge", "gpu_group": "ml.g5.xlarge"}


def write_job(
    base_dir: Path,
    resources: Any = None,
    *,
    channels: Any = None,
    hyperparameters: Any = None,
    checkpoint: Any = None,
    tensorboard: Any = None,
) -> Path:
    """Write the configuration files of one host.

    Args:
        base_dir: The folder that takes the place of ``/opt/ml``.
        resources: Content of ``resourceconfig.json``.
        channels: Content of ``inputdataconfig.json``.
        hyperparameters: Content of ``hyperparameters.json``.
        checkpoint: Content of ``checkpointconfig.json``.
        tensorboard: Content of ``tensorboardoutputconfig.json``.

    Each content is written as JSON. Strings and bytes are written verbatim, so that tests can write invalid JSON. If a
    content is None, its file is not written.

    Returns:
        The base folder.
    """
    config_dir = base_dir / "input" / "config"
    config_dir.mkdir(parents=True, exist_ok=True)
    contents = {
        "resourceconfig.json": resources,
        "inputdataconfig.json": channels,
        "hyperparameters.json": hyperparameters,
        "checkpointconfig.json": checkpoint,
        "tensorboardoutputconfig.json": tensorboard,
    }
    for name, content in contents.items():
        if content is None:
            continue
        if isinstance(content, bytes):
            (config_dir / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (config_dir / name).write_text(text, encoding="utf-8")
    return base_dir


def resource_config(
    groups: Mapping[str, Sequence[str]],
    current_host: str,
    *,
    instance_types: Mapping[str, str] | None = None,
    interface: str = "eth0",
) -> dict[str, Any]:
    """Build ``resourceconfig.json`` as the service writes it: all hosts sorted, but each group's hosts as given.

    Args:
        groups: Hosts by group name. A job without instance groups has one group, ``homogeneousCluster``.
        current_host: Host that the file is for.
        instance_types: Instance types by group name; defaults to ``ml.g5.xlarge``.
        interface: Name of the network interface.
    """
    types = instance_types or {}
    current_group = next(name for name, hosts in groups.items() if current_host in hosts)
    return {
        "current_host": current_host,
        "current_instance_type": types.get(current_group, "ml.g5.xlarge"),
        "current_group_name": current_group,
        "hosts": sorted(host for hosts in groups.values() for host in hosts),
        "instance_groups": [
            {"instance_group_name": name, "instance_type": types.get(name, "ml.g5.xlarge"), "hosts": list(hosts)}
            for name, hosts in groups.items()
        ],
        "network_interface_name": interface,
    }


def make_job(
    groups: Mapping[str, Sequence[str]],
    current_host: str | None = None,
    *,
    instance_types: Mapping[str, str | None] | None = None,
    **facts: Any,
) -> SageMakerJob:
    """Build the facts of a job without files.

    Args:
        groups: Hosts by group name.
        current_host: Host that the facts describe; defaults to the first of all hosts.
        instance_types: Instance types by group name; unknown by default.
        facts: Other attributes of ``SageMakerJob``.
    """
    types = instance_types or {}
    hosts = tuple(sorted(host for members in groups.values() for host in members))
    return SageMakerJob(
        current_host=current_host or hosts[0],
        hosts=hosts,
        groups=tuple(InstanceGroup(name, tuple(members), types.get(name)) for name, members in groups.items()),
        source="resourceconfig.json",
        **facts,
    )


def read(base_dir: Path, **env: str) -> SageMakerJob:
    """Read the job as a process with these environment variables does."""
    job = SageMakerJob.from_environment(env, base_dir)
    assert job is not None
    return job
