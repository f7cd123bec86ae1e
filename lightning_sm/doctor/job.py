"""Checks of the job's facts on this host, and of the network between the job's hosts."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lightning_sm._text import listed
from lightning_sm.doctor.context import Context, Result, Status, ok, problem, warning
from lightning_sm.errors import JobConfigError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.redaction import shown
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_GROUPS, HOST_ADDRESSES, SETTINGS, USER_SETTINGS, misspelled

# Long enough for three SYNs: the third is sent after 3 s (RFC 6298: 1 s, then doubled).
_CONNECT_S = 5.0
_MAX_THREADS = 64


def facts(context: Context) -> Iterator[Result]:
    """Show the job and the role of this host."""
    job, topology = context.job, context.topology
    if context.error is not None:
        yield problem(
            "job",
            f"{type(context.error).__name__}: {context.error}",
            f"Correct the file or variable that the error names, the instance groups, or {DATA_GROUPS.name}.",
        )
    elif job is None:
        yield ok("job", "Not a SageMaker host: no resourceconfig.json, and neither SM_RESOURCE_CONFIG nor SM_HOSTS.")
    if job is None:
        return
    yield ok("job", f"{job.name or '(no name)'}; hosts from {job.source}")
    if topology is not None:
        rank = f", node rank {topology.node_rank} of {topology.num_nodes}" if topology.role is Role.TRAINER else ""
        instance = job.current_group.instance_type or "instance type unknown"
        yield ok(
            "this host",
            f"{job.current_host}, group {job.current_group.name} ({instance}), role {topology.role.value}{rank}",
        )
        yield ok("rendezvous", f"{topology.main_host}, port {topology.main_port}")


def variables(context: Context) -> Iterator[Result]:
    """Read every setting, and warn of misspelled ones, which nothing reads."""
    for setting in SETTINGS:
        try:
            setting.read(context.env)
        except JobConfigError as error:  # noqa: PERF203 - one row per error
            yield problem("variables", str(error), "Correct the variable: the launcher would not start the script.")
    for name, near in misspelled(context.env).items():
        yield warning("variables", f"{name} is set, but nothing reads it.", f"Did you mean {near}?")
    names = [setting.name for setting in USER_SETTINGS if setting.name in context.env]
    found = [f"{name}={shown(name, context.env[name])}" for name in names]
    yield ok("variables", ", ".join(found) or "settings: none, so all have their defaults")


def other_hosts(context: Context) -> Iterator[Result]:
    """Resolve the other hosts' names, and connect to them; even a refused connection proves that packets arrive."""
    job, topology = context.job, context.topology
    if job is None or topology is None or len(job.hosts) == 1:
        return
    hosts = [host for host in job.hosts if host != job.current_host]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(hosts))) as pool:
        results = list(pool.map(partial(_reach, job, topology), hosts))
    for status, advice in dict.fromkeys((result.status, result.advice) for result in results):
        found = [result.found for result in results if result.advice == advice]
        yield Result("other hosts", status, listed(found), advice)
    if context.has_own_machine and _is_loopback(job.current_host):
        yield warning(
            "this host",
            f"{job.current_host}, the name of this host, has a loopback address, which other hosts cannot reach.",
            "Remove the line from /etc/hosts, or set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the real interface.",
        )


def _reach(job: SageMakerJob, topology: Topology, host: str) -> Result:
    port = topology.main_port if topology.role_of(host) is Role.TRAINER else topology.data_port
    advice = (
        "Packets are dropped. In a VPC (subnets=, security_group_ids=), the security group must allow all traffic from "
        "itself; check network ACLs and routes, too."
    )
    try:
        socket.create_connection((job.addresses.get(host, host), port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return ok("other hosts", f"{host}:{port} is reachable (nothing listens yet)")
    except socket.gaierror as error:
        reason = f"does not resolve: {error.strerror}"
        advice = (
            "In a new job, names may take minutes to resolve. Later, check the VPC's DNS and /etc/resolv.conf; off "
            f"SageMaker, set {HOST_ADDRESSES.name}."
        )
    except TimeoutError:
        reason = f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        reason = f"unreachable: {error.strerror}"
        advice = "Check the routes of this host and of the VPC."
    else:
        return ok("other hosts", f"{host}:{port} listens")
    return Result("other hosts", Status.PROBLEM, f"{host}:{port} ({reason})", advice)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False
