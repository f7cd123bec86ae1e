"""Waiting for the main host's name, with a resolver and pauses of the test's own."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from lightning_sm.errors import HostResolutionError
from lightning_sm.job.rendezvous import own_address, resolves, wait_for_host
from lightning_sm.job.topology import Topology
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


MANY = tuple(f"algo-{number}" for number in range(1, 65))
LARGE = Topology.from_job(make_job({"gpu": MANY}, "algo-2"))


def test_a_resolver_that_hangs_does_not_delay_the_deadline(caplog):
    """Names are looked up side by side: 64 of them that get no answer delay neither the log nor the deadline."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    is_over = threading.Event()
    started = time.monotonic()
    try:
        with pytest.raises(HostResolutionError, match=r"'algo-1' did not resolve within 0 s.*\(64 in all\)"):
            wait_for_host("algo-1", LARGE, {}, 0.4, is_known=lambda _name: is_over.wait(0.3) and False)
    finally:
        is_over.set()
    assert time.monotonic() - started < 5  # one after the other: 65 x 0.3 s


def test_an_answer_that_comes_late_counts():
    """A lookup that takes longer than an attempt goes on, and its answer ends the waiting."""
    has_answered = threading.Event()
    calls = []

    def slow(name):
        calls.append(name)
        return has_answered.wait(60)

    wait_for_host(
        "algo-1",
        TOPOLOGY,
        {},
        60,
        is_reporter=False,
        is_known=slow,
        pause=lambda _s: has_answered.set(),
        answer_s=0.1,
    )
    assert calls == ["algo-1"]


def test_a_line_names_at_most_eight_hosts(caplog):
    """Of 64 missing hosts a line names the first eight and the number of all."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    names = Names("algo-1")
    wait_for_host("algo-1", LARGE, {}, 900.0, is_known=names.__contains__, pause=names.pause)
    assert caplog.messages[0].startswith("Waiting for the names of hosts algo-1, algo-10, ")
    assert caplog.messages[0].partition(" to resolve")[0].endswith("... (64 in all)")
    assert caplog.messages[0].count("algo-") == 8 + 1


def test_one_process_of_a_host_reports(caplog):
    """The other local ranks look up the main host only, and wait for it without a word."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    asked = []
    names = Names("algo-3", "algo-1")

    def is_known(name):
        asked.append(name)
        return name in names

    wait_for_host("algo-1", TOPOLOGY, {}, 900.0, is_reporter=False, is_known=is_known, pause=names.pause)
    assert asked == ["algo-1"] * 3
    assert caplog.messages == []


def test_errors_of_a_lookup_are_raised():
    """What a lookup raises, such as for a name that cannot be one, reaches the caller."""
    with pytest.raises(UnicodeError):
        wait_for_host("a" * 70, TOPOLOGY, {}, 900.0)


def test_stated_address_stands_for_the_name():
    """A host with an address in LIGHTNING_SM_HOST_ADDRESSES is looked up by that address."""
    names = Names()
    names.known.add("127.0.0.2")
    _wait(names, addresses={"algo-1": "127.0.0.2"})


def test_addresses_resolve_as_they_are():
    """An IP address needs no resolver."""
    assert resolves("127.0.0.2")


ALL = "0.0.0.0"  # noqa: S104 - the warning says so


@pytest.mark.parametrize(
    ("facts", "address", "reason"),
    [
        ({"addresses": {"nowhere.invalid": "10.0.0.7"}}, "10.0.0.7", None),
        ({"network_interface": "lo"}, "127.0.0.1", None),
        ({"network_interface": "none0"}, ALL, "it has no interface none0"),
        ({}, ALL, "the job names no interface"),
    ],
)
def test_servers_listen_on_the_interface_of_the_job(caplog, facts, address, reason):
    """Else on that of the host's name; a warning says why it is all of them."""
    assert own_address(make_job({"gpu": ("nowhere.invalid",)}, **facts)) == address
    expected = (
        f"The address of host nowhere.invalid is unknown: {reason}, and its own name does not resolve. Listening on"
    )
    assert [message.startswith(expected) for message in caplog.messages] == [True] * (reason is not None)
