"""The user's TLS files, which are checked before anything connects, and a trainer's TLS settings."""

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
_NOT_SIGNED = (
    "the data host's certificate is not signed by data_service.tls_authority or, without one, is not "
    "data_service.tls_certificate"
)
# openssl/x509_vfy.h: X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_OTHER_NAME_CODES = (62, 64)


@dataclass(frozen=True)
class TlsFiles:
    """Contents of the TLS files, in PEM.

    Attributes:
        certificate: Certificate that data hosts present; with an authority, trainers present it, too.
        key: Private key of the certificate.
        authority: Certificate that signed the other side's certificate. If None, trainers trust ``certificate`` itself,
            and data hosts require no certificate from trainers.
    """

    certificate: bytes
    key: bytes
    authority: bytes | None


def read_tls(credentials: Credentials) -> TlsFiles | None:
    """Read the TLS files; return None if TLS is off.

    Raises:
        DataSettingsError: A file cannot be read or is not a PEM file of its kind, or the key and the
            certificate do not match.
    """
    certificate = credentials.tls_certificate
    key = credentials.tls_key
    authority = credentials.tls_authority
    if certificate is None or key is None:
        return None
    files = TlsFiles(
        _certificates(certificate, "tls_certificate"),
        _read(key, "tls_key"),
        None if authority is None else _certificates(authority, "tls_authority"),
    )
    try:
        # Pass an empty password, or OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise DataSettingsError(
            f"{key} (data_service.tls_key) is not an unencrypted PEM file with the private key of {certificate} "
            f"(data_service.tls_certificate): {error}."
        ) from error
    return files


def client_context(credentials: Credentials) -> ssl.SSLContext | None:
    """Return a trainer's TLS settings, or None if TLS is off.

    Raises:
        DataSettingsError: For the same reasons as in ``read_tls``.
    """
    files = read_tls(credentials)
    if files is None or credentials.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # RFC 9113, section 9.2
    context.set_alpn_protocols(["h2"])  # section 3.2
    # Accept a trusted certificate that is not a certificate authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=(files.authority or files.certificate).decode("ascii"))
    if files.authority is not None:
        context.load_cert_chain(credentials.tls_certificate, credentials.tls_key, password="")
    return context


def certificate_hint(error: BaseException | None) -> str:
    """Return why a connection that failed with this error can never succeed, or "" if a retry may succeed."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return ""
    return f": {_OTHER_NAME if error.verify_code in _OTHER_NAME_CODES else _NOT_SIGNED}."


def settings_text(credentials: Credentials) -> str:
    """Describe which TLS settings are set, for messages."""
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
        raise DataSettingsError(f"{path} (data_service.{setting}) contains no PEM certificate: {error}.") from error
    return content


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataSettingsError(f"{path} (data_service.{setting}) cannot be read: {error}.") from error
