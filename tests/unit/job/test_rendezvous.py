"""Waiting for the main host's name, with a resolver and pauses of the test's own."""

from __future__ import annotations

import json
import logging
import time

import pytest

from lightning_sm.errors import HostResolutionError
from lightning_sm.job.rendezvous import resolves, wait_for_host
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import SLOW_NAMES
from tests.fakes.job_folder import make_job

TOPOLOGY = Topology.from_job(make_job({"gpu": ("algo-1", "algo-2", "algo-3")}, "algo-2"))


class Names:
    """A resolver that learns its names one after the other, one with each pause."""

    def __init__(self, *arrivals):
        self.known, self.arrivals, self.pauses = set(), list(arrivals), []

    def __contains__(self, address):
        return address in self.known

    def pause(self, seconds):
        """Note the pause instead of waiting, and let the next name arrive."""
        self.pauses.append(seconds)
        self.known.add(self.arrivals.pop(0))


def _wait(names, *, addresses=None, timeout_s=900.0):
    wait_for_host("algo-1", TOPOLOGY, addresses or {}, timeout_s, is_known=names.__contains__, pause=names.pause)


def test_known_host_is_not_waited_for(caplog):
    """When the main host resolves there is no pause and no log line, whatever the other hosts do."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    names = Names()
    names.known.add("algo-1")
    _wait(names)
    assert names.pauses == []
    assert caplog.messages == []


def test_host_that_resolves_later_is_found(caplog):
    """Each attempt names the hosts that are still missing, until the main host resolves."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    _wait(Names("algo-3", "algo-2", "algo-1"))
    stated = [message.partition(" (main host: algo-1; ")[0] for message in caplog.messages]
    assert stated == [
        "Waiting for the names of hosts algo-1, algo-2, algo-3 to resolve",
        "Waiting for the names of hosts algo-1, algo-2 to resolve",
        "Waiting for the names of hosts algo-1 to resolve",
    ]


def test_pauses_grow_to_half_a_minute():
    """The pauses double from one second to thirty."""
    names = Names(*"abcdef", "algo-1")
    _wait(names)
    assert names.pauses == [1, 2, 4, 8, 16, 30, 30]


def test_host_that_never_resolves_is_an_error():
    """When the time is over, the error names all missing hosts, and has the table of hosts."""
    names = Names()
    names.known.add("algo-2")
    expected = r"(?s)'algo-1' did not resolve within 0 s\. Unresolved hosts: algo-1, algo-3\..*algo-2\*"
    with pytest.raises(HostResolutionError, match=expected):
        _wait(names, timeout_s=0)


def test_stated_address_stands_for_the_name():
    """A host with an address in LIGHTNING_SM_HOST_ADDRESSES is looked up by that address."""
    names = Names()
    names.known.add("127.0.0.2")
    _wait(names, addresses={"algo-1": "127.0.0.2"})


def test_addresses_resolve_as_they_are():
    """An IP address needs no resolver."""
    assert resolves("127.0.0.2")


def test_the_emulator_makes_names_slow(monkeypatch):
    """An address that the emulator holds back does not resolve before its time has come."""
    monkeypatch.setenv(SLOW_NAMES.name, json.dumps({"127.0.0.9": time.monotonic() + 60, "127.0.0.8": 0.0}))
    assert [resolves(f"127.0.0.{number}") for number in (7, 8, 9)] == [True, True, False]
