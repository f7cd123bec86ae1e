"""The TLS files that a user names, read and checked before gRPC gets them: it only says later that nothing connects."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataSettingsError

_OTHER_NAME = (
    "data_service.tls_certificate of the data host is not for the name or address by which this trainer reaches it. "
    "Add it as a SubjectAlternativeName"
)
# How gRPC and BoringSSL name what no further try can mend.
_FATAL = {
    "WRONG_VERSION_NUMBER": "this trainer uses TLS, the data host does not. Set data_service.tls_* alike on all hosts",
    "CERTIFICATE_VERIFY_FAILED": "the data host's certificate is not signed by data_service.tls_authority or, without "
    "one, is not data_service.tls_certificate",
    "Hostname Verification Check failed": _OTHER_NAME,
    "is not in peer certificate": _OTHER_NAME,
}
# What a host that refuses the handshake says, but also one that is just leaving.
_CLOSED = ("Socket closed", "Connection reset", "End of TCP stream")


@dataclass(frozen=True)
class TlsFiles:
    """What TLS needs, in PEM.

    Attributes:
        certificate: Shown by data hosts; with an authority by trainers, too.
        key: Its private key.
        authority: Who signed the certificate of the other end; None: trainers trust the certificate itself, and data
            hosts want none from trainers.
    """

    certificate: bytes
    key: bytes
    authority: bytes | None


def read_tls(credentials: Credentials) -> TlsFiles | None:
    """Read the TLS files.

    Args:
        credentials: Their paths.

    Returns:
        Their contents; None if TLS is off.

    Raises:
        DataSettingsError: A file cannot be read, is no PEM file of its kind, or key and certificate do not match; or
            there is an authority, but nothing that it could have signed.
    """
    certificate, key, authority = credentials.tls_certificate, credentials.tls_key, credentials.tls_authority
    if certificate is None or key is None:
        if (certificate, key, authority) != (None, None, None):
            raise DataSettingsError(
                f"TLS needs data_service.tls_certificate (which is {certificate}) and data_service.tls_key (which is "
                f"{key}); data_service.tls_authority={authority} is only needed for mutual TLS."
            )
        return None
    files = TlsFiles(
        _certificates(certificate, "tls_certificate"),
        _read(key, "tls_key"),
        None if authority is None else _certificates(authority, "tls_authority"),
    )
    try:
        # A password at hand keeps OpenSSL from asking the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise DataSettingsError(
            f"{key} (data_service.tls_key) is not the private key, in PEM and without a password, of {certificate} "
            f"(data_service.tls_certificate): {_reason(error)}."
        ) from error
    return files


def fatal_hint(details: str) -> str:
    """Return what is wrong if a first connection can never succeed; else nothing.

    Args:
        details: What gRPC says.
    """
    return next((f": {hint}." for text, hint in _FATAL.items() if text in details), "")


def closed_hint(details: str) -> str:
    """Return what may be wrong if a data host closes the first connection; else nothing.

    Args:
        details: What gRPC says.
    """
    if not any(text in details for text in _CLOSED):
        return ""
    return "; it may want TLS, or a certificate signed by its data_service.tls_authority"


def _certificates(path: str, setting: str) -> bytes:
    content = _read(path, setting)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise DataSettingsError(
            f"{path} (data_service.{setting}) holds no certificate in PEM: {_reason(error)}."
        ) from error
    return content


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataSettingsError(f"{path} (data_service.{setting}) cannot be read: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
