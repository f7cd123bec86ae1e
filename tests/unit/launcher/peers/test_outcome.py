"""The rules of how a job ends, with times of the test's own."""

from __future__ import annotations

import pytest

from lightning_sm.launcher.peers.outcome import Endings, Outcome, Verdict
from tests.unit.launcher.peers.launchers import BROKEN


def _endings(**timings):
    return Endings(["a", "b"], ["d"], **{"return_s": 1, "absent_s": 10, "ending_s": 100, **timings})


def test_hosts_that_do_not_end_are_waited_for_only_so_long():
    """After a failure, a script that does not end holds the others up for ending_s."""
    endings = _endings()
    for host in "abd":
        endings.joined(host, 0)
    endings.reported("a", BROKEN, 5)
    endings.settle(104)
    assert (endings.is_over, endings.awaited) == (False, ["b"])
    endings.settle(105)
    assert (endings.is_over, endings.verdict.host) == (True, "a")


def test_absent_data_host_is_waited_for_after_a_failure_only():
    """A data host that is about to start must hear of a failure; after success nobody waits for it."""
    for code, is_over in ((0, True), (1, False)):
        endings = _endings()
        for host in "ab":
            endings.joined(host, 0)
            endings.reported(host, Outcome(code), 1)
        endings.settle(2)
        assert endings.is_over is is_over
        endings.settle(11)
        assert endings.is_over


def test_unknown_kind_of_verdict_is_refused():
    """A verdict of a kind that does not exist is no verdict."""
    with pytest.raises(ValueError, match="unknown kind of verdict 'won'"):
        Verdict.from_message({"kind": "won", "host": "", "exit_code": 0, "reason": ""})


def test_training_goes_on_until_all_data_hosts_have_failed():
    """One of two data hosts that fails ends nothing; when the other one fails, too, nobody can succeed."""
    endings = Endings(["a"], ["d", "e"], return_s=1, absent_s=10, ending_s=100)
    for host in "ade":
        endings.joined(host, 0)
    endings.reported("d", BROKEN, 1)
    assert endings.verdict is None
    endings.reported("e", Outcome(9, "out of memory"), 2)
    assert endings.verdict == Verdict("failed", "e", 9, "out of memory")


def test_data_hosts_that_succeed_are_no_failure():
    """A data host that has left without an error does not make the next one's failure that of the job."""
    endings = Endings(["a"], ["d", "e"], return_s=1, absent_s=10, ending_s=100)
    endings.joined("a", 0)
    endings.reported("d", Outcome(0), 1)
    endings.reported("e", BROKEN, 2)
    assert endings.verdict is None


def test_lost_data_host_is_no_verdict():
    """A data host that vanishes ends nothing; a trainer host that does, does."""
    endings = _endings()
    for host in "abd":
        endings.joined(host, 0)
    endings.left("d", 1, "its connection ended")
    endings.settle(50)
    assert endings.verdict is None
    endings.left("b", 50, "its connection ended")
    endings.settle(50.9)
    assert endings.verdict is None
    endings.settle(51)
    assert endings.verdict == Verdict("lost", "b", 1, "Host b is gone: its connection ended")


def test_host_that_ended_is_not_awaited_again():
    """A launcher whose script has ended may come and go."""
    endings = _endings()
    endings.joined("a", 0)
    endings.joined("b", 0)
    endings.reported("b", Outcome(0), 1)
    endings.left("b", 2, "its connection ended")
    endings.joined("b", 3)
    endings.settle(50)
    assert endings.verdict is None
    assert endings.awaited == ["a"]


def test_lost_host_that_returns_is_awaited_again():
    """A host that comes back too late for the verdict is given its time to end."""
    endings = _endings()
    endings.joined("a", 0)
    endings.joined("b", 0)
    endings.joined("d", 0)
    endings.left("b", 1, "its connection ended")
    endings.settle(2)
    endings.reported("a", Outcome(143), 3)
    endings.joined("b", 4)
    endings.settle(5)
    assert endings.awaited == ["b"]
    assert not endings.is_over
    endings.reported("b", Outcome(0), 6)
    endings.settle(6)
    assert endings.is_over
    assert (endings.verdict.kind, endings.verdict.host) == ("lost", "b")
