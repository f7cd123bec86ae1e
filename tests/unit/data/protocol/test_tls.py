"""TLS files are read and checked, and errors name the setting."""

from __future__ import annotations

import re
import ssl

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from lightning_sm.data.protocol.tls import certificate_hint, read_tls
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataSettingsError


@pytest.fixture
def files(tmp_path):
    """Files of an authority, a certificate signed by it, and invalid ones."""
    authority = trustme.CA()
    issued, other = authority.issue_cert("algo-1"), authority.issue_cert("algo-2")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"word")
    contents = {
        "authority": authority.cert_pem.bytes(),
        "certificate": issued.cert_chain_pems[0].bytes(),
        "key": issued.private_key_pem.bytes(),
        "other_key": other.private_key_pem.bytes(),
        "locked_key": key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption_algorithm=encryption
        ),
        "text": b"no PEM\n",
        "bytes": bytes(range(256)),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def read(folder, certificate=None, key=None, authority=None):
    """Read TLS files from the folder."""
    paths = [None if name is None else str(folder / name) for name in (certificate, key, authority)]
    return read_tls(Credentials("job", "", *paths))


def test_files_come_as_they_are(files):
    """Files are returned unchanged, with or without an authority; without files, there is no TLS."""
    assert read(files) is None
    assert read(files, "certificate", "key").authority is None
    found = read(files, "certificate", "key", "authority")
    expected = [(files / name).read_bytes() for name in ("certificate", "key", "authority")]
    assert [found.certificate, found.key, found.authority] == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("missing", "key"), "missing (data_service.tls_certificate) cannot be read: "),
        (("certificate", "."), "(data_service.tls_key) cannot be read: "),
        (("text", "key"), "text (data_service.tls_certificate) contains no PEM certificate"),
        (("bytes", "key"), "bytes (data_service.tls_certificate) contains no PEM certificate"),
        (("key", "key"), "key (data_service.tls_certificate) contains no PEM certificate"),
        (("certificate", "key", "text"), "text (data_service.tls_authority) contains no PEM certificate"),
        *(
            (
                ("certificate", name),
                f"{name} (data_service.tls_key) is not an unencrypted PEM file with the private key",
            )
            for name in ("text", "other_key", "locked_key")
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_setting(files, names, message):
    """The error names the setting of a file that is missing, unreadable, locked, of the wrong kind or mismatched."""
    with pytest.raises(DataSettingsError, match=re.escape(message)):
        read(files, *names)


def test_hints_are_only_given_for_what_tls_settings_may_mend():
    """Only certificate errors get a hint: a host that is starting or exiting is no reason to give up."""
    assert (
        certificate_hint(ConnectionRefusedError())
        == certificate_hint(ssl.SSLEOFError())
        == certificate_hint(None)
        == ""
    )
    error = ssl.SSLCertVerificationError()
    error.verify_code = 20  # unable to get the issuer's certificate
    assert "is not signed by data_service.tls_authority" in certificate_hint(error)
    error.verify_code = 64  # IP address mismatch
    assert "SubjectAlternativeName" in certificate_hint(error)
