"""Which faults ``lightning-sm local --chaos`` draws."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.chaos.draws import MAX_RETRIES, Course, Targets, at_step, draw
from lightning_sm.emulator import faults
from lightning_sm.emulator.faults import LOSSES, FaultSettings, Kind, Moment

COURSE = Course(steps=80, epochs=4, seconds=20.0, spans=[(0.0, 5.0), (9.0, 9.5)])
TARGETS = Targets(["trainer-1", "trainer-2"], ["data-1"], devices=2, max_restarts=3, kinds=frozenset(Kind))


def drawn(targets=TARGETS, course=COURSE, draws=400):
    """The faults of many draws, parsed as the emulator does."""
    return [[faults.parse(text) for text in draw(1, number, course, targets)] for number in range(draws)]


@given(
    seed=st.integers(0, 10**6),
    trainers=st.integers(1, 3),
    data_hosts=st.integers(0, 2),
    devices=st.integers(1, 4),
    steps=st.integers(0, 1000),
    spans=st.lists(st.tuples(st.floats(-1, 50), st.floats(-1, 50))),
)
def test_the_emulator_accepts_every_draw(seed, trainers, data_hosts, devices, steps, spans):
    """Whatever the cluster and the script are like, the faults have hosts, ranks and moments that exist."""
    sizes = {"trainer": trainers, "data": data_hosts} if data_hosts else {"trainer": trainers}
    targets = Targets(
        [f"trainer-{number + 1}" for number in range(trainers)],
        [f"data-{number + 1}" for number in range(data_hosts)],
        devices,
        3,
        frozenset(Kind),
    )
    texts = draw(seed, 1, Course(steps, min(steps, 3), 30.0, spans), targets)
    faults.check(FaultSettings(tuple(map(faults.parse, texts))), sizes, devices)
    assert 1 <= len(texts) <= 3


def test_all_kinds_that_a_job_can_survive_are_drawn():
    """Of all hosts, processes and moments; a stop is not among them, because nothing follows it."""
    found = [fault for one in drawn() for fault in one]
    assert {fault.kind for fault in found} == set(Kind) - {Kind.STOP}
    assert {fault.host for fault in found} == {"trainer-1", "trainer-2", "data-1", None}
    assert {fault.local_rank for fault in found if fault.kind is Kind.KILL_RANK} == {0, 1}
    steps = [fault.not_before.step for fault in found if fault.not_before.step]
    assert min(steps) < 5
    assert max(steps) > 75
    assert max(steps) <= 80
    assert any(9.0 <= fault.not_before.seconds <= 9.5 for fault in found)
    assert any(fault.not_before.epoch == 4 for fault in found)
    assert any(fault.at_start for fault in found)


def test_no_draw_asks_for_more_than_a_job_may_do():
    """Restarts within the job, retries after the loss of a host, and one delay of each kind for a host."""
    limited = Targets(["trainer-1"], [], devices=1, max_restarts=1, kinds=frozenset(Kind))
    for one in drawn(limited):
        kinds = Counter(fault.kind for fault in one)
        assert kinds[Kind.KILL_RANK] <= 1
        assert sum(kinds[kind] for kind in LOSSES) <= MAX_RETRIES
        assert kinds[Kind.LATE] <= 1
        assert kinds[Kind.SLOW_DNS] <= 1


def test_a_draw_repeats_with_its_seed_and_number():
    """Each draw can be repeated without those before it."""
    assert draw(7, 3, COURSE, TARGETS) == draw(7, 3, COURSE, TARGETS)
    assert len({draw(seed, number, COURSE, TARGETS) for seed in (7, 8) for number in range(20)}) > 35


@pytest.mark.parametrize("steps", [0, 80])
def test_a_script_that_reports_no_steps_is_hit_at_moments(steps):
    """Without steps, all faults are due after seconds."""
    found = [fault for one in drawn(course=Course(steps, 0, 20.0)) for fault in one]
    assert any(fault.not_before.step for fault in found) == bool(steps)
    assert any(fault.not_before.seconds for fault in found)


def test_kinds_that_a_system_cannot_inject_are_not_drawn():
    """Containers have no slow names."""
    targets = Targets(["trainer-1"], [], 1, 3, frozenset(set(Kind) - {Kind.SLOW_DNS}))
    assert Kind.SLOW_DNS not in {fault.kind for one in drawn(targets) for fault in one}


def test_a_fault_is_repeated_at_its_step():
    """Where that is known; steps, epochs and starts stay what they are."""
    moment = Moment(9.5, 28, 2)
    assert at_step("interrupt@after=9.21,skew=1.5", moment) == "interrupt@step=28,skew=1.5"
    assert at_step("kill:data-1@after=0.07", Moment(0.1)) == "kill:data-1@after=0.07"
    for fault in ("restart@step=10", "kill:data-1@epoch=2", "interrupt@start", "late:algo-1=2"):
        assert at_step(fault, moment) == fault
    assert at_step("restart@after=1", None) == "restart@after=1"
