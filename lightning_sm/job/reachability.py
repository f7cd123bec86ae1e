"""The preconditions for a job's ranks to connect: the main host's name resolves, and the main port is free."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

import psutil

from lightning_sm.errors import HostResolutionError, PortInUseError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.variables import HOST_ADDRESSES, MAIN_PORT

logger = logging.getLogger(__name__)

# sagemaker-training waits this long for a job's host names (entry_point.py): the last host of a large cluster may start
# minutes after the first.
RESOLVE_TIMEOUT_S = 15 * 60.0
_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0


def resolves(address: str) -> bool:
    """Return whether a host name or IP address resolves."""
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror:
        return False
    return True


def wait_for_host(
    host: str,
    addresses: Mapping[str, str],
    timeout_s: float = RESOLVE_TIMEOUT_S,
    *,
    is_reporter: bool = True,
    is_known: Callable[[str], bool] = resolves,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until the name of a host resolves.

    Args:
        host: The host to wait for.
        addresses: IP addresses of hosts whose names do not resolve.
        timeout_s: Maximum wait in seconds.
        is_reporter: Whether this process logs a line for each attempt. One process per host is enough.
        is_known: Returns whether an address resolves.
        pause: Sleeps for the given number of seconds; polling is necessary, because nothing announces a new name.

    Raises:
        HostResolutionError: The name did not resolve in time.
    """
    deadline = time.monotonic() + timeout_s
    delay_s = _FIRST_DELAY_S
    while not is_known(addresses.get(host, host)):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise HostResolutionError(
                f"The name of the main host {host!r} did not resolve within {timeout_s:.0f} s. See in its log whether "
                "it has started. If it has, check the VPC's DNS and /etc/resolv.conf; off SageMaker, set "
                f"{HOST_ADDRESSES.name}."
            )
        if is_reporter:
            logger.info("Waiting for the name of the main host %s to resolve (timeout in %.0f s).", host, remaining_s)
        pause(min(delay_s, remaining_s))
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


def check_port_is_free(port: int, host: str, listener: str = "rank 0") -> None:
    """Raise at once if a port is taken; otherwise, torch would leave the other hosts waiting for half an hour.

    Args:
        port: Port on which this process is about to listen.
        host: Name of this host, for the error message.
        listener: Name of the listener, for the error message.

    Raises:
        PortInUseError: Another process listens on the port, or this process is not allowed to listen on it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise PortInUseError(
                f"Port {port}, on which {listener} must listen on host {host!r}, cannot be used "
                f"({os.strerror(error.errno)}). Set {MAIN_PORT.name} to a free port, the same on every host."
            ) from error


def own_address(job: SageMakerJob) -> str:
    """Return the address of the job's network interface, on which servers for the other hosts listen."""
    if job.current_host in job.addresses:
        return job.addresses[job.current_host]
    for address in psutil.net_if_addrs().get(job.network_interface or "", []):
        if address.family == socket.AF_INET:
            return str(address.address)
    try:
        return socket.gethostbyname(job.current_host)
    except OSError:
        logger.warning(
            "The address of host %s is unknown: %s, and its name does not resolve. Listening on all interfaces.",
            job.current_host,
            f"it has no interface {job.network_interface}" if job.network_interface else "the job names no interface",
        )
        return "0.0.0.0"  # noqa: S104 - with the warning above
