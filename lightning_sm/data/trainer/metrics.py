"""Measurements of the data service: as metrics for loggers, and as events of data hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_sm._text import count
from lightning_sm.data.ipc.feeder_messages import FeederSnapshot
from lightning_sm.data.protocol.figures import HostFigures, RankFigures


def logger_metrics(figures: RankFigures, ready: int, snapshot: FeederSnapshot) -> dict[str, float]:
    """Return the values for Lightning's loggers.

    Args:
        figures: What this rank has measured since the last time.
        ready: Number of buffered batches when the last one was taken.
        snapshot: ``FeederClient.snapshot()``.
    """
    seconds = figures.seconds
    batches = max(1, figures.num_batches)
    return {
        "data/bytes_per_s": figures.num_bytes / seconds if seconds > 0 else 0.0,
        "data/ready": float(ready),
        "data/queue_ms": 1e3 * figures.queue_s / batches,
        "data/produce_ms": 1e3 * figures.produce_s / batches,
        "data/transfer_ms": 1e3 * figures.transfer_s / batches,
        "data/retries": float(sum(host.num_retries for host in snapshot.hosts)),
        "data/hedges": float(sum(host.num_hedges for host in snapshot.hosts)),
    }


def wait_metrics(figures: RankFigures) -> dict[str, float]:
    """Return what ``StepTimes`` logs as ``time/...``, for loggers of a Trainer without it.

    Args:
        figures: What this rank has measured since the last time.
    """
    steps = max(1, figures.num_timed)
    return {
        "data/wait_ms": 1e3 * figures.wait_s / steps,
        "data/step_ms": 1e3 * figures.seconds / steps,
        "data/input_bound": figures.wait_fraction,
    }


def changes(before: Iterable[HostFigures], after: Iterable[HostFigures]) -> Iterator[tuple[str, str]]:
    """Yield events of data hosts between two moments for the run's record, each as its kind and a text.

    Args:
        before: The hosts at the first moment, with sums since the start; empty before the first one.
        after: The hosts at the second.
    """
    known = {host.name: host for host in before}
    for host in after:
        last = known.get(host.name, HostFigures(host.name))
        if host.state == "down" and last.state != "down":
            yield "host_lost", f"data host {host.name} is down{f': {host.why}' if host.why else ''}"
        if host.state == "up" and last.state == "down":
            yield "host_back", f"data host {host.name} is back"
        for what, words, number in (
            ("retry", "sent again", host.num_retries - last.num_retries),
            ("slow_request", "also sent to another host", host.num_hedges - last.num_hedges),
        ):
            if number > 0:
                were = "was" if number == 1 else "were"
                yield what, f"{count(number, 'request')} to {host.name} {were} {words}"
