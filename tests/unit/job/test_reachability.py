"""Waiting until the main host's name resolves, with a fake resolver and fake pauses."""

from __future__ import annotations

import logging

import pytest

from lightning_sm.errors import HostResolutionError
from lightning_sm.job.reachability import own_address, resolves, wait_for_host
from tests.fakes.job_folder import make_job


class Names:
    """A resolver that learns one name with each pause."""

    def __init__(self, *arrivals):
        self.known, self.arrivals, self.pauses = set(), list(arrivals), []

    def __contains__(self, address):
        return address in self.known

    def pause(self, seconds):
        """Record the pause instead of waiting, and let the next name arrive."""
        self.pauses.append(seconds)
        self.known.add(self.arrivals.pop(0))


def _wait(names, *, addresses=None, timeout_s=900.0):
    wait_for_host("algo-1", addresses or {}, timeout_s, is_known=names.__contains__, pause=names.pause)


def test_known_host_is_not_waited_for(caplog):
    """If the main host resolves, there is no pause and no log line, even if other hosts do not resolve."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    names = Names()
    names.known.add("algo-1")
    _wait(names)
    assert names.pauses == []
    assert caplog.messages == []


def test_host_that_resolves_later_is_found(caplog):
    """Each attempt is logged until the main host resolves."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    _wait(Names("algo-3", "algo-2", "algo-1"))
    stated = [message.partition(" (timeout in ")[0] for message in caplog.messages]
    assert stated == ["Waiting for the name of the main host algo-1 to resolve"] * 3


def test_pauses_grow_to_half_a_minute():
    """The pauses double from 1 s up to 30 s."""
    names = Names(*"abcdef", "algo-1")
    _wait(names)
    assert names.pauses == [1, 2, 4, 8, 16, 30, 30]


def test_host_that_never_resolves_is_an_error():
    """After the timeout, the error names the main host and the variable for its address."""
    names = Names()
    names.known.add("algo-2")
    message = r"'algo-1' did not resolve within 0 s\. .*set LIGHTNING_SM_HOST_ADDRESSES"
    with pytest.raises(HostResolutionError, match=message):
        _wait(names, timeout_s=0)


def test_one_process_of_a_host_reports(caplog):
    """The other local ranks look up only the main host, and wait for it without logging."""
    caplog.set_level(logging.INFO, logger="lightning_sm")
    asked = []
    names = Names("algo-3", "algo-1")

    def is_known(name):
        asked.append(name)
        return name in names

    wait_for_host("algo-1", {}, 900.0, is_reporter=False, is_known=is_known, pause=names.pause)
    assert asked == ["algo-1"] * 3
    assert caplog.messages == []


def test_errors_of_a_lookup_are_raised():
    """Errors from a lookup, such as for an impossible name, reach the caller."""
    with pytest.raises(UnicodeError):
        wait_for_host("a" * 70, {}, 900.0)


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
    """Servers listen on the host's address or the job's interface, else on all interfaces with a warning."""
    assert own_address(make_job({"gpu": ("nowhere.invalid",)}, **facts)) == address
    expected = f"The address of host nowhere.invalid is unknown: {reason}, and its name does not resolve. Listening on"
    assert [message.startswith(expected) for message in caplog.messages] == [True] * (reason is not None)
