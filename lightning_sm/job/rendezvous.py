"""The conditions for the ranks of a job to connect: the main host's name resolves, and the main port is free."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import psutil

from lightning_sm._text import listed
from lightning_sm.errors import HostResolutionError, PortInUseError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import MAIN_PORT

logger = logging.getLogger(__name__)

# How long sagemaker-training waits for the hosts of a job to resolve (entry_point.py): a large cluster's last host
# may start minutes after the first.
RESOLVE_TIMEOUT_S = 15 * 60.0
_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
# A resolver that does not answer takes 10 s or more for each name (resolv.conf(5): 2 attempts of 5 s). After this time,
# the log lists the names that have not resolved yet, while their lookups continue.
_ANSWER_S = 5.0
# The wait even past the deadline, for answers that need no network.
_LEAST_ANSWER_S = 0.1


def resolves(address: str) -> bool:
    """Return whether a host name or IP address resolves."""
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror:
        return False
    return True


def wait_for_host(
    host: str,
    topology: Topology,
    addresses: Mapping[str, str],
    timeout_s: float = RESOLVE_TIMEOUT_S,
    *,
    is_reporter: bool = True,
    is_known: Callable[[str], bool] = resolves,
    pause: Callable[[float], object] = time.sleep,
    answer_s: float = _ANSWER_S,
) -> None:
    """Wait until the name of a host resolves.

    Args:
        host: The host to wait for.
        topology: All hosts.
        addresses: IP addresses of hosts that no resolver knows.
        timeout_s: Seconds to wait, even for a resolver that does not answer.
        is_reporter: Whether this process speaks for its host: while the name of ``host`` does not resolve, it looks up
            those of all trainer hosts, and logs a line for each attempt. One process per host is enough.
        is_known: Returns whether an address resolves; called in threads.
        pause: Waits for a number of seconds, because nothing announces that a name now resolves.
        answer_s: After this many seconds, a name without an answer counts as missing, while its lookup continues.

    Raises:
        HostResolutionError: The name did not resolve in time.
    """
    deadline = time.monotonic() + timeout_s
    delay_s = _FIRST_DELAY_S
    lookups = _Lookups(addresses, is_known, answer_s)
    while lookups.missing([host], deadline):
        missing = lookups.missing(topology.trainer_hosts, deadline) if is_reporter else [host]
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            table = f"\n{topology.table(is_short=True)}" if is_reporter else ""
            raise HostResolutionError(
                f"The name of the main host {host!r} did not resolve within {timeout_s:.0f} s. Unresolved hosts: "
                f"{listed(missing or [host])}.{table}\n"
                "If hosts may start later than that, raise SageMakerEnvironment(resolve_timeout_s=...)."
            )
        if is_reporter:
            logger.info(
                "Waiting for the names of hosts %s to resolve (main host: %s; timeout in %.0f s).",
                listed(missing or [host]),
                host,
                remaining_s,
            )
        pause(min(delay_s, remaining_s))
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


class _Lookups:
    """Concurrent lookups of names, each in a thread of its own, because ``getaddrinfo`` cannot be interrupted.

    Daemon threads do not keep the process alive. A lookup without an answer continues, and is not started again.
    """

    def __init__(self, addresses: Mapping[str, str], is_known: Callable[[str], bool], answer_s: float) -> None:
        self._addresses = addresses
        self._is_known = is_known
        self._answer_s = answer_s
        self._running: dict[str, threading.Thread] = {}
        self._answers: dict[str, bool | Exception] = {}

    def missing(self, hosts: Iterable[str], deadline: float) -> list[str]:
        """Look up hosts that have not resolved before; return those that do not resolve, or not in time."""
        names = list(hosts)
        for name in names:
            if name not in self._running and self._answers.get(name) is not True:
                self._answers.pop(name, None)
                self._running[name] = threading.Thread(target=self._look_up, args=(name,), daemon=True)
                self._running[name].start()
        now = time.monotonic()
        ends_at = now + min(max(deadline - now, _LEAST_ANSWER_S), self._answer_s)
        for name in names:
            thread = self._running.get(name)
            if thread is not None:
                thread.join(max(0.0, ends_at - time.monotonic()))
                if not thread.is_alive():
                    del self._running[name]
            answer = self._answers.get(name)
            if isinstance(answer, Exception):
                raise answer
        return [name for name in names if self._answers.get(name) is not True]

    def _look_up(self, name: str) -> None:
        try:
            self._answers[name] = self._is_known(self._addresses.get(name, name))
        except Exception as error:  # noqa: BLE001 - raised again by ``missing``
            self._answers[name] = error


def check_port_is_free(port: int, host: str, listener: str = "rank 0") -> None:
    """Raise at once if a port is taken: torch would leave the other hosts waiting for half an hour.

    Args:
        port: Port on which this process is about to listen.
        host: Name of this host, for the error message.
        listener: What listens on the port, for the error message.

    Raises:
        PortInUseError: Another process listens on the port, or this process lacks permission to.
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
    """Return the address of the job's interface, so that servers for the other hosts listen only there."""
    if job.current_host in job.addresses:
        return job.addresses[job.current_host]
    for address in psutil.net_if_addrs().get(job.network_interface or "", []):
        if address.family == socket.AF_INET:
            return str(address.address)
    try:
        return socket.gethostbyname(job.current_host)
    except OSError:
        logger.warning(
            "The address of host %s is unknown: %s, and its own name does not resolve. Listening on all interfaces.",
            job.current_host,
            f"it has no interface {job.network_interface}" if job.network_interface else "the job names no interface",
        )
        return "0.0.0.0"  # noqa: S104 - the warning says so
