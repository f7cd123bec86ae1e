"""Sums of steps, and the choice of the rank that sets the pace."""

import pytest

from lightning_sm.record.totals import Totals, of_all_ranks, pace_of, samples_per_step, with_longest_wait

PARTS = {"data_wait": 0.1, "to_device": 0.1, "forward": 3.7, "backward": 5.6, "optimizer": 0.4, "other": 0.1}


def test_a_rank_that_waits_makes_the_others_wait():
    """Rank 0 records another rank's wait for data as backward pass, from which it is moved to data_wait."""
    seen = with_longest_wait(PARTS, 0.5)
    assert (seen["data_wait"], seen["backward"]) == (pytest.approx(5.0), pytest.approx(0.7))
    assert sum(seen.values()) == pytest.approx(sum(PARTS.values()))
    assert with_longest_wait(PARTS, 0.001) == PARTS


def test_the_last_rank_in_the_backward_pass_sets_the_pace():
    """The slowest rank apart from the backward pass sets the pace; ranks without steps are ignored."""
    ranks = {0: Totals(100, parts=PARTS), 1: Totals(100, parts=PARTS | {"forward": 8.7, "backward": 0.6}), 2: Totals()}
    assert pace_of(ranks) == (1, ranks[1])
    assert pace_of({2: Totals()}) == (None, Totals())


def test_ranks_without_a_value_are_like_the_others():
    """Missing ranks count like the others, but samples that a recorded rank lacks are not guessed."""
    assert of_all_ranks([1.0, 3.0], 4) == 8.0
    assert of_all_ranks([], 4) == 0.0
    assert samples_per_step([Totals(10, 80)], 2) == 16.0
    assert samples_per_step([Totals(10, 80), Totals(10, 0)], 2) is None
    assert samples_per_step([], 2) is None
