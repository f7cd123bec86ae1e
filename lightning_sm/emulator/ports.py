"""The reservation of ports for emulated jobs, which all share this machine's ports."""

from __future__ import annotations

import contextlib
import socket

from lightning_sm.errors import PortInUseError
from lightning_sm.job.reachability import check_port_is_free
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import MAIN_PORT


def reserve_ports(topology: Topology) -> contextlib.ExitStack:
    """Reserve a job's ports before its hosts listen on them, so that no other emulated job takes them.

    For each TCP port, this binds the UDP port with the same number, which nothing else in the job uses. Like TCP
    ports, UDP ports belong to the machine or its network namespace, and become free when the process exits.

    Returns:
        The reservation; close it to release the ports.

    Raises:
        PortInUseError: A process listens on one of the ports, or another emulated job has reserved it.
    """
    with contextlib.ExitStack() as claims:
        for port, (listener, host) in _listeners(topology).items():
            check_port_is_free(port, host, listener)
            _claim(port, claims.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        return claims.pop_all()


def _listeners(topology: Topology) -> dict[int, tuple[str, str]]:
    """Return the name and host of the listener on each port. A data host and a launcher may share a port number."""
    listeners = {topology.main_port: ("rank 0", topology.main_host)}
    if len(topology.trainer_hosts) + len(topology.data_hosts) > 1:
        listeners[topology.peers_port] = ("the launcher", topology.main_host)
    if topology.data_hosts:
        listeners[topology.data_port] = ("the data service", topology.data_hosts[0])
    return listeners


def _claim(port: int, claim: socket.socket) -> None:
    try:
        claim.bind(("127.0.0.1", port))
    except OSError as error:
        raise PortInUseError(
            f"Port {port} belongs to another job that lightning-sm local is running on this machine. Wait until that "
            f"job ends, or remove {MAIN_PORT.name} (--env {MAIN_PORT.name}=...) to give each job its own ports."
        ) from error
