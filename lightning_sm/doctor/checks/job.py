"""Checks of the host's knowledge of its job: files of the service, channels, hyperparameters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_sm._text import listed
from lightning_sm.doctor.checks.network import data_port
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Result, ok, problem
from lightning_sm.errors import HyperparameterError, StrategyError, TopologyError
from lightning_sm.job.command_line import job_arguments
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_GROUPS, MAIN_PORT
from lightning_sm.launcher.toolkit.distribution import processes_per_host


def facts(context: Context) -> Iterator[Result]:
    """Show the job, the role of this host, and where both were read."""
    job = context.job
    topology = context.topology
    if context.error is not None:
        advice = "Correct the file or variable that the error names. The service rewrites its files for each job."
        if job is not None:
            advice = f"Change the instance groups of the job, or {DATA_GROUPS.name}."
        yield problem("job", f"{type(context.error).__name__}: {context.error}", advice)
    elif job is None:
        path = context.base_dir / "input" / "config" / "resourceconfig.json"
        yield ok(
            "job",
            f"Not a SageMaker host: no {path}, and neither SM_RESOURCE_CONFIG nor SM_HOSTS is set. "
            "Hosts, ports and channels are not checked.",
        )
    if job is None:
        return
    yield ok("job", f"{job.name or '(no name)'}; hosts from {job.source}")
    if topology is not None:
        yield ok("this host", _own_place(job, topology))
        yield ok("hosts", _hosts(topology))
        yield ok("rendezvous", _rendezvous(job, topology))
    where = f"{job.checkpoint_dir}, copied to {job.checkpoint_uri or 'S3'}" if job.checkpoint_dir else "none"
    yield ok("checkpoints", where)


def channels(context: Context) -> Iterator[Result]:
    """List the input channels, and find those without a folder."""
    if context.job is None:
        return
    shown = []
    for channel in context.job.channels.values():
        sharded = "" if channel.distribution == "FullyReplicated" else f", {channel.distribution}"
        shown.append(f"{channel.name} ({channel.mode}{sharded})")
        # In Pipe mode there is no folder, only FIFOs whose names begin with the path.
        if channel.mode != "Pipe" and not os.path.isdir(channel.path):
            yield problem(
                "channels",
                f"Channel {channel.name!r} ({channel.mode}) has no folder {channel.path}.",
                "Check fit(inputs=...); in a container of your own, mount the folder.",
            )
    yield ok("channels", listed(shown) or "none")


def hyperparameters(context: Context) -> Iterator[Result]:
    """Turn the hyperparameters into the script's arguments, and read the number of processes in them."""
    if context.job is None:
        return
    try:
        arguments = job_arguments(context.job, Path.cwd())
        if context.topology is not None:
            processes_per_host(context.job, context.topology)
    except (HyperparameterError, StrategyError, TopologyError) as error:
        yield problem(
            "hyperparameters", str(error), "Correct the hyperparameter: the launcher would not start the script."
        )
        return
    # The values stay out of the report, which people paste into tickets.
    yield ok("hyperparameters", f"{len(context.job.hyperparameters)}; arguments of the script: {len(arguments)}")


def _own_place(job: SageMakerJob, topology: Topology) -> str:
    group = job.current_group
    rank = f", node rank {topology.node_rank} of {topology.num_nodes}" if topology.role is Role.TRAINER else ""
    instance = f" ({group.instance_type})" if group.instance_type else ""
    return f"{job.current_host}, group {group.name}{instance}, role {topology.role.value}{rank}"


def _hosts(topology: Topology) -> str:
    data = f"; data: {listed(topology.data_hosts)}" if topology.data_hosts else ""
    return f"trainers: {listed(topology.trainer_hosts)}{data}"


def _rendezvous(job: SageMakerJob, topology: Topology) -> str:
    address = job.addresses.get(topology.main_host)
    host = f"{topology.main_host} ({address})" if address else topology.main_host
    origin = MAIN_PORT.name if job.main_port else f"from the {'name of the job' if job.name else 'host names'}"
    data = f"; data hosts listen on {data_port(job, topology)}" if topology.data_hosts else ""
    return f"{host}, port {topology.main_port} ({origin}), interface {job.network_interface or '(none named)'}{data}"
