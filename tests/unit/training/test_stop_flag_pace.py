"""When ranks exchange their stop flags."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.training.stop_flag_pace import Pace


@given(st.integers(1, 600), st.lists(st.lists(st.floats(0.0, 100.0), min_size=5, max_size=5), max_size=20))
def test_all_ranks_exchange_at_the_same_ticks(world_size, seconds):
    """All ranks exchange at the same ticks, however long each rank's ticks take."""
    paces = [Pace(2.0, world_size) for _ in range(min(world_size, 5))]
    clocks = [0.0] * len(paces)
    for tick in seconds:
        clocks = [clock + step for clock, step in zip(clocks, tick, strict=False)]
        due = [pace.tick() for pace in paces]
        assert len(set(due)) == 1
        if due[0]:
            shares = [pace.ms_per_tick(clock) for pace, clock in zip(paces, clocks, strict=False)]
            total = sum(shares) + shares[0] * (world_size - len(paces))
            assert total <= 1 << 24, "float32 would round it"
            for pace in paces:
                pace.plan_next(total)


def exchanges(step_s, num_ticks):
    """The ticks at which a rank with steps of constant duration exchanges."""
    pace, ticks = Pace(2.0, 1), []
    for tick in range(num_ticks):
        if pace.tick():
            ticks.append(tick)
            pace.plan_next(pace.ms_per_tick(tick * step_s))
    return ticks


def test_quick_steps_are_rarely_interrupted():
    """With steps of 10 ms, the pace settles at one exchange per second within a few exchanges."""
    ticks = exchanges(0.01, 2000)
    assert ticks[-1] - ticks[-2] == 100
    assert len(ticks) < 30


def test_slow_steps_exchange_at_each():
    """With steps of 5 s, ranks exchange at each step."""
    ticks = exchanges(5.0, 20)
    assert ticks[1:] == list(range(ticks[1], 20))


def test_the_first_step_says_nothing_about_the_next_ones():
    """After a first step of a minute, the interval grows gradually; slow steps later shrink it at once."""
    pace = Pace(2.0, 1)
    gaps, now = [], 0.0
    for tick in range(600):
        now += 60.0 if tick == 0 else 0.01 if tick < 300 else 4.0
        if pace.tick():
            gaps.append(tick)
            pace.plan_next(pace.ms_per_tick(now))
    assert [later - earlier for earlier, later in itertools.pairwise(gaps)][:4] == [4, 16, 64, 100]
    assert gaps[-1] == 599
