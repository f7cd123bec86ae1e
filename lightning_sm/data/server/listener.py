"""The port of a data host: the gRPC server, protected by the doorman."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Any

from lightning_sm.data.protocol import grpc_transport
from lightning_sm.data.server.doorman import Doorman
from lightning_sm.data.server.peers import TrustedPeers
from lightning_sm.data.settings import HostSettings

# For each opening, each worker needs descriptors for a connection and a ring.
_RESERVED_DESCRIPTORS = 1024


class Listener:
    """A gRPC server that accepts connections only from trusted machines.

    Args:
        handlers: RPC handlers by method name.
        settings: Address, credentials and trusted machines.

    Attributes:
        address: The address with the actual port.

    Raises:
        DataSettingsError: The server cannot listen on the address, or a TLS file is invalid.
    """

    def __init__(self, handlers: Mapping[str, Any], settings: HostSettings) -> None:
        # gRPC logs a line for every malformed connection, so untrusted clients could fill the log.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        is_mutual = settings.credentials.tls_authority is not None  # trainers are trusted by their certificates
        host, _, port = settings.address.rpartition(":")
        try:
            self._doorman = None if is_mutual else Doorman(host.strip("[]"), int(port), TrustedPeers(settings))
        except OSError as error:
            raise grpc_transport.cannot_listen(settings.address, error) from error
        self._server = grpc_transport.make_server(
            handlers, settings.credentials, settings.name, _max_connections(), shares_port=self._doorman is not None
        )
        where = settings.address if self._doorman is None else self._doorman.address
        bound = grpc_transport.bind(self._server, where, settings.credentials)
        self.address = f"{host}:{bound.rpartition(':')[2]}"
        self._server.start()

    def stop(self, timeout_s: float) -> None:
        """Stop listening, and give calls in progress at most ``timeout_s`` seconds to finish."""
        # Replace 0 with None: for any number, gRPC starts a thread, which may outlive this call.
        self._server.stop(timeout_s or None).wait()
        if self._doorman is not None:
            self._doorman.close()


def _max_connections() -> int:
    """Raise the limit on open descriptors, and return how many connections leave enough of them for the workers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard - min(hard // 2, _RESERVED_DESCRIPTORS)
