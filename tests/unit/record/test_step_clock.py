"""StepClock attributes each second exactly once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.record.events import PARTS
from lightning_sm.record.step_clock import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    OTHER,
    TO_DEVICE,
    OpenSpan,
    StepClock,
    exposed,
)
from lightning_sm.record.totals import Totals

CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from(list(PARTS))),
        st.tuples(st.just("end_step"), st.integers(0, 8)),
        st.tuples(st.just("begin_span"), st.sampled_from("ab")),
        st.tuples(st.just("end_span"), st.sampled_from("ab")),
    ),
    max_size=30,
)


def seconds():
    """Return a clock that advances by one second per call."""
    return itertools.count().__next__


def test_a_step_has_its_parts():
    """Each second goes to the part that was entered before it; the next step does not count until it is complete."""
    clock = StepClock(seconds())
    for part in (DATA_WAIT, TO_DEVICE, FORWARD, OPTIMIZER, BACKWARD, OPTIMIZER):
        clock.enter(part)
    clock.end_step(4)
    clock.enter(DATA_WAIT)
    totals = clock.totals
    assert (totals.num_steps, totals.samples, totals.wall_s) == (1, 4, 7)
    assert totals.parts == {"data_wait": 1, "to_device": 1, "forward": 1, "backward": 1, "optimizer": 2, "other": 1}
    assert totals.share("optimizer", "other") == pytest.approx(3 / 7)


def test_spans_are_no_part_of_a_step():
    """An inner span is separate from its outer span, which continues after it; a step within a span has no time."""
    clock = StepClock(seconds())
    clock.begin_span("validation")
    clock.begin_span("checkpoint")
    assert clock.end_span("validation") is None
    inner = clock.end_span("checkpoint")
    clock.end_step(4)
    outer = clock.end_span("checkpoint", "validation")
    assert (inner.seconds, outer.seconds) == (1, 3)
    assert (clock.totals.num_steps, clock.totals.wall_s) == (0, 0)
    assert (clock.totals.num_untimed, clock.totals.num_trained) == (1, 1)


def test_a_wait_is_blamed_on_what_its_batch_was_doing():
    """A quarter of 4 s and a half of 2 s were in transit; the first wait belongs to a span and counts for no step."""
    now = [0.0]
    clock = StepClock(lambda: now[0])
    clock.begin_span("first_batch")
    for in_transit, seconds in ((1.0, 8.0), (0.25, 4.0), (0.5, 2.0)):
        clock.enter(DATA_WAIT)
        now[0] += seconds
        clock.note_wait(in_transit)
        clock.enter(FORWARD)
        clock.end_span("first_batch")
    assert clock.totals.in_transit_s == 0
    clock.end_step(1)
    assert (clock.totals.in_transit_s, clock.totals.parts["data_wait"]) == (2.0, 6.0)


@given(CALLS)
def test_the_sum_is_the_time_that_has_passed(calls):
    """The sum of all parts and spans is the elapsed time, whatever the order of calls."""
    looks = itertools.count()
    clock = StepClock(lambda: next(looks) ** 1.5)
    spans = [getattr(clock, name)(argument) for name, argument in [*calls, ("enter", OTHER)]]
    ended_s = sum(span.seconds for span in spans if isinstance(span, OpenSpan))
    passed = (next(looks) - 1) ** 1.5
    open_spans = sum(span.seconds for span in clock._spans)
    steps_s = sum(clock._parts.values())
    assert steps_s + ended_s + open_spans == pytest.approx(passed)


def test_what_was_added_since_a_snapshot():
    """The difference of two totals excludes the time of spans."""
    clock = StepClock(seconds())
    clock.end_step(1)
    before = clock.totals
    clock.begin_span("validation")
    clock.end_span("validation")
    clock.end_step(2)
    new = clock.totals.plus(before, -1)
    assert (new.num_steps, new.samples, new.wall_s) == (1, 2, 2)
    assert before.plus(new) == clock.totals
    assert Totals().share("other") == 0


def host(**parts):
    """Return the host's seconds by part."""
    return dict.fromkeys(PARTS, 0.0) | parts


@pytest.mark.parametrize(
    ("measured", "gpu", "expected"),
    [
        # The GPU is busy all the time, so waiting for data costs nothing.
        (host(data_wait=6, forward=1, other=3), {"forward": 4, "backward": 6}, host(forward=4, backward=6)),
        # The GPU is idle for 4 of 10 s, so only 4 of the 6 s of waiting count.
        (host(data_wait=6, forward=4), {"forward": 2, "backward": 4}, host(forward=2, backward=4, data_wait=4)),
        # The host did not wait, so the rest is its work.
        (host(forward=10), {"forward": 2, "optimizer": 1}, host(forward=2, optimizer=1, other=7)),
        # If only a few steps were measured, the GPU's extrapolated time may be too long.
        (host(forward=5, to_device=5), {"forward": 10, "backward": 10}, host(forward=5, backward=5)),
        (host(data_wait=2, to_device=1, other=1), {}, host(data_wait=2, to_device=1, other=1)),
    ],
)
def test_waiting_counts_while_the_gpu_has_nothing_to_do(measured, gpu, expected):
    """Waiting counts only while the GPU is idle, and the parts still sum up to the elapsed time."""
    parts = exposed(measured, gpu)
    assert parts == expected
    assert list(parts) == list(PARTS)
    assert sum(parts.values()) == pytest.approx(sum(measured.values()))
