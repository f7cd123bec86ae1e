"""The rule by which the ranks keep states in memory."""

from __future__ import annotations

import random

import pytest

from lightning_sm.training.checkpoints.state_schedule import (
    MAX_SHARE,
    StateCosts,
    StateSchedule,
    steps_until_affordable,
)


def _costs(elapsed_s, spent_s=0.0, next_s=0.01, *, can_keep=True, is_writing=False):
    return StateCosts(elapsed_s, spent_s, next_s, can_keep=can_keep, is_writing=is_writing)


@pytest.mark.parametrize(
    ("spent_s", "next_s", "elapsed_s", "num_steps", "num_states", "expected"),
    [
        pytest.param(0, 0.01, 1, 10, 1, 0, id="the first one at its share"),
        pytest.param(0, 0.01, 0.5, 5, 1, 5, id="the first one before"),
        pytest.param(0, 1, 10, 100, 1, 900, id="a costly one"),
        pytest.param(1, 1, 150, 10, 1, 4, id="the second one, rounded up"),
        pytest.param(1, 1, 200, 10, 1, 0, id="the second one at its share"),
        pytest.param(0, 0.01, 60, 1, 1, 0, id="after each step, if steps are long"),
        pytest.param(0, 0.01, 1, 10, 2, 10, id="two of them"),
        pytest.param(0, 0.01, 0, 4, 1, 4, id="without any time measured"),
    ],
)
def test_the_wait_follows_from_cost_and_time(spent_s, next_s, elapsed_s, num_steps, num_states, expected):
    """The sum of all costs is at most 1% of the time when the state has been kept."""
    costs = _costs(elapsed_s, spent_s, next_s)
    assert steps_until_affordable(costs, num_steps, num_states) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("step_s", [0.001, 0.1, 2.0, 600.0])
@pytest.mark.parametrize("state_s", [0.002, 0.05, 4.0])
def test_all_ranks_decide_alike_and_stay_within_the_share(num_ranks, step_s, state_s):
    """With times that vary between ranks and steps; states are neither more nor much fewer than the share allows."""
    draw = random.Random(0)
    schedules = [StateSchedule() for _ in range(num_ranks)]
    elapsed, spent, last = [0.0] * num_ranks, [0.0] * num_ranks, [0.01] * num_ranks
    kept = []
    for step in range(20_000):
        ticks = {one.tick() for one in schedules}
        assert len(ticks) == 1
        if ticks == {True}:
            costs = [_costs(*of_rank) for of_rank in zip(elapsed, spent, last, strict=True)]
            plans = {one.plan(costs) for one in schedules}
            assert len(plans) == 1
            if plans == {True}:
                kept.append(step)
                last = [state_s * draw.uniform(0.8, 1.2) for _ in last]
                spent = [sum(pair) for pair in zip(spent, last, strict=True)]
                elapsed = [sum(pair) for pair in zip(elapsed, last, strict=True)]
        elapsed = [one + step_s * draw.uniform(0.5, 1.5) for one in elapsed]
    if len(kept) > 1:  # the cost of the first one is not known before
        assert max(spent) <= 1.3 * MAX_SHARE * min(elapsed)
    affordable = min(20_000, MAX_SHARE * min(elapsed) / state_s)
    assert len(kept) >= affordable / 3 - 1


def test_a_slow_rank_decides_for_all():
    """The others wait for it."""
    schedule = StateSchedule()
    while not schedule.tick():
        pass
    assert not schedule.plan([_costs(1), _costs(1, next_s=0.02)])


def test_a_state_that_is_still_written_delays_the_next():
    """Also one of another host."""
    schedule = StateSchedule()
    while not schedule.tick():
        pass
    assert not schedule.plan([_costs(1000), _costs(1000, is_writing=True)])
    while not schedule.tick():
        pass
    assert schedule.plan([_costs(1000), _costs(1000)])


def test_one_rank_with_room_is_enough():
    """Without any, no rank exchanges costs again."""
    schedule = StateSchedule()
    while not schedule.tick():
        pass
    assert schedule.plan([_costs(1000), _costs(1000, can_keep=False)])
    while not schedule.tick():
        pass
    assert not schedule.plan([_costs(2000, can_keep=False)] * 2)
    assert not any(schedule.tick() for _ in range(10_000))


def test_the_wait_at_most_doubles_the_steps():
    """The first steps may take a hundred times as long as later ones, or a tenth."""
    schedule = StateSchedule()
    exchanges = []
    for step in range(1, 1000):
        if schedule.tick():
            exchanges.append(step)
            schedule.plan([_costs(1e-6 * step, next_s=100)])
    assert exchanges == [4, 8, 16, 32, 64, 128, 256, 512]
