"""Who is trusted by the address of the caller, and what those who are not are told."""

from __future__ import annotations

import grpc
import pytest

from lightning_sm.data.server.peers import TrustedPeers, address_of
from lightning_sm.data.settings import Credentials, HostSettings

OWN = ["127.0.0.1", "::1", "10.0.0.3", "fe80::1%eth0"]


class Names:
    """A resolver that counts its lookups, and whose answers a test changes."""

    def __init__(self, **known):
        self.known, self.num_lookups, self.now = known, 0, 0.0

    def look_up(self, name):
        self.num_lookups += 1
        if name not in self.known:
            raise OSError(f"no {name}")
        return self.known[name]

    def peers(self, *trusted, address="10.0.0.3:7", **credentials):
        settings = HostSettings(
            address, 1, 1, None, None, "algo-3", Credentials("job", "", **credentials), trusted=list(trusted)
        )
        return TrustedPeers(settings, self.look_up, lambda: OWN, lambda: self.now)


class Call(grpc.ServicerContext):
    """The context of a call from an address."""

    def __init__(self, peer, certificate=None):
        self.caller, self.certificate = peer, certificate

    def peer(self):
        return self.caller

    def auth_context(self):
        return {"x509_pem_cert": [self.certificate]} if self.certificate else {}

    def abort(self, code, details):
        raise PermissionError(code, details)


Call.__abstractmethods__ = frozenset()


def error(peers, peer, certificate=None):
    """Return code and text with which a call ends."""
    with pytest.raises(PermissionError) as caught:
        peers.require_trusted(Call(peer, certificate))
    return caught.value.args


@pytest.mark.parametrize(
    ("peer", "is_trusted"),
    [
        ("ipv4:127.0.0.1:5", True),
        ("ipv6:%5B::1%5D:5", True),
        ("ipv6:[::1]:5", True),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", True),
        ("ipv4:10.0.0.1:5", True),
        ("ipv6:[::ffff:10.0.0.1]:5", True),
        ("ipv6:[fd00::12]:5", True),
        ("ipv4:192.168.7.9:5", True),
        ("ipv4:10.0.0.2:5", False),
        ("ipv4:127.0.0.66:5", False),
        ("ipv4:192.168.8.9:5", False),
        ("ipv6:[fd00::13]:5", False),
        ("unix:/tmp/socket", False),
        ("", False),
    ],
)
def test_own_addresses_hosts_of_the_job_and_the_users_networks_are_trusted(peer, is_trusted):
    """In all spellings of gRPC; nobody else is, not even on the loopback interface."""
    peers = Names(**{"algo-1": ["10.0.0.1", "fd00::12"]}).peers("algo-1", "192.168.7.0/24")
    assert peers.is_trusted(peer, {}) is is_trusted
    if not is_trusted:
        assert error(peers, peer)[0] is grpc.StatusCode.PERMISSION_DENIED


def test_a_certificate_is_as_good_as_an_address_and_so_is_the_unix_socket_of_the_machine():
    """With mutual TLS gRPC has verified the certificate; the socket cannot be reached from elsewhere."""
    authority = {"tls_certificate": "c", "tls_key": "k", "tls_authority": "a"}
    mutual, local = Names().peers(**authority), Names().peers(address="unix-abstract:x")
    assert mutual.are_known_otherwise
    assert local.are_known_otherwise
    assert not Names().peers(tls_certificate="c", tls_key="k").are_known_otherwise
    mutual.require_trusted(Call("ipv4:203.0.113.9:5", b"certificate"))
    local.require_trusted(Call("unix:"))
    assert error(mutual, "ipv4:203.0.113.9:5")[0] is grpc.StatusCode.PERMISSION_DENIED


def test_the_refusal_names_the_address_the_hosts_and_the_setting():
    """The user sees which of the two is wrong."""
    peers = Names(**{"algo-1": ["10.0.0.1"], "algo-2": ["10.0.0.2"]}).peers("algo-1", "algo-2", "10.0.0.4")
    assert error(peers, "ipv4:10.9.9.9:5") == (
        grpc.StatusCode.PERMISSION_DENIED,
        "data host algo-3 does not trust 10.9.9.9. It trusts its own machine (127.0.0.1, ::1, 10.0.0.3, fe80::1) and "
        "algo-1 (10.0.0.1), algo-2 (10.0.0.2), 10.0.0.4. If 10.9.9.9 is a trainer, add it to data_service.trust of the "
        "data hosts, or use mutual TLS (data_service.tls_authority).",
    )


def test_a_name_that_resolves_late_or_moves_is_looked_up_when_an_unknown_address_calls():
    """Until all names resolve, a refusal is not final; a name that no longer resolves keeps its address."""
    names = Names(**{"algo-1": ["10.0.0.1"]})
    peers = names.peers("algo-1", "algo-2")
    code, text = error(peers, "ipv4:10.0.0.2:5")
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "These names do not resolve yet: algo-2." in text
    names.known = {"algo-2": ["10.0.0.2"]}
    names.now = 100.0
    for known in ("10.0.0.1", "10.0.0.2"):
        assert peers.admits(known)
    assert not peers.unresolved
    names.known = {"algo-1": ["10.0.0.9"], "algo-2": ["10.0.0.2"]}
    names.now = 200.0
    assert peers.admits("10.0.0.9")
    assert not peers.admits("10.0.0.1")


def test_strangers_do_not_make_a_data_host_look_up_names_without_end():
    """However many call, names are looked up once a second."""
    names = Names(**{"algo-1": ["10.0.0.1"]})
    peers = names.peers("algo-1")
    for _ in range(100):
        names.now += 0.1
        assert not peers.admits("10.9.9.9")
    assert names.num_lookups <= 11


def test_callers_are_parsed_as_grpc_names_them():
    """Also those without an address."""
    peers = ("ipv4:1.2.3.4:5", "ipv6:%5Bfd00::1%5D:5", "unix:/a:b", "")
    assert [address_of(peer) for peer in peers] == ["1.2.3.4", "fd00::1", None, None]
