"""Checks of the way to the other hosts: names, interfaces, ports."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

import psutil

from lightning_sm.doctor.context import Context
from lightning_sm.doctor.parallel import Outcome, in_parallel
from lightning_sm.doctor.report import Result, listed, ok, problem, warning
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import unquoted
from lightning_sm.job.rendezvous import own_address
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import HOST_ADDRESSES, MAIN_PORT

# A resolver that is well answers in milliseconds; by default, one that does not answer is asked again after 5 s
# (resolv.conf(5), "timeout"), and this leaves it that second chance.
_LOOKUP_S = 10.0
_SLOW_LOOKUP_S = 1.0
# The third SYN leaves after 3 s (RFC 6298: 1 s, then doubled).
_CONNECT_S = 5.0
# To collect what ended at the last moment.
_GRACE_S = 0.25

_SECURITY_GROUP = (
    "Packets are dropped on the way. In a VPC (subnets=, security_group_ids=), the security group must allow all "
    "traffic from itself; look at network ACLs and routes, too."
)


def data_port(job: SageMakerJob, topology: Topology) -> int:
    """The port on which data hosts listen, as far as it can be known before the script runs.

    Args:
        job: The job. A configuration file of the script may set another port than its hyperparameters.
        topology: Its layout.
    """
    stated = unquoted(job.hyperparameters.get("data_service.port")) or ""
    # What is no port is the script's to refuse.
    if re.fullmatch(r"[0-9]{1,5}", stated) and 0 < int(stated) < 1 << 16:
        return int(stated)
    return topology.data_port


def hosts(context: Context) -> Iterator[Result]:
    """Look up every host of the job, and connect to those that are found.

    Args:
        context: The host.
    """
    job = context.job
    if job is None:
        return
    stated = [job.addresses.get(host, host) for host in job.hosts]
    outcomes = dict(zip(job.hosts, in_parallel(_lookup, stated, context.seconds(_LOOKUP_S)), strict=True))
    yield from _names(outcomes)
    addresses = {host: outcome.value[0] for host, outcome in outcomes.items() if outcome.value}
    own = addresses.pop(job.current_host, None)
    if len(job.hosts) > 1 and not context.is_emulated and own and ipaddress.ip_address(own).is_loopback:
        yield warning(
            "names",
            f"{job.current_host}, the name of this host, is {own} here: what listens on it is out of reach.",
            "Remove the line from /etc/hosts, or give NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME the real interface.",
        )
    if context.topology is not None and addresses:
        yield from _ways(context, job, context.topology, addresses)


def interface(context: Context) -> Iterator[Result]:
    """Look for the interface of the job, and for those that NCCL and Gloo are told to use.

    Args:
        context: The host.
    """
    addresses = {
        name: [str(entry.address) for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    job = context.job
    named = job.network_interface if job is not None else None
    if named is None:
        yield ok("interface", listed([f"{name} {' '.join(found)}".strip() for name, found in addresses.items()]))
    else:
        yield _job_interface(named, addresses)
    for variable, choose in (("NCCL_SOCKET_IFNAME", _chosen_by_nccl), ("GLOO_SOCKET_IFNAME", _chosen_by_gloo)):
        value = context.env.get(variable)
        if not value or choose(value, list(addresses)):
            continue
        if value == named:
            yield warning(
                "interface",
                f"{variable}={value} names no interface of this host.",
                "SageMakerEnvironment drops it, as the job's files name the same one; other code believes it.",
            )
        else:
            yield problem(
                "interface",
                f"{variable}={value} names no interface of this host.",
                f"Unset it, or name one of {listed(list(addresses))}.",
            )
    used = _chosen_by_nccl(context.env.get("NCCL_SOCKET_IFNAME") or named or "", list(addresses))
    if job is not None and used == ["lo"] and len(job.hosts) > 1 and not context.is_emulated:
        yield problem(
            "interface",
            "The loopback interface is chosen in a job of several hosts: each would talk to itself.",
            f"Choose another one in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: {listed(list(addresses))}.",
        )


def own_port(context: Context) -> Iterator[Result]:
    """Try the ports on which this host must listen, if it must.

    Args:
        context: The host.
    """
    job, topology = context.job, context.topology
    if job is None or topology is None:
        return
    if topology.role is Role.DATA:
        # The hosts of the emulator have an address each on one machine, and so all listen on the same port.
        address = job.addresses.get(job.current_host, "")
        yield from _try_port(context, data_port(job, topology), address, "data_service.port")
    elif topology.current_host == topology.main_host:
        yield from _try_port(context, topology.main_port, "", MAIN_PORT.name)
        if len(job.hosts) > 1:
            # Without it the job runs, and its hosts do not hear of each other's failures.
            port, use = topology.peers_port, " (between the launchers)"
            yield from _try_port(context, port, own_address(job), MAIN_PORT.name, use=use, taken=warning)


def _names(outcomes: Mapping[str, Outcome[list[str]]]) -> Iterator[Result]:
    lost = [f"{host} ({_lookup_error(outcome)})" for host, outcome in outcomes.items() if not outcome.value]
    if lost:
        yield problem(
            "names",
            f"{len(lost)} of {len(outcomes)} hosts do not resolve: {listed(lost)}",
            "Right after the start of a job this may take minutes. If it stays so: DNS of the VPC, /etc/resolv.conf; "
            f"off SageMaker, {HOST_ADDRESSES.name}.",
        )
    texts = [
        f"{host} {outcome.value[0]} ({1000 * (outcome.seconds or 0):.1f} ms)"
        for host, outcome in outcomes.items()
        if outcome.value
    ]
    slowest = max(outcome.seconds or 0 for outcome in outcomes.values())
    if slowest > _SLOW_LOOKUP_S and not lost:
        advice = "Something in /etc/resolv.conf does not answer: each connection by name waits as long."
        yield warning("names", f"A lookup took {slowest:.1f} s: {listed(texts)}", advice)
    elif texts:
        yield ok("names", listed(texts))


def _ways(context: Context, job: SageMakerJob, topology: Topology, addresses: Mapping[str, str]) -> Iterator[Result]:
    """Connect to other hosts; a refusal, too, proves the way there."""
    timeout_s = context.seconds(_CONNECT_S)
    ports = {
        host: topology.main_port if topology.role_of(host) is Role.TRAINER else data_port(job, topology)
        for host in addresses
    }
    targets = [(address, ports[host], timeout_s) for host, address in addresses.items()]
    outcomes = dict(zip(ports, in_parallel(_connect, targets, timeout_s + _GRACE_S), strict=True))
    reached = [f"{host}:{ports[host]} {outcome.value}" for host, outcome in outcomes.items() if outcome.value]
    if reached:
        yield ok("other hosts", listed(reached))
    dropped, failed = [], []
    for host, outcome in outcomes.items():
        if outcome.value is None and (outcome.error is None or isinstance(outcome.error, TimeoutError)):
            dropped.append(f"{host}:{ports[host]}")
        elif outcome.error is not None:
            failed.append(f"{host}:{ports[host]} ({outcome.error})")
    if dropped:
        yield problem("other hosts", f"No answer within {timeout_s:.1f} s: {listed(dropped)}", _SECURITY_GROUP)
    if failed:
        yield problem(
            "other hosts", f"Out of reach: {listed(failed)}", "Look at interface, and at the routes of the VPC."
        )


def _lookup(address: str) -> list[str]:
    """The addresses of a host, IPv4 first."""
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return [str(entry[4][0]).partition("%")[0] for entry in ordered]


def _lookup_error(outcome: Outcome[list[str]]) -> str:
    if outcome.error is None:
        return "no answer in time"
    return getattr(outcome.error, "strerror", None) or str(outcome.error)


def _job_interface(named: str, addresses: Mapping[str, Sequence[str]]) -> Result:
    if named not in addresses:
        return warning(
            "interface",
            f"The job names interface {named}, which this host does not have. It has {listed(list(addresses))}.",
            "NCCL and Gloo choose by themselves; if they choose wrong, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.",
        )
    stats = psutil.net_if_stats().get(named)
    if stats is not None and not stats.isup:
        return problem("interface", f"{named} is down.", "Bring it up, or name another one.")
    if not addresses[named]:
        return warning("interface", f"{named} has no IPv4 address.", "The data service listens on IPv4 only.")
    return ok("interface", f"{named} {' '.join(addresses[named])}")


def _chosen_by_nccl(value: str, existing: Sequence[str]) -> list[str]:
    """Which interfaces NCCL takes: prefixes; "=" before the list for whole names, "^" before it to exclude.

    Source:
        NCCL documentation, NCCL_SOCKET_IFNAME.
    """
    excludes = value.startswith("^")
    wanted = value.removeprefix("^")
    whole = wanted.startswith("=")
    names = [name for name in wanted.removeprefix("=").split(",") if name]
    matching = [name for name in existing if name in names or (not whole and name.startswith(tuple(names)))]
    return [name for name in existing if name not in matching] if excludes else matching


def _chosen_by_gloo(value: str, existing: Sequence[str]) -> list[str]:
    """Which interfaces Gloo takes: whole names, all of which must exist (PyTorch, ProcessGroupGloo)."""
    names = value.split(",")
    return names if set(names) <= set(existing) else []


def _try_port(
    context: Context,
    port: int,
    address: str,
    setting: str,
    *,
    use: str = "",
    taken: Callable[[str, str, str], Result] = problem,
) -> Iterator[Result]:
    first, last = _ephemeral_ports(context)
    if first <= port <= last:
        yield warning(
            "own port",
            f"Port {port}{use} is one that the system gives to outgoing connections ({first} to {last}).",
            f"Set {setting} to one below {first}, the same on every host.",
        )
    error = _bind_error(address, port)
    if error is None:
        yield ok("own port", f"{port}{use} is free")
        return
    owner, is_ours = _listener(port) if error.errno == errno.EADDRINUSE else ("", False)
    if is_ours:
        yield ok("own port", f"{port}{use}: the training listens ({owner})")
    else:
        reason = f"{os.strerror(error.errno or 0)}{f', by {owner}' if owner else ''}"
        yield taken(
            "own port",
            f"Port {port}{use} cannot be used here: {reason}.",
            f"Unless this is the running training: set {setting} to a free port, the same on every host.",
        )


def _ephemeral_ports(context: Context) -> tuple[int, int]:
    try:
        text = (context.proc / "sys" / "net" / "ipv4" / "ip_local_port_range").read_text(encoding="ascii")
        first, last = map(int, text.split())
    except (OSError, ValueError):
        return 32768, 60999  # Linux's default
    return first, last


def _bind_error(address: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error
    return None


def _listener(port: int) -> tuple[str, bool]:
    """Who listens on a port, as far as this user may know, and whether ``lightning-sm train`` started it."""
    try:
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if is_it and connection.pid:
                process = psutil.Process(connection.pid)
                family = [process, *process.parents()]
                is_ours = any(_is_train(relative.cmdline()) for relative in family)
                return f"process {process.pid}: {' '.join(process.cmdline())[:80]}", is_ours
    except psutil.Error:
        pass
    return "a process that cannot be told from here", False


def _is_train(command: Sequence[str]) -> bool:
    return "train" in command and any("lightning-sm" in word or "lightning_sm" in word for word in command)


def _connect(target: tuple[str, int, float]) -> str:
    """Say how a host answers.

    Raises:
        OSError: It does not: TimeoutError where packets are dropped.
    """
    address, port, timeout_s = target
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return "reachable (nothing listens yet)"
    return "listens"
