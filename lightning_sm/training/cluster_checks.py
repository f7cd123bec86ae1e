"""Checks, made before training, for settings that would make ranks hang or train separately.

The error messages include the host table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_sm.errors import TopologyError
from lightning_sm.job.rank_starter import RankStart, RankStarter
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import DEVICES

if TYPE_CHECKING:
    from lightning_sm.training.environment import SageMakerEnvironment

_DEVICES_SETTING = f"{DEVICES.name} (lightning-sm local --devices) or distribution={{...}}"
_SET_BY_OURS = "SageMakerCLI, SageMakerTrainer and SageMakerFabric set it"


def check_launcher(start: RankStart, topology: Topology) -> None:
    """Raise if torchrun or mpirun does not span the trainer hosts.

    Args:
        start: How this process was started.
        topology: Roles and ranks of all hosts.

    Raises:
        TopologyError: The launcher's number of processes does not fit the trainer hosts.
    """
    devices, world_size = start.devices, start.world_size
    if devices is None or world_size is None or world_size == devices * topology.num_nodes:
        return
    launcher = start.launcher.value
    raise TopologyError(
        f"{launcher} set world size {world_size} and local world size {devices}, but the job needs world "
        f"size {devices * topology.num_nodes}: trainer hosts x local world size = {topology.num_nodes} x {devices} "
        f"({topology.source}).\n{topology.table(devices)}\n"
        f"Start {launcher} on all trainer hosts with the same number of processes on each. If the SDK starts one in "
        "each of several training groups, join these groups with the hyperparameter "
        "sagemaker_distribution_instance_groups, a list of their names."
    )


def check_world_size(environment: SageMakerEnvironment, size: int, rank: int | None) -> None:
    """Raise if the ranks would hang. With ddp_spawn, or FSDP under torchrun, Lightning calls only this check.

    Args:
        environment: The environment.
        size: The world size that Lightning has computed.
        rank: The global rank that Lightning has computed, or None if Lightning has not computed it yet.

    Raises:
        TopologyError: The size or the rank contradicts the job.
    """
    per_host, rest = divmod(size, environment.num_nodes)
    expected_rank = environment.node_rank() * per_host + environment.local_rank()
    if not rest and environment.devices in (None, per_host) and rank in (None, expected_rank):
        return
    devices = f", processes on each: {environment.devices}" if environment.devices else ""
    raise TopologyError(
        f"Trainer(num_nodes, devices) gives world size {size} and rank {environment.global_rank()} to this process, "
        f"which contradicts the job (trainer hosts: {environment.num_nodes}{devices}; {environment.topology.source}).\n"
        f"{environment.topology.table(environment.devices)}\n"
        f"Set num_nodes={environment.num_nodes} and the same number of devices on every host."
    )


def check_num_nodes(num_nodes: int, topology: Topology, stated: str, advice: str, consequence: str = "") -> None:
    """Raise if training does not span exactly the trainer hosts.

    Args:
        num_nodes: Number of hosts that training spans.
        topology: Roles and ranks of all hosts.
        stated: The script's setting, as the subject of the error message.
        advice: Advice for the user, in full sentences.
        consequence: What would happen without the error; the text begins with a colon.

    Raises:
        TopologyError: ``num_nodes`` is not the number of trainer hosts.
    """
    if num_nodes != topology.num_nodes:
        raise TopologyError(
            f"{stated} does not match the number of trainer hosts in the job, {topology.num_nodes} "
            f"({topology.source}){consequence}.\n{topology.table()}\n{advice}"
        )


def check_settings(environment: SageMakerEnvironment, num_devices: int, num_nodes: int) -> None:
    """Raise if the Trainer's settings contradict the cluster.

    Args:
        environment: The environment.
        num_devices: Number of processes on each trainer host.
        num_nodes: Number of trainer hosts.

    Raises:
        TopologyError: The settings contradict the cluster.
    """
    topology, devices = environment.topology, environment.devices
    advice = f"Set num_nodes={topology.num_nodes}, or leave num_nodes out: {_SET_BY_OURS}."
    check_num_nodes(num_nodes, topology, f"num_nodes={num_nodes}", advice)
    if devices is not None and num_devices != devices:
        is_set_outside = environment.start.launcher in (RankStarter.TORCHRUN, RankStarter.MPI)
        set_by = environment.start.launcher.value if is_set_outside else _DEVICES_SETTING
        raise TopologyError(
            f"devices={num_devices} does not match the number of processes on each host, "
            f"{devices}, set by {set_by}.\n{topology.table(devices)}\n"
            f"Set devices={devices}, or leave devices out: {_SET_BY_OURS}."
        )
