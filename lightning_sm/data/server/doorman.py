"""The doorman, which receives untrusted connections to a data host's port, so that gRPC never sees them.

gRPC for Python cannot refuse a connection, so any client could make gRPC use ever more memory and threads. Therefore,
two sockets listen on the port (``SO_REUSEPORT``): the doorman's and gRPC's. For each new connection, a kernel filter
reads the source address, and passes the connection to gRPC only if the data host trusts the address. Batches never pass
through the doorman. It tells untrusted clients that they are refused, logs their addresses, and disconnects them.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import socket
import struct
import threading
from collections.abc import Sequence

from lightning_sm.data.protocol.probe import REFUSED
from lightning_sm.data.server.peers import Network, TrustedPeers

logger = logging.getLogger(__name__)

# asm-generic/socket.h
_SO_ATTACH_REUSEPORT_CBPF = 51
# linux/filter.h: classic BPF instructions, and the offset that refers to the start of the IP header.
_INSTRUCTION = struct.Struct("HBBI")
_LOAD_BYTE, _LOAD_WORD, _RIGHT_SHIFT, _AND, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x54, 0x05, 0x15, 0x06
_IP_HEADER = 0xFFF00000
_SOURCE = {4: 12, 6: 8}  # offset of the source address, by IP version
_WORD = 0xFFFFFFFF

# The filter returns the index of a socket. Indices follow the order in which the port's sockets began to listen.
_DOORMAN, _GRPC = 0, 1

# Keep the queue short, so that the kernel drops most of a flood of connections.
_BACKLOG = 16
_PACE_S = 0.01
_MAX_LOGGED = 20
# While some names do not resolve, look them up this often, even if nobody connects.
_LOOKUP_PERIOD_S = 5.0


class Doorman:
    """An additional listener on gRPC's port. gRPC must start listening there afterwards, with ``SO_REUSEPORT``.

    Args:
        host: Numeric address or name to listen on.
        port: Port; 0 for any free port.
        peers: The trusted machines.

    Attributes:
        address: The ``host:port`` on which gRPC must also listen; the host is numeric.

    Raises:
        OSError: The doorman cannot listen on the address.
    """

    def __init__(self, host: str, port: int, peers: TrustedPeers) -> None:
        self._peers = peers
        self._logged: set[str] = set()
        self._networks: list[Network] = []
        self._closed = threading.Event()
        self._socket = _like_grpc(host, port)
        self.address = _numeric(self._socket)
        self._admit(peers.networks)
        if not self._closed.is_set():
            self._socket.listen(_BACKLOG)
        self._thread = threading.Thread(target=self._receive_strangers, name="doorman", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Stop gRPC first: otherwise, it would receive connections from untrusted clients."""
        self._stop_listening()
        self._thread.join()
        self._socket.close()

    def _stop_listening(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):  # it may not listen
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive_strangers(self) -> None:
        self._peers.refresh()
        while not self._closed.is_set():
            self._admit(self._peers.networks)
            self._socket.settimeout(_LOOKUP_PERIOD_S if self._peers.unresolved else None)
            try:
                connection, address = self._socket.accept()
            except TimeoutError:
                self._peers.refresh()
                continue
            except OSError as error:
                # No descriptors are left, or the client is gone. The socket may stay readable: pausing avoids spinning.
                logger.debug("The doorman cannot accept a connection: %s", error)
            else:
                with connection:
                    self._turn_away(connection, str(address[0]))
            self._closed.wait(_PACE_S)

    def _turn_away(self, connection: socket.socket, caller: str) -> None:
        """Refuse a caller unless a new lookup finds its address, in which case its next connection goes to gRPC."""
        address = caller.removeprefix("::ffff:")
        if self._peers.admits(address):
            return
        # A refusal is final, so send none while names are unresolved: the trainer then retries.
        if not self._peers.unresolved:
            with contextlib.suppress(OSError):
                connection.settimeout(0)
                connection.send(REFUSED)
        if address not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(address)
            logger.warning("Refused a connection: %s", self._peers.refusal(address))

    def _admit(self, networks: Sequence[Network]) -> None:
        """Have the kernel pass connections from these networks to gRPC, and all others to the doorman.

        Some kernels have no such filter, and all limit its size (4096 instructions). The doorman then stops listening,
        so that gRPC gets all connections.
        """
        if list(networks) == self._networks:
            return
        try:
            _attach(self._socket, program(networks))
        except OSError as error:
            logger.warning(
                "This data host accepts connections from all addresses: the kernel rejected the filter for the %d "
                "addresses that it trusts (%s). Only the job's token keeps others out. For mutual TLS, set "
                "data_service.tls_authority.",
                len(networks),
                error.strerror,
            )
            self._stop_listening()
        self._networks = list(networks)


def program(networks: Sequence[Network]) -> list[tuple[int, int, int, int]]:
    """Return the filter that chooses the socket for a connection, as classic BPF instructions.

    Args:
        networks: The trusted source addresses.
    """
    by_version = {}
    for version in (4, 6):
        tests = [instruction for net in networks if net.version == version for instruction in _test(net)]
        by_version[version] = [*tests, (_RETURN, 0, 0, _DOORMAN)]
    return [
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_RIGHT_SHIFT, 0, 0, 4),
        (_JUMP_IF_EQUAL, 0, 1, 6),
        (_JUMP, 0, 0, len(by_version[4])),  # a conditional jump reaches at most 255 instructions
        *by_version[4],
        *by_version[6],
    ]


def _test(network: Network) -> list[tuple[int, int, int, int]]:
    """Return the instructions that choose gRPC's socket if the source address is in ``network``."""
    num_words = network.max_prefixlen // 32
    code: list[tuple[int, int, int, int]] = [(_RETURN, 0, 0, _GRPC)]
    for word in reversed(range(num_words)):
        shift = 32 * (num_words - 1 - word)
        value, mask = (int(each) >> shift & _WORD for each in (network.network_address, network.netmask))
        if mask:
            load = (_LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE[network.version] + 4 * word)
            compare = [(_AND, 0, 0, mask)] if mask != _WORD else []
            code = [load, *compare, (_JUMP_IF_EQUAL, 0, len(code), value), *code]
    return code


def _attach(sock: socket.socket, code: Sequence[tuple[int, int, int, int]]) -> None:
    """Replace a port's filter."""
    memory = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*each) for each in code))
    pointer = struct.pack("HL", min(len(code), 0xFFFF), ctypes.addressof(memory))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, pointer)


def _like_grpc(host: str, port: int) -> socket.socket:
    """Return a bound socket of the kind that gRPC makes: a dual-stack socket if the system has IPv6.

    Only sockets of the same kind can share a port. ``SO_REUSEPORT`` is set only after binding, so that binding to a
    port in use fails.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    name = str(address[0])
    if family == socket.AF_INET and _has_ipv6():
        is_any = ipaddress.ip_address(name).is_unspecified
        family, address = socket.AF_INET6, ("::" if is_any else f"::ffff:{name}", port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _numeric(sock: socket.socket) -> str:
    """Return the address of a socket in gRPC's notation."""
    host, port, *_ = sock.getsockname()
    host = host.removeprefix("::ffff:")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _has_ipv6() -> bool:
    """Return whether gRPC uses IPv6, which it does if the IPv6 loopback address can be bound."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
