"""Tests of logger metrics, and of the changes between two reports of data hosts."""

import pytest

from lightning_sm.data.ipc.feeder_messages import HostSnapshot
from lightning_sm.data.trainer.reporter import changes, logger_metrics
from lightning_sm.record.data_figures import HostFigures, RankFigures


def host(name="algo-2", **values):
    """Return the feeder's snapshot of a data host."""
    known = {
        "workers": 4,
        "num_received": 10,
        "num_retries": 1,
        "num_hedges": 2,
        "num_lost": 1,
        "busy_s": 8.0,
        "capacity_s": 10.0,
        "num_built": 20,
        "built_s": 9.0,
        "transfer_s": 2.0,
    }
    return HostSnapshot(name, **{**known, **values})


def test_metrics_are_per_batch_and_per_second():
    """Metrics are times in ms per batch, rates per second, and counts over all hosts."""
    figures = RankFigures(num_batches=4, num_steps=4, num_bytes=8_000_000, wait_s=0.2, busy_s=0.6, transfer_s=0.1)
    metrics = logger_metrics(figures, 3, [host(), host("algo-3", num_retries=4)])
    assert metrics["data/transfer_ms"] == pytest.approx(25)
    assert metrics["data/bytes_per_s"] == pytest.approx(1e7)
    assert (metrics["data/ready"], metrics["data/retries"], metrics["data/hedges"]) == (3.0, 5.0, 4.0)
    assert logger_metrics(RankFigures(), 0, [])["data/bytes_per_s"] == 0.0


def test_a_host_counts_from_the_report_before():
    """A host's figures count from the previous report, or from zero if there is none."""
    before = host(
        busy_s=5.0, capacity_s=6.0, num_built=18, built_s=8.0, num_received=7, transfer_s=1.5, num_retries=0, num_lost=1
    )
    assert host().since(before) == HostFigures(
        "algo-2", "up", "", 4, 3.0, 4.0, 2, 1.0, num_received=3, transfer_s=0.5, num_retries=1, num_lost=0
    )
    assert host().since(None).num_built == 20


def test_a_restarted_host_counts_from_zero():
    """After a restart, a host's counters begin at zero, while the connection's counters continue."""
    figures = host().since(host(busy_s=100.0, capacity_s=110.0, num_built=300, built_s=120.0, num_received=4))
    assert (figures.busy_s, figures.capacity_s, figures.num_built, figures.num_received) == (8.0, 10.0, 20, 6)


@pytest.mark.parametrize(
    ("before", "after", "events"),
    [
        ([], [HostFigures("a")], []),
        ([HostFigures("a")], [HostFigures("a", "down", "silent")], [("host_lost", "data host a is down: silent")]),
        ([HostFigures("a", "down")], [HostFigures("a", "down")], []),
        ([HostFigures("a", "down")], [HostFigures("a")], [("host_back", "data host a is back")]),
    ],
    ids=["new", "lost", "still lost", "back"],
)
def test_what_happens_to_data_hosts_becomes_events(before, after, events):
    """Only changes since the last report become events."""
    assert list(changes(before, after)) == events
