"""Numbers for loggers, lines for people, and advice only where it helps."""

import pytest

from lightning_sm.data.trainer.metrics import LoaderStats, advice, host_line, since

MESSAGE = {"num_bytes": 2_000_000, "ready": 3, "queue_s": 0.5, "produce_s": 0.25}


def host(name="algo-2", **facts):
    """The feeder's state of a data host."""
    known = {
        "state": "up",
        "why": "",
        "workers": 4,
        "batches": 10,
        "retries": 1,
        "hedges": 2,
        "busy_s": 8.0,
        "up_s": 10.0,
    }
    return {"name": name, **known, **facts}


def stats(*waits, busy_s=0.3):
    """A pass whose batches were waited for so long."""
    counted = LoaderStats()
    for number, wait_s in enumerate(waits):
        counted.count(MESSAGE, wait_s, None if number == 0 else busy_s)
    return counted


def test_the_wait_for_the_first_batch_is_counted_apart():
    """Start-up does not make a training input-bound."""
    counted = stats(5.0, 0.1, 0.1)
    assert counted.first_wait_s == 5.0
    assert counted.input_bound == pytest.approx(0.2 / 0.8)


def test_nothing_counted_is_not_input_bound():
    """Before the second batch there is nothing to divide by."""
    assert LoaderStats().input_bound == stats(1.0).input_bound == 0.0
    assert LoaderStats().metrics({"hosts": []})["data/batches_per_s"] == 0.0
    assert "0 batches" in LoaderStats().line("epoch 0")


def test_metrics_are_per_batch_and_per_second():
    """Waits in ms per batch, rates per second, counts of all hosts."""
    metrics = stats(0.0, 0.1, 0.1).metrics({"hosts": [host(), host("algo-3", retries=4)]})
    assert metrics["data/wait_ms"] == pytest.approx(1e3 * 0.2 / 3)
    assert metrics["data/bytes_per_s"] == pytest.approx(6e6 / 0.8)
    assert (metrics["data/ready"], metrics["data/retries"], metrics["data/hedges"]) == (3.0, 5.0, 4.0)


def test_the_busy_part_is_of_the_time_since_the_last_report():
    """Workers' seconds over seconds times workers; a restarted host has none. Counts are since then, too."""
    before = {"algo-2": host(busy_s=4.0, up_s=5.0, batches=7), "algo-3": host("algo-3", busy_s=100.0, up_s=5.0)}
    first, second = since([host(), host("algo-3")], before)
    assert first["busy_fraction"] == pytest.approx(4.0 / (5.0 * 4))
    assert second["busy_fraction"] is None
    assert (first["batches"], first["retries"], first["hedges"]) == (3, 0, 0)


def test_a_line_tells_state_and_work():
    """A host that is gone says why."""
    line = host_line({**host(state="down", why="unavailable"), "busy_fraction": 0.5})
    assert line == (
        "data host algo-2: down (unavailable), workers: 4 (busy 50% of the time), batches for this rank: 10, "
        "retries: 1, hedges: 2"
    )


@pytest.mark.parametrize(
    ("input_bound", "busy", "expected"),
    [
        (0.01, 1.0, None),
        (0.5, 0.95, "2.0 times as many"),
        (0.5, 0.1, "check the network"),
        (0.5, None, "check the network"),
    ],
)
def test_advice_is_given_where_it_helps(input_bound, busy, expected):
    """More hosts only if their CPUs are the limit, and nothing if training does not wait."""
    text = advice(input_bound, [{**host(), "busy_fraction": busy}])
    assert text is None if expected is None else expected in text
