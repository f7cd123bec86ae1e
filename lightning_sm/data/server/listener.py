"""The port of a data host's process: gRPC, with the doorman in front of it."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping
from typing import Any

from lightning_sm.data.protocol import grpc_transport
from lightning_sm.data.server.doorman import Doorman, FilterError
from lightning_sm.data.server.peers import TrustedPeers
from lightning_sm.data.settings import HostSettings

logger = logging.getLogger(__name__)

# Each worker has a connection and a ring, for each of the openings.
_RESERVED_DESCRIPTORS = 1024


class Listener:
    """A gRPC server that accepts connections only from trusted machines.

    Args:
        handlers: By name of the method.
        settings: Address, credentials, trusted machines.
        peers: The trusted machines.

    Attributes:
        address: The address with the port that was taken.

    Raises:
        DataSettingsError: The address cannot be listened on, or a TLS file is invalid.
    """

    def __init__(self, handlers: Mapping[str, Any], settings: HostSettings, peers: TrustedPeers) -> None:
        # Strangers would fill the log: gRPC has a line for each connection that makes no sense.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self._doorman = None if peers.trainers_show_certificates else _doorman(settings.address, peers)
        max_connections = _max_connections(_raise_descriptor_limit())
        self._server = grpc_transport.make_server(
            handlers, settings.credentials, settings.name, max_connections, shares_port=self._doorman is not None
        )
        where = settings.address if self._doorman is None else self._doorman.address
        bound = grpc_transport.bind(self._server, where, settings.credentials)
        host = settings.address.rpartition(":")[0]
        self.address = f"{host}:{bound.rpartition(':')[2]}"

    def start(self) -> None:
        """Accept connections."""
        self._server.start()

    def stop(self, timeout_s: float) -> None:
        """Finish calls for at most this long, in seconds, and stop listening."""
        # None, not 0: for any time gRPC starts a thread, which may outlast this call.
        self._server.stop(timeout_s or None).wait()
        if self._doorman is not None:
            self._doorman.close()


def _doorman(address: str, peers: TrustedPeers) -> Doorman | None:
    """Return the doorman of an address; None where the kernel has no filters for it.

    Raises:
        DataSettingsError: The address cannot be listened on.
    """
    host, _, port = address.rpartition(":")
    try:
        return Doorman(host.strip("[]"), int(port), peers)
    except FilterError as error:
        logger.warning(
            "This data host accepts connections from all addresses: the kernel has no filter for them (%s). Only the "
            "job's token protects it from strangers; mutual TLS (data_service.tls_authority) would, too.",
            error,
        )
        return None
    except OSError as error:
        raise grpc_transport.cannot_listen(address, error) from error


def _raise_descriptor_limit() -> int:
    """Raise the limit of open descriptors to the highest that this process may set, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _max_connections(num_descriptors: int) -> int:
    """Return how many connections may be open: workers need descriptors as well."""
    return num_descriptors - min(num_descriptors // 2, _RESERVED_DESCRIPTORS)
