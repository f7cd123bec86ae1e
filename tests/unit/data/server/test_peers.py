"""Tests of which callers a data host trusts by address, and of the refusal that others read."""

from __future__ import annotations

import pytest

from lightning_sm.data.server import peers
from lightning_sm.data.settings import Credentials, HostSettings

OWN = ["127.0.0.1", "::1", "10.0.0.3", "fe80::1%eth0"]


class Names:
    """A resolver that counts lookups, with answers that the test sets."""

    def __init__(self):
        self.known, self.num_lookups, self.now = {}, 0, 0.0

    def look_up(self, name):
        self.num_lookups += 1
        if name not in self.known:
            raise OSError(f"no {name}")
        return self.known[name]

    def peers(self, *trusted, address="10.0.0.3:7", **credentials):
        settings = HostSettings(
            address, 1, 1, None, None, "algo-3", Credentials("job", "", **credentials), trusted=list(trusted)
        )
        return peers.TrustedPeers(settings)

    def monotonic(self):
        return self.now


@pytest.fixture
def names(monkeypatch):
    """Replace the system's resolver, addresses and clock."""
    made = Names()
    monkeypatch.setattr(peers, "_look_up", made.look_up)
    monkeypatch.setattr(peers, "_own_addresses", lambda: OWN)
    monkeypatch.setattr(peers, "time", made)
    return made


@pytest.mark.parametrize(
    ("address", "is_trusted"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("fe80::1%eth0", True),
        ("10.0.0.1", True),
        ("::ffff:10.0.0.1", True),
        ("fd00::12", True),
        ("192.168.7.9", True),
        ("10.0.0.2", False),
        ("127.0.0.66", False),
        ("192.168.8.9", False),
        ("fd00::13", False),
    ],
)
def test_own_addresses_hosts_of_the_job_and_the_users_networks_are_trusted(names, address, is_trusted):
    """No other address is trusted, not even a loopback address."""
    names.known = {"algo-1": ["10.0.0.1", "fd00::12"]}
    trusted = names.peers("algo-1", "192.168.7.0/24")
    assert trusted.admits(address) is is_trusted


def test_the_refusal_names_the_address_the_hosts_and_the_setting(names):
    """The refusal names the address, the trusted hosts and the setting that would admit it."""
    names.known = {"algo-1": ["10.0.0.1"], "algo-2": ["10.0.0.2"]}
    trusted = names.peers("algo-1", "algo-2", "10.0.0.4")
    assert not trusted.admits("10.9.9.9")
    assert trusted.refusal("10.9.9.9") == (
        "data host algo-3 does not trust 10.9.9.9. It trusts its own machine, algo-1, algo-2, 10.0.0.4. If 10.9.9.9 is "
        "a trainer, add it to data_service.trust of the data hosts, or use mutual TLS (data_service.tls_authority)."
    )


def test_a_name_that_resolves_late_or_moves_is_looked_up_when_an_unknown_address_calls(names):
    """Until all names resolve, a refusal is not final; a name that no longer resolves keeps its address."""
    names.known = {"algo-1": ["10.0.0.1"]}
    trusted = names.peers("algo-1", "algo-2")
    assert not trusted.admits("10.0.0.2")
    assert "These names do not resolve yet: algo-2." in trusted.refusal("10.0.0.2")
    names.known = {"algo-2": ["10.0.0.2"]}
    names.now = 100.0
    for known in ("10.0.0.1", "10.0.0.2"):
        assert trusted.admits(known)
    assert not trusted.unresolved
    names.known = {"algo-1": ["10.0.0.9"], "algo-2": ["10.0.0.2"]}
    names.now = 200.0
    assert trusted.admits("10.0.0.9")
    assert not trusted.admits("10.0.0.1")


def test_strangers_do_not_make_a_data_host_look_up_names_without_end(names):
    """However many strangers connect, names are looked up at most once a second."""
    names.known = {"algo-1": ["10.0.0.1"]}
    trusted = names.peers("algo-1")
    for _ in range(100):
        names.now += 0.1
        assert not trusted.admits("10.9.9.9")
    assert names.num_lookups <= 11
