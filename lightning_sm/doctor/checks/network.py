"""Checks of the network between the hosts: names, connections, and the ports of this host."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import psutil

from lightning_sm._text import listed
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.parallel import TaskResult, in_parallel
from lightning_sm.doctor.report import Result, ok, problem, warning
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import unquoted
from lightning_sm.job.redaction import shown_arguments
from lightning_sm.job.rendezvous import own_address
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import HOST_ADDRESSES, MAIN_PORT

# By default, a resolver that does not answer is tried again after 5 s (resolv.conf(5), "timeout").
_LOOKUP_S = 10.0
# The third SYN leaves after 3 s (RFC 6298: 1 s, then doubled).
_CONNECT_S = 5.0
# Time to collect the results of connections that time out.
_GRACE_S = 0.25

_SECURITY_GROUP = (
    "Packets are dropped. In a VPC (subnets=, security_group_ids=), the security group must allow all traffic from "
    "itself; check network ACLs and routes, too."
)


def data_port(job: SageMakerJob, topology: Topology) -> int:
    """Return the port on which data hosts listen, as far as it can be known before the script runs.

    A configuration file of the script may set another port than its hyperparameters.
    """
    text = unquoted(job.hyperparameters.get("data_service.port")) or ""
    # The script refuses a value that is not a port.
    if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 1 << 16:
        return int(text)
    return topology.data_port


def hosts(context: Context) -> Iterator[Result]:
    """Resolve the name of every host of the job, and connect to the hosts that resolve."""
    job = context.job
    if job is None:
        return
    names = [job.addresses.get(host, host) for host in job.hosts]
    outcomes = dict(zip(job.hosts, in_parallel(_resolve, names, context.seconds(_LOOKUP_S)), strict=True))
    addresses = {host: outcome.value[0] for host, outcome in outcomes.items() if outcome.value}
    lost = [f"{host} ({_why_unresolved(outcomes[host])})" for host in job.hosts if host not in addresses]
    if lost:
        yield problem(
            "names",
            f"{len(lost)} of {len(outcomes)} host names did not resolve: {listed(lost)}",
            "In a new job, names may take minutes to resolve. Later, check the VPC's DNS and /etc/resolv.conf; off "
            f"SageMaker, set {HOST_ADDRESSES.name}.",
        )
    if addresses:
        texts = [
            f"{host} {address} ({1000 * (outcomes[host].seconds or 0):.1f} ms)" for host, address in addresses.items()
        ]
        yield ok("names", listed(texts))
    own = addresses.pop(job.current_host, None)
    if len(job.hosts) > 1 and not context.shares_machine and own and ipaddress.ip_address(own).is_loopback:
        yield warning(
            "names",
            f"{job.current_host}, the name of this host, resolves to {own}, which other hosts cannot reach.",
            "Remove the line from /etc/hosts, or set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the real interface.",
        )
    if context.topology is not None and addresses:
        yield from _connections(context, job, context.topology, addresses)


def own_port(context: Context) -> Iterator[Result]:
    """Try to bind the ports on which this host must listen."""
    job = context.job
    topology = context.topology
    if job is None or topology is None:
        return
    if topology.role is Role.DATA:
        # Each host of the emulator has an address of its own on one machine, so all listen on the same port.
        address = job.addresses.get(job.current_host, "")
        yield _bind(data_port(job, topology), address, "data_service.port")
    elif topology.current_host == topology.main_host:
        yield _bind(topology.main_port, "", MAIN_PORT.name)
        if len(job.hosts) > 1:
            # Without this port the job runs, but its hosts do not learn of each other's failures.
            port = topology.peers_port
            yield _bind(port, own_address(job), MAIN_PORT.name, use=" (between the launchers)", taken=warning)


def _connections(
    context: Context, job: SageMakerJob, topology: Topology, addresses: Mapping[str, str]
) -> Iterator[Result]:
    """Connect to other hosts; a refusal also proves that packets arrive."""
    timeout_s = context.seconds(_CONNECT_S)
    ports = {
        host: topology.main_port if topology.role_of(host) is Role.TRAINER else data_port(job, topology)
        for host in addresses
    }
    targets = [(address, ports[host], timeout_s) for host, address in addresses.items()]
    reached = []
    dropped = []
    failed = []
    for host, outcome in zip(ports, in_parallel(_connect, targets, timeout_s + _GRACE_S), strict=True):
        target = f"{host}:{ports[host]}"
        if outcome.value:
            reached.append(f"{target} {outcome.value}")
        elif outcome.error is None or isinstance(outcome.error, TimeoutError):
            dropped.append(target)
        else:
            failed.append(f"{target} ({outcome.error})")
    if reached:
        yield ok("other hosts", listed(reached))
    if dropped:
        yield problem("other hosts", f"No answer within {timeout_s:.1f} s: {listed(dropped)}", _SECURITY_GROUP)
    if failed:
        yield problem("other hosts", f"Unreachable: {listed(failed)}", "Check the routes of this host and of the VPC.")


def _resolve(name: str) -> list[str]:
    """Return the addresses of a host, IPv4 first."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return [str(entry[4][0]).partition("%")[0] for entry in ordered]


def _why_unresolved(outcome: TaskResult[list[str]]) -> str:
    if outcome.error is None:
        return "no answer in time"
    return getattr(outcome.error, "strerror", None) or str(outcome.error)


def _connect(target: tuple[str, int, float]) -> str:
    """Connect to the port of a host, and return its state in words.

    Raises:
        OSError: The host does not answer; TimeoutError if packets are dropped.
    """
    address, port, timeout_s = target
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return "reachable (nothing listens yet)"
    return "listens"


def _bind(
    port: int, address: str, setting: str, *, use: str = "", taken: Callable[[str, str, str], Result] = problem
) -> Result:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            reason = error
        else:
            return ok("own port", f"{port}{use} is free")
    owner, is_training = _listener(port) if reason.errno == errno.EADDRINUSE else ("", False)
    if is_training:
        return ok("own port", f"{port}{use}: the training listens ({owner})")
    by = f", by {owner}" if owner else ""
    return taken(
        "own port",
        f"Port {port}{use} cannot be used here: {os.strerror(reason.errno or 0)}{by}.",
        f"Unless that process is the training itself, set {setting} to a free port, the same on every host.",
    )


def _listener(port: int) -> tuple[str, bool]:
    """Return which process listens on a port, if this user may know, and whether ``lightning-sm train`` started it."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                process = psutil.Process(connection.pid)
                family = [process, *process.parents()]
                is_training = any(_is_train(relative.cmdline()) for relative in family)
                return f"process {process.pid}: {' '.join(shown_arguments(process.cmdline()))[:80]}", is_training
    except psutil.Error:
        pass
    return "a process that is not visible from here", False


def _is_train(command: Sequence[str]) -> bool:
    return "train" in command and any("lightning-sm" in word or "lightning_sm" in word for word in command)
