"""Checks of what the host knows about its job: files of the service, channels, arguments, variables of launchers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_sm.doctor.checks.network import data_port
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Result, listed, ok, problem, warning
from lightning_sm.errors import HyperparameterError, TopologyError
from lightning_sm.job.command_line import job_arguments
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.process_launcher import Launch, stray_variables
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_GROUPS, MAIN_PORT
from lightning_sm.launcher.toolkit.distribution import processes_per_host


def facts(context: Context) -> Iterator[Result]:
    """Show what the job is and where that was read.

    Args:
        context: The host.
    """
    job, topology = context.job, context.topology
    if context.error is not None:
        advice = "Correct the file or variable that it names. Files of the service are written anew for each job."
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
        yield ok("meeting point", _meeting_point(job, topology))
    where = f"{job.checkpoint_dir}, copied to {job.checkpoint_uri or 'S3'}" if job.checkpoint_dir else "none"
    yield ok("checkpoints", where)


def channels(context: Context) -> Iterator[Result]:
    """List the input channels and miss the folders that are not there.

    Args:
        context: The host.
    """
    if context.job is None:
        return
    shown = []
    for channel in context.job.channels.values():
        sharded = "" if channel.distribution == "FullyReplicated" else f", {channel.distribution}"
        shown.append(f"{channel.name} ({channel.mode}{sharded})")
        # In Pipe mode there are FIFOs beside the path, none of them before the service is asked for data.
        if channel.mode != "Pipe" and not os.path.isdir(channel.path):
            yield problem(
                "channels",
                f"Channel {channel.name!r} ({channel.mode}) has no folder {channel.path}.",
                "Look at fit(inputs=...); in a container of your own, mount the folder.",
            )
    yield ok("channels", listed(shown) or "none")


def hyperparameters(context: Context) -> Iterator[Result]:
    """Count the hyperparameters, and try to make arguments and a number of processes of them.

    Args:
        context: The host.
    """
    if context.job is None:
        return
    try:
        arguments = job_arguments(context.job, Path.cwd())
        if context.topology is not None:
            processes_per_host(context.job, context.topology)
    except (HyperparameterError, TopologyError) as error:
        yield problem("hyperparameters", str(error), "Change the hyperparameter: the script would not be started.")
        return
    # The values stay out of the report, which people paste into tickets.
    yield ok("hyperparameters", f"{len(context.job.hyperparameters)}; arguments of the script: {len(arguments)}")


def rank_variables(context: Context) -> Iterator[Result]:
    """Find ranks and addresses that no launcher of this process can have set.

    Args:
        context: The host.
    """
    try:
        launch = Launch.detect(context.env, os.getppid())
    except TopologyError as error:
        yield problem("rank variables", str(error), "Start a new shell, or the launcher again.")
        return
    stray = list(stray_variables(context.env, launch))
    # Lightning takes a process with this one for a task of Slurm; outside of a job, it may be one.
    if context.job is not None and "SLURM_NTASKS" in context.env:
        stray.append("SLURM_NTASKS")
    if stray:
        yield warning(
            "rank variables",
            f"Set, but not by a launcher of this process: {', '.join(f'{name}={context.env[name]}' for name in stray)}",
            "Unset them in the Dockerfile or shell. SageMakerEnvironment ignores them; other code believes them.",
        )
    else:
        yield ok("rank variables", f"none left behind; started as {launch.launcher.value}")


def _own_place(job: SageMakerJob, topology: Topology) -> str:
    group = job.current_group
    rank = f", node rank {topology.node_rank} of {topology.num_nodes}" if topology.role is Role.TRAINER else ""
    instance = f" ({group.instance_type})" if group.instance_type else ""
    return f"{job.current_host}, group {group.name}{instance}, role {topology.role.value}{rank}"


def _hosts(topology: Topology) -> str:
    data = f"; data: {listed(topology.data_hosts)}" if topology.data_hosts else ""
    return f"trainers: {listed(topology.trainer_hosts)}{data}"


def _meeting_point(job: SageMakerJob, topology: Topology) -> str:
    address = job.addresses.get(topology.main_host)
    host = f"{topology.main_host} ({address})" if address else topology.main_host
    origin = MAIN_PORT.name if job.main_port else f"from the {'name of the job' if job.name else 'host names'}"
    data = f"; data hosts listen on {data_port(job, topology)}" if topology.data_hosts else ""
    return f"{host}, port {topology.main_port} ({origin}), interface {job.network_interface or '(none named)'}{data}"
