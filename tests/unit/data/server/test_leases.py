"""A data host exits when no trainer needs it, and not before."""

import pytest

from lightning_sm.data.ipc.host_messages import Finished
from lightning_sm.data.server.leases import Leases
from lightning_sm.errors import DataHostMismatchError


def test_no_trainer_connected():
    """The host fails if no trainer connects within the time to start; without that limit, it waits for ever."""
    assert Leases(60.0, 900.0, now=10.0).outcome(909.0) is None
    assert Leases(60.0, 900.0, now=10.0).outcome(910.0) == Finished(
        "No trainer connected within 900 s. See the trainers' logs.", is_error=True
    )
    assert Leases(60.0, 900.0, now=10.0).outcome(1e9).is_error
    assert Leases(None, None, now=0.0).outcome(1e9) is None


def test_all_have_finished():
    """The host exits when every expected rank has finished."""
    leases = Leases(60.0, 900.0, now=0.0)
    for rank in range(2):
        leases.heartbeat(f"rank {rank}", 2, now=1.0)
    leases.finish("rank 0", now=2.0)
    assert leases.outcome(3.0) is None
    leases.finish("rank 1", now=4.0)
    assert leases.outcome(5.0) == Finished("both ranks have finished")


def test_the_number_of_ranks_is_in_words():
    """The reason says "the only rank", "both ranks" or "all 3 ranks"."""
    for world_size, ranks in ((1, "the only rank has"), (2, "both ranks have"), (3, "all 3 ranks have")):
        leases = Leases(60.0, 900.0, now=0.0)
        for rank in range(world_size):
            leases.heartbeat(f"rank {rank}", world_size, now=1.0)
            leases.finish(f"rank {rank}", now=2.0)
        assert leases.outcome(2.0) == Finished(f"{ranks} finished")


def test_a_rank_that_has_not_connected_yet_is_waited_for():
    """If a rank finishes before another has connected, the host waits for the other for one lease, no longer."""
    leases = Leases(60.0, 900.0, now=0.0)
    leases.heartbeat("rank 0", 2, now=1.0)
    leases.finish("rank 0", now=2.0)
    assert leases.outcome(61.0) is None
    assert leases.outcome(62.0) == leases.outcome(1e9) == Finished("the only rank has finished")


def test_trainers_that_came_one_after_the_other_are_not_waited_for():
    """After two consecutive trainings of two ranks each, no rank is missing."""
    leases = Leases(60.0, 900.0, now=0.0)
    for host in "ab":
        for rank in range(2):
            leases.heartbeat(f"rank {rank} on {host}", 2, now=1.0)
        for rank in range(2):
            leases.finish(f"rank {rank} on {host}", now=1.0)
    assert leases.outcome(1.0) is not None


def test_a_lost_trainer_has_finished():
    """A trainer that sends no heartbeats counts as finished when its lease expires."""
    leases = Leases(60.0, 900.0, now=0.0)
    leases.heartbeat("rank 0", 1, now=100.0)
    assert leases.outcome(159.0) is None
    assert leases.outcome(160.0) == Finished("the only rank has finished (lost connection)")


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_trainer_that_comes_back_has_a_lease_again(is_silent):
    """A second run of the Trainer in a script, or a network that recovers, renews a lease."""
    leases = Leases(60.0, 900.0, now=0.0)
    leases.heartbeat("rank 0", 1, now=1.0)
    if not is_silent:
        leases.finish("rank 0", now=2.0)
    leases.heartbeat("rank 0", 1, now=100.0)
    assert leases.outcome(101.0) is None


@pytest.mark.parametrize("is_lost", [True, False])
def test_trainers_that_may_restart_are_waited_for(is_lost):
    """Trainers that finished or were lost have as long to come back as to start; then the host exits."""
    leases = Leases(60.0, 900.0, now=0.0, may_restart=True)
    leases.heartbeat("rank 0", 1, now=100.0)
    if not is_lost:
        leases.finish("rank 0", now=100.0)
    assert leases.outcome(999.0) is None
    note = " (lost connection)" if is_lost else ""
    assert leases.outcome(1000.0) == Finished(f"the only rank has finished{note}")
    leases.heartbeat("rank 0", 1, now=999.0)
    leases.finish("rank 0", now=1001.0)
    assert leases.outcome(1900.0) is None


def test_without_a_limit_for_the_start_no_restart_is_waited_for():
    """Without a limit for the start, there is none for a restart, so the host does not wait for one."""
    leases = Leases(60.0, None, now=0.0, may_restart=True)
    leases.heartbeat("rank 0", 1, now=1.0)
    leases.finish("rank 0", now=2.0)
    assert leases.outcome(2.0) == Finished("the only rank has finished")


def test_an_ending_job_waits_for_no_restart():
    """A stopped job does not restart: its data hosts exit with the last trainer."""
    leases = Leases(60.0, 900.0, now=0.0, may_restart=True)
    leases.heartbeat("rank 0", 1, now=100.0)
    leases.job_is_ending = True
    leases.finish("rank 0", now=101.0)
    assert leases.outcome(101.0) == Finished("the only rank has finished")


def test_a_host_that_was_started_by_hand_stays():
    """Without leases, the host does not exit when all trainers have finished."""
    leases = Leases(None, None, now=0.0)
    leases.heartbeat("rank 0", 1, now=1.0)
    leases.finish("rank 0", now=2.0)
    assert leases.outcome(1e9) is None


def test_a_newcomer_must_belong_to_the_training_that_runs():
    """Surplus ranks and ranks of another world size are refused until the running training has finished or is lost."""
    leases = Leases(60.0, 900.0, now=0.0)
    for rank in range(2):
        leases.heartbeat(f"rank {rank}", 2, now=1.0)
    with pytest.raises(
        DataHostMismatchError, match=r"rank 2 \(world size 2\) is one too many; already connected: rank 0"
    ):
        leases.heartbeat("rank 2", 2, now=2.0)
    expected = r"world size 8\) is one too many; already connected: rank 0 \(world size 2\), rank 1 .* A data host"
    with pytest.raises(DataHostMismatchError, match=expected):
        leases.heartbeat("rank 2", 8, now=2.0)
    leases.finish("rank 1", now=3.0)
    leases.heartbeat("rank 2", 2, now=4.0)
    leases.heartbeat("rank 3", 8, now=64.0)
    leases.finish("rank 4", now=64.0)  # has no lease
    assert leases.outcome(now=65.0) is None
    assert [leases.has(f"rank {rank}") for rank in range(5)] == [True, True, True, True, False]


def test_a_rank_may_train_in_a_smaller_group_later():
    """After a fit, ``Trainer(devices=1).test()`` on rank 0 is served while the other ranks still hold leases."""
    leases = Leases(None, None, now=0.0)
    for rank in range(4):
        leases.heartbeat(f"rank {rank}", 4, now=1.0)
    leases.heartbeat("rank 0", 1, now=2.0)
    leases.heartbeat("rank 1", 4, now=2.0)
    with pytest.raises(DataHostMismatchError, match=r"rank 0 on b \(world size 1\) is one too many"):
        leases.heartbeat("rank 0 on b", 1, now=2.0)


def test_a_refusal_names_four_ranks():
    """A refusal names at most four connected ranks, and counts the others."""
    leases = Leases(None, None, now=0.0)
    for rank in range(5):
        leases.heartbeat(f"rank {rank}", 5, now=1.0)
    with pytest.raises(DataHostMismatchError, match=r"connected: rank 0 .*, rank 3 .*, \.\.\. \(5 in all\)"):
        leases.heartbeat("rank 5", 5, now=2.0)


def test_a_trainer_that_is_silent_keeps_nobody_out():
    """Even without leases, a killed trainer is forgotten after a minute, and another can connect."""
    leases = Leases(None, None, now=0.0)
    leases.heartbeat("rank 0 on a", 1, now=1.0)
    with pytest.raises(DataHostMismatchError):
        leases.heartbeat("rank 0 on b", 1, now=60.0)
    leases.heartbeat("rank 0 on b", 1, now=61.0)


def test_an_ending_job_waits_for_no_rank_that_has_not_connected():
    """If one of two ranks never connects, an ending job's host exits with the other, even after more heartbeats."""
    leases = Leases(60.0, 900.0, now=0.0)
    leases.heartbeat("rank 0", 2, now=1.0)
    leases.job_is_ending = True
    leases.heartbeat("rank 0", 2, now=2.0)
    assert leases.outcome(3.0) is None
    leases.finish("rank 0", now=4.0)
    assert leases.outcome(5.0) == Finished("the only rank has finished")


def test_an_ending_job_ends_no_lease():
    """Connected trainers are served until they finish or are lost, even while the job is ending."""
    leases = Leases(60.0, 900.0, now=0.0)
    for rank in range(2):
        leases.heartbeat(f"rank {rank}", 2, now=1.0)
    leases.job_is_ending = True
    leases.finish("rank 0", now=2.0)
    assert leases.outcome(60.0) is None
    assert leases.outcome(61.0) == Finished("both ranks have finished (lost connection)")


def test_a_job_that_ends_before_a_trainer_connected():
    """If the job ends before a trainer connects, the host exits at once without an error, with or without leases."""
    for lease_s in (60.0, None):
        leases = Leases(lease_s, 900.0, now=0.0)
        leases.job_is_ending = True
        assert leases.outcome(0.0) == Finished("the job was stopped before a trainer connected")
