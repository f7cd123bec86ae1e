"""The TLS files that a user names, read and checked before gRPC gets them: it only says later that nothing connects."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataSettingsError


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
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # noqa: S106  # none
    except OSError as error:
        raise DataSettingsError(
            f"{key} (data_service.tls_key) is not the private key, in PEM and without a password, of {certificate} "
            f"(data_service.tls_certificate): {_reason(error)}."
        ) from error
    return files


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
