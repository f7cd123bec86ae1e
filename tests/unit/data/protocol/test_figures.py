"""What a rank measures: sums that cross the network, and differences of them."""

import json
import math
from dataclasses import replace

import pytest

from lightning_sm.data.protocol.figures import BatchFigures, RankFigures
from lightning_sm.data.protocol.from_json import from_json
from lightning_sm.errors import WireError

BATCH = BatchFigures(num_bytes=100, queue_s=0.1, produce_s=0.2, transfer_s=0.1, num_ready=0)


def counted(*batches):
    """Figures of batches, each with its wait, the work before it, and the part of that with other ranks."""
    figures = RankFigures()
    for wait_s, busy_s, sync_s in batches:
        figures.count(BATCH, wait_s, busy_s, sync_s, is_step=True)
    return figures


def received_from(figures):
    """Return figures as another host gets them."""
    return from_json(RankFigures, json.loads(json.dumps(vars(figures.rounded()))), "figures of a rank")


def test_the_wait_for_the_first_batch_is_counted_apart():
    """Start-up does not make a training input-bound."""
    figures = counted((5.0, None, 0.0), (0.1, 0.3, 0.2), (0.1, 0.3, 0.2))
    assert figures.first_wait_s == 5.0
    assert figures.wait_fraction == pytest.approx(0.2 / 0.8)
    assert figures.own_s == pytest.approx(0.2)


def test_a_wait_is_blamed_on_what_its_batch_was_doing():
    """A quarter of the time from request to batch was the way."""
    assert counted((1.0, None, 0.0), (0.8, 0.3, 0.0)).transfer_wait_s == pytest.approx(0.2)


def test_waiting_for_a_second_loader_is_no_work():
    """The first loader sees that wait as work between its batches."""
    figures = RankFigures()
    for busy_s, other_s in ((None, None), (1.0, 0.6)):
        figures.count(BATCH, 0.1, busy_s, 0.0, is_step=True)
        figures.count(BATCH, 0.4, other_s, 0.0, is_step=False)
    assert (figures.num_steps, figures.num_batches) == (2, 4)
    assert figures.first_wait_s == pytest.approx(0.5)
    assert figures.wait_s == pytest.approx(0.5)
    assert figures.busy_s == pytest.approx(1.0 - 0.8)


def test_how_much_batches_vary_survives_the_way_to_rank_0():
    """Times of 4 and 6 ms vary by a fifth, also after the sums were rounded for the network."""
    figures = RankFigures()
    for produce_s in (0.004, 0.006):
        figures.count(replace(BATCH, produce_s=produce_s), 0.0, 1.0, 0.0, is_step=True)
    received = received_from(figures)
    assert received.produce_variation == pytest.approx(0.2)
    assert RankFigures().produce_variation is None


def test_nothing_counted_is_no_fraction():
    """Before the second batch there is nothing to divide by."""
    assert RankFigures().wait_fraction == counted((1.0, None, 0.0)).wait_fraction == 0.0


def test_differences_start_again_with_a_new_process():
    """A rank that was started again counts from zero, and all that it counts is new."""
    before, after = counted((1.0, None, 0.0)), counted((1.0, None, 0.0), (0.5, 0.2, 0.1))
    assert (after.since(before).num_steps, after.since(before).num_timed, before.num_timed) == (1, 1, 0)
    assert after.since(before).wait_s == pytest.approx(0.5)
    assert before.since(after) == before
    assert before.since(None) == before


def test_figures_cross_the_network():
    """With a tenth of a millisecond."""
    figures = counted((1.23456, None, 0.0), (0.5, 0.2, 0.1))
    assert received_from(figures).first_wait_s == 1.2346


@pytest.mark.parametrize(
    "change",
    [
        {"wait_s": math.nan},
        {"wait_s": 1e300},
        {"wait_s": "1"},
        {"wait_s": True},
        {"num_steps": 1.5},
        {"num_steps": -1},
        {"surprise": 1},
    ],
    ids=str,
)
def test_impossible_figures_are_refused(change):
    """Whatever comes from the network may be anything."""
    with pytest.raises(WireError, match="figures of a rank"):
        from_json(RankFigures, {**vars(RankFigures()), **change}, "figures of a rank")
    with pytest.raises(WireError, match="figures of a rank"):
        from_json(RankFigures, [change], "figures of a rank")
