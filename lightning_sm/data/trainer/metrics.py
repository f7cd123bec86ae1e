"""Measurements of the data service: as metrics for loggers, and as events of data hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightning_sm.data.protocol.figures import HostFigures, RankFigures


def logger_metrics(figures: RankFigures, ready: int, hosts: Sequence[HostFigures]) -> dict[str, float]:
    """Return the values for Lightning's loggers.

    Args:
        figures: What this rank has measured since the last time.
        ready: Number of buffered batches when the last one was taken.
        hosts: What the data hosts have done since the start.
    """
    seconds = figures.seconds
    batches = max(1, figures.num_batches)
    return {
        "data/bytes_per_s": figures.num_bytes / seconds if seconds > 0 else 0.0,
        "data/ready": float(ready),
        "data/queue_ms": 1e3 * figures.queue_s / batches,
        "data/produce_ms": 1e3 * figures.produce_s / batches,
        "data/transfer_ms": 1e3 * figures.transfer_s / batches,
        "data/retries": float(sum(host.num_retries for host in hosts)),
        "data/hedges": float(sum(host.num_hedges for host in hosts)),
    }


def changes(before: Iterable[HostFigures], after: Iterable[HostFigures]) -> Iterator[tuple[str, str]]:
    """Yield events of data hosts between two moments for the run's record, each as its kind and a text.

    Args:
        before: The hosts at the first moment; empty before the first one.
        after: The hosts at the second.
    """
    known = {host.name: host.state for host in before}
    for host in after:
        was = known.get(host.name, "up")
        if host.state == "down" and was != "down":
            yield "host_lost", f"data host {host.name} is down{f': {host.why}' if host.why else ''}"
        if host.state == "up" and was == "down":
            yield "host_back", f"data host {host.name} is back"
