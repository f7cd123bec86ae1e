"""Tests of a rank's figures: sums that cross the network, and their differences."""

import json
import math

import pytest
from msgspec.structs import asdict

from lightning_sm.data.protocol.calls import HeartbeatRequest
from lightning_sm.data.protocol.message_codec import decode
from lightning_sm.errors import WireError
from lightning_sm.record.data_figures import BatchFigures, RankFigures

BATCH = BatchFigures(num_bytes=100, queue_s=0.1, produce_s=0.2, transfer_s=0.1, num_ready=0)


def counted(*waits):
    """Return figures of steps that each waited this long for a batch, and took 0.3 s besides."""
    figures = RankFigures()
    for wait_s in waits:
        figures.count(BATCH, is_step=True)
        figures = figures.plus(RankFigures(num_timed=1, wait_s=wait_s, busy_s=0.3, sync_s=0.2))
    return figures


def received_from(figures):
    """Return figures as another host receives them."""
    return parsed(asdict(figures.rounded()))


def parsed(figures):
    """Return figures parsed from JSON, as part of a heartbeat."""
    encoded = json.dumps({"client": "rank 0", "world_size": 1, "figures": figures}).encode()
    return decode(HeartbeatRequest, encoded, "Heartbeat request").figures


def test_what_a_rank_does_by_itself():
    """A rank's own time excludes waits for data, and the time in which it may wait for other ranks."""
    figures = counted(0.1, 0.1)
    assert figures.wait_fraction == pytest.approx(0.2 / 0.8)
    assert figures.own_s == pytest.approx(0.2)


def test_a_quarter_of_the_time_from_request_to_batch_is_the_way():
    """A quarter of the time from request to batch is transit; the rest is queueing and building."""
    assert BATCH.in_transit == pytest.approx(0.25)


def test_a_batch_of_a_second_loader_is_no_step():
    """A batch of a second loader is not a step, because a step may use a batch of each loader."""
    figures = RankFigures()
    for is_step in (True, False, True, False):
        figures.count(BATCH, is_step=is_step)
    assert (figures.num_steps, figures.num_batches, figures.num_bytes) == (2, 4, 400)


def test_nothing_counted_is_no_fraction():
    """The wait fraction is 0 before the first timed step."""
    assert RankFigures().wait_fraction == RankFigures(num_steps=1).wait_fraction == 0.0


def test_differences_start_again_with_a_new_process():
    """The counts of a restarted rank begin at zero, so all of them are new."""
    before, after = counted(1.0), counted(1.0, 0.5)
    assert (after.since(before).num_steps, after.since(before).num_timed) == (1, 1)
    assert after.since(before).wait_s == pytest.approx(0.5)
    assert before.since(after) == before
    assert before.since(None) == before


def test_figures_cross_the_network():
    """Figures cross the network rounded to a tenth of a millisecond."""
    assert received_from(counted(1.23456)).wait_s == 1.2346


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
    """Impossible figures are refused, because a message from the network may contain anything."""
    with pytest.raises(WireError, match="Heartbeat request is malformed"):
        parsed({**asdict(RankFigures()), **change})
    with pytest.raises(WireError, match="Heartbeat request is malformed"):
        parsed([change])
