"""A probe that determines, after a trainer failed to connect, whether the host uses TLS or refuses the trainer.

A host that requires TLS and a host that is shutting down both just close the connection. The probe connects once more,
and reports only what it observes.
"""

from __future__ import annotations

import socket
import ssl

from lightning_sm.data.protocol.tls import settings_text
from lightning_sm.data.settings import Credentials

# Sent by a data host to an address that it does not trust, before it closes the connection.
REFUSED = b"lightning_sm: this address is not trusted\n"

_TIMEOUT_S = 2.0
# A host without TLS sends first. A host that sends nothing for this long may be waiting for a TLS handshake.
_SILENCE_S = 1.0


def diagnose(address: str, credentials: Credentials) -> str:
    """Return why this trainer cannot connect to a data host, and what to do; "" if the reason is unknown.

    A host that is shutting down may seem to refuse the trainer's certificate, so call this twice, seconds apart.

    Args:
        address: ``host:port``.
        credentials: TLS files of this trainer, if any.
    """
    try:
        first, own_address = _first_bytes(address)
        if first:
            return _diagnose_plain(first, own_address, credentials)
        # Trainers present a certificate only if they have an authority.
        shown = credentials.tls_certificate if credentials.tls_authority is not None else None
        answer = _first_bytes_in_tls(address, shown, credentials.tls_key)
    except OSError:
        return ""
    ours = f"this trainer has {settings_text(credentials)}"
    if credentials.tls_certificate is None:
        return f"the data host uses TLS, but {ours}. Set data_service.tls_* on all hosts"
    if answer:
        return ""
    return (
        "the data host closes the connection after the TLS handshake. It requires a certificate signed by "
        f"its data_service.tls_authority, but {ours}. Set the same data_service.tls_authority on all hosts, and give "
        "each host a certificate signed by it"
    )


def _diagnose_plain(first: bytes, own_address: str, credentials: Credentials) -> str:
    """Diagnose a data host that sends first: it has no TLS, or it refuses this machine."""
    if first.startswith(REFUSED):
        return (
            f"it does not trust the address of this trainer, {own_address}, which is not one of the job's hosts. If "
            f"the address is correct, add {own_address} to data_service.trust of the data hosts, or use mutual TLS. "
            "The log of the data host names the address and the hosts that it trusts"
        )
    # HTTP/2 begins with a SETTINGS frame: 3 bytes of length, type 4, flags, stream 0.
    if credentials.tls_certificate is not None and first[3:4] == b"\4" and first[5:9] == bytes(4):
        ours = settings_text(credentials)
        return f"the data host does not use TLS, but this trainer has {ours}. Set data_service.tls_* on all hosts"
    return ""


def _first_bytes(address: str) -> tuple[bytes, str]:
    """Return the host's first bytes and this machine's address; both are empty if the host waits, perhaps for TLS.

    Raises:
        OSError: The host cannot be reached, or closes the connection without sending anything.
    """
    with _connect(address) as sock:
        sock.settimeout(_SILENCE_S)
        try:
            first = sock.recv(len(REFUSED))
        except TimeoutError:
            return b"", ""
        if not first:
            raise ConnectionResetError
        return first, str(sock.getsockname()[0])


def _first_bytes_in_tls(address: str, certificate: str | None, key: str | None) -> bytes:
    """Return the host's first bytes after the TLS handshake; empty if it closes the connection.

    Raises:
        OSError: The host cannot be reached, or does not use TLS.
    """
    # Do not verify the host's certificate: the real connection does, and reports a wrong one.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(certificate, key, password="")
    with _connect(address) as sock, context.wrap_socket(sock) as secured:
        try:
            return secured.recv(1)
        except ssl.SSLError:  # an alert about the trainer's certificate
            return b""


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S)
