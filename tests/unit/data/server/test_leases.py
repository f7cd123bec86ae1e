"""A data host leaves when no trainer needs it, and not before."""

import pytest

from lightning_sm.data.server.leases import Leases, is_success


def test_nobody_ever_came():
    """The host gives up after the time that trainers have to start, and waits for ever if there is none."""
    assert Leases(60.0, 900.0, now=10.0).outcome(909.0) is None
    assert "No trainer came within 900 s" in Leases(60.0, 900.0, now=10.0).outcome(910.0)["error"]
    assert Leases(None, None, now=0.0).outcome(1e9) is None


def test_all_have_finished():
    """The host leaves when every rank that is expected has said how it ended."""
    leases = Leases(60.0, 900.0, now=0.0)
    for rank in range(2):
        leases.beat(f"rank {rank}", 2, now=1.0)
    leases.finish("rank 0", "finished", now=2.0)
    assert leases.outcome(3.0) is None
    leases.finish("rank 1", "KeyError: 'x'", now=4.0)
    assert leases.outcome(5.0) == {"reason": "all 2 trainer ranks are through (KeyError: 'x', finished)"}


def test_a_rank_that_has_not_come_yet_is_waited_for():
    """One rank may be through before another has started, but not for longer than a lease."""
    leases = Leases(60.0, 900.0, now=0.0)
    leases.beat("rank 0", 2, now=1.0)
    leases.finish("rank 0", "finished", now=2.0)
    assert leases.outcome(61.0) is None
    assert leases.outcome(62.0) == {"reason": "all 1 trainer ranks are through (finished)"}


def test_silence_is_an_end():
    """A trainer that was switched off says nothing; its lease runs out."""
    leases = Leases(60.0, 900.0, now=0.0)
    leases.beat("rank 0", 1, now=100.0)
    assert leases.outcome(159.0) is None
    assert leases.outcome(160.0) == {"reason": "all 1 trainer ranks are through (no sign of life)"}


@pytest.mark.parametrize("is_silent", [True, False])
def test_who_comes_back_is_needed_again(is_silent):
    """A second run of the Trainer in one script, or a network that was away, revives a lease."""
    leases = Leases(60.0, 900.0, now=0.0)
    leases.beat("rank 0", 1, now=1.0)
    if not is_silent:
        leases.finish("rank 0", "finished", now=2.0)
    leases.beat("rank 0", 1, now=100.0)
    assert leases.outcome(101.0) is None


def test_a_host_that_was_started_by_hand_stays():
    """Without a lease, the end of all trainers is not the end of the host."""
    leases = Leases(None, None, now=0.0)
    leases.beat("rank 0", 1, now=1.0)
    leases.finish("rank 0", "finished", now=2.0)
    assert leases.outcome(1e9) is None


def test_the_end_of_the_job_waits_for_nobody_who_has_not_come():
    """One rank of two came; the other one will not, and a rank that still beats does not bring it back."""
    leases = Leases(60.0, 900.0, now=0.0)
    leases.beat("rank 0", 2, now=1.0)
    leases.expect_no_more()
    leases.beat("rank 0", 2, now=2.0)
    assert leases.outcome(3.0) is None
    leases.finish("rank 0", "stopped", now=4.0)
    assert leases.outcome(5.0) == {"reason": "all 1 trainer ranks are through (stopped)"}


def test_the_end_of_the_job_ends_no_lease():
    """Those that have come are served until they have finished, or are gone."""
    leases = Leases(60.0, 900.0, now=0.0)
    for rank in range(2):
        leases.beat(f"rank {rank}", 2, now=1.0)
    leases.expect_no_more()
    leases.finish("rank 0", "stopped", now=2.0)
    assert leases.outcome(60.0) is None
    assert leases.outcome(61.0) == {"reason": "all 2 trainer ranks are through (no sign of life, stopped)"}


def test_the_end_of_the_job_before_anybody_came():
    """The host leaves at once, and has not failed; also one without a lease."""
    for lease_s in (60.0, None):
        leases = Leases(lease_s, 900.0, now=0.0)
        leases.expect_no_more()
        assert leases.outcome(0.0) == {"reason": "the job was stopped before a trainer came"}


@pytest.mark.parametrize(
    ("outcome", "is_well"),
    [
        ("finished", True),
        ("the process ended", True),
        ("KeyError: 'finished'", False),
        ("the training process is gone", False),
    ],
)
def test_a_success_is_told_from_a_failure(outcome, is_well):
    """Only what a module says that was closed regularly is one."""
    assert is_success(outcome) == is_well
