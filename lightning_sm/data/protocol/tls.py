"""Read and check the user's TLS files: gRPC would report an error only later, when nothing connects."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataSettingsError

_OTHER_NAME = (
    "data_service.tls_certificate of the data host is not valid for the name or address that this trainer connects to. "
    "Add it as a SubjectAlternativeName"
)
# Errors of gRPC and BoringSSL that no retry can fix.
_FATAL = {
    "CERTIFICATE_VERIFY_FAILED": "the data host's certificate is not signed by data_service.tls_authority or, without "
    "one, is not data_service.tls_certificate",
    "Hostname Verification Check failed": _OTHER_NAME,
    "is not in peer certificate": _OTHER_NAME,
}


@dataclass(frozen=True)
class TlsFiles:
    """Contents of the TLS files, in PEM.

    Attributes:
        certificate: Presented by data hosts and, with an authority, by trainers.
        key: Private key of the certificate.
        authority: Certificate that signed the other end's certificate; None: trainers trust ``certificate`` itself,
            and data hosts require no certificate from trainers.
    """

    certificate: bytes
    key: bytes
    authority: bytes | None


def read_tls(credentials: Credentials) -> TlsFiles | None:
    """Read the TLS files; None if TLS is off.

    Raises:
        DataSettingsError: A file cannot be read or is not a PEM file of its kind, key and certificate do not match, or
            one of them is not set although another file is.
    """
    certificate = credentials.tls_certificate
    key = credentials.tls_key
    authority = credentials.tls_authority
    if certificate is None or key is None:
        if (certificate, key, authority) != (None, None, None):
            raise DataSettingsError(
                f"TLS needs both data_service.tls_certificate (now {certificate}) and data_service.tls_key (now {key})."
                f" data_service.tls_authority (now {authority}) is only for mutual TLS."
            )
        return None
    files = TlsFiles(
        _certificates(certificate, "tls_certificate"),
        _read(key, "tls_key"),
        None if authority is None else _certificates(authority, "tls_authority"),
    )
    try:
        # With an empty password, OpenSSL does not ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise DataSettingsError(
            f"{key} (data_service.tls_key) is not the private key, in PEM and without a password, of {certificate} "
            f"(data_service.tls_certificate): {_reason(error)}."
        ) from error
    return files


def fatal_hint(details: str) -> str:
    """Return why a first connection with this gRPC error can never succeed; "" if a retry may."""
    return next((f": {hint}." for text, hint in _FATAL.items() if text in details), "")


def settings_text(credentials: Credentials) -> str:
    """Return which TLS files are set, for messages."""
    if credentials.tls_certificate is None:
        return "no data_service.tls_certificate"
    authority = credentials.tls_authority
    rest = "no data_service.tls_authority" if authority is None else f"data_service.tls_authority={authority}"
    return f"data_service.tls_certificate={credentials.tls_certificate} and {rest}"


def _certificates(path: str, setting: str) -> bytes:
    content = _read(path, setting)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise DataSettingsError(
            f"{path} (data_service.{setting}) does not contain a PEM certificate: {_reason(error)}."
        ) from error
    return content


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataSettingsError(f"{path} (data_service.{setting}) cannot be read: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
