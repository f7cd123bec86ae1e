"""The ports of emulated jobs, which all share those of this machine."""

from __future__ import annotations

import contextlib
import socket

from lightning_sm.errors import PortInUseError
from lightning_sm.job.rendezvous import check_port_is_free
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import MAIN_PORT


def reserve_ports(topology: Topology) -> contextlib.ExitStack:
    """Keep the ports that follow from a job's main port from other emulated jobs, also before its hosts listen on them.

    Abstract Unix sockets stand for them: they belong to a network namespace, as ports do, and end with their process.

    Args:
        topology: The layout of the job.

    Returns:
        What keeps them. Closing it lets others have them.

    Raises:
        PortInUseError: A process listens on one of the ports, or another emulated job has reserved it.
    """
    with contextlib.ExitStack() as claims:
        for port, (listener, host) in _listeners(topology).items():
            check_port_is_free(port, host, listener)
            _claim(port, claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
        return claims.pop_all()


def _listeners(topology: Topology) -> dict[int, tuple[str, str]]:
    """Who listens where, by port; those of a data host and of the main host's launcher may be the same."""
    listeners = {topology.main_port: ("rank 0", topology.main_host)}
    if len(topology.trainer_hosts) + len(topology.data_hosts) > 1:
        listeners[topology.peers_port] = ("the launcher", topology.main_host)
    if topology.data_hosts:
        listeners[topology.data_port] = ("the data service", topology.data_hosts[0])
    return listeners


def _claim(port: int, claim: socket.socket) -> None:
    try:
        claim.bind(f"\0lightning-sm local, port {port}")
    except OSError as error:
        raise PortInUseError(
            f"Port {port} belongs to another job that lightning-sm local runs on this machine now. Wait for its end. "
            f"Without {MAIN_PORT.name} (--env {MAIN_PORT.name}=...) each job gets ports of its own."
        ) from error
