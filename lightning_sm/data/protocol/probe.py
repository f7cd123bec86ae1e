"""The probe of a trainer whose first connection fails: does the data host refuse its address?"""

from __future__ import annotations

import socket

# What a data host sends to an address that it does not trust, before it closes the connection.
REFUSED = b"lightning_sm: this address is not trusted\n"

_TIMEOUT_S = 2.0


def refusal(address: str) -> str:
    """Return why a data host refuses this trainer, and what to do; "" if it does not say that.

    Args:
        address: ``host:port``, or that of a Unix socket, which refuses nobody.
    """
    if address.startswith("unix"):
        return ""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S) as sock:
            if sock.recv(len(REFUSED)) != REFUSED:
                return ""
            own = sock.getsockname()[0]
    except OSError:
        return ""
    return (
        f"it does not trust the address of this trainer, {own}, which is not one of the job's hosts. If it is right, "
        f"add {own} to data_service.trust of the data hosts, or use mutual TLS. The log of the data host names the "
        "address and the hosts that it trusts"
    )
