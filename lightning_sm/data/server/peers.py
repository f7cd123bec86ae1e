"""The addresses that a data host trusts: those of its machine and the job's hosts, and those in the user's settings."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import psutil

from lightning_sm._text import listed
from lightning_sm.data.settings import HostSettings

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

# However many clients connect, lookups are at least this many seconds apart and take at most this share of the time.
_LEAST_PERIOD_S = 1.0
_SHARE_OF_TIME = 0.05
# Look up names concurrently: an unknown name may take the resolver 10 s.
_NUM_LOOKUPS = 16


class TrustedPeers:
    """The machines that may connect to a data host.

    Names are looked up again when an unknown address connects, because a job's hosts start at different times, and a
    replacement host has a new address.

    Args:
        settings: Names, addresses and networks that the data host trusts, and the host's name.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._name = f"data host {settings.name}" if settings.name else "the data host"
        self._trusted = list(dict.fromkeys(settings.trusted))
        self._lock = threading.Lock()
        self._found: dict[str, list[Network]] = {}
        self._own = [_network(address) for address in _own_addresses()]
        self._next_refresh = 0.0

    @property
    def networks(self) -> list[Network]:
        """All trusted addresses known so far."""
        return [*self._own, *(network for found in self._found.values() for network in found)]

    @property
    def unresolved(self) -> list[str]:
        """Names that have not resolved so far."""
        return [entry for entry in self._trusted if entry not in self._found]

    def refresh(self) -> None:
        """Look up all names, unless that was done recently. A name that fails to resolve keeps its old addresses."""
        with self._lock:
            began = time.monotonic()
            if began < self._next_refresh:
                return
            self._own = [_network(address) for address in _own_addresses()]
            with ThreadPoolExecutor(_NUM_LOOKUPS) as pool:
                for entry, found in zip(self._trusted, pool.map(self._networks_of, self._trusted), strict=True):
                    if found:
                        self._found = {**self._found, entry: found}
            ended = time.monotonic()
            self._next_refresh = ended + max(_LEAST_PERIOD_S, (ended - began) / _SHARE_OF_TIME)

    def admits(self, address: str) -> bool:
        """Return whether an IP address is trusted, after looking up the names again if it is unknown."""
        if self._is_known(address):
            return True
        self.refresh()
        return self._is_known(address)

    def refusal(self, address: str) -> str:
        """Return why an address is refused, and what to do about it."""
        known = listed(["its own machine", *self._trusted])
        late = f" These names do not resolve yet: {listed(self.unresolved)}." if self.unresolved else ""
        return (
            f"{self._name} does not trust {address}. It trusts {known}.{late} If {address} is a trainer, add "
            "it to data_service.trust of the data hosts, or use mutual TLS (data_service.tls_authority)."
        )

    def _is_known(self, address: str) -> bool:
        wanted = _address(address)
        return any(wanted in network for network in self.networks)

    def _networks_of(self, entry: str) -> list[Network]:
        try:
            return [ipaddress.ip_network(entry)]
        except ValueError:
            pass  # a name, not an address
        try:
            return [_network(address) for address in _look_up(entry)]
        except OSError:
            return []


def _address(text: str) -> Address:
    """Parse an address. The IPv4-mapped IPv6 addresses that dual-stack sockets report for IPv4 clients become IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _network(address: str) -> Network:
    return ipaddress.ip_network(_address(address))


def _look_up(name: str) -> list[str]:
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


def _own_addresses() -> list[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    return [one.address for addresses in interfaces for one in addresses if one.family in families]
