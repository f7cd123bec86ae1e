"""Measurements of the data service: as metrics for loggers, and what data hosts did in an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_sm.data.protocol.figures import RankFigures


def logger_metrics(figures: RankFigures, ready: int, state: Mapping[str, Any]) -> dict[str, float]:
    """Return the values for Lightning's loggers.

    Args:
        figures: What this rank has measured in the epoch.
        ready: Number of buffered batches when the last one was taken.
        state: ``FeederClient.state()``.
    """
    seconds = figures.seconds
    batches = max(1, figures.num_batches)
    return {
        "data/wait_ms": 1e3 * figures.wait_s / batches,
        "data/input_bound": figures.wait_fraction,
        "data/batches_per_s": figures.num_batches / seconds if seconds > 0 else 0.0,
        "data/bytes_per_s": figures.num_bytes / seconds if seconds > 0 else 0.0,
        "data/ready": float(ready),
        "data/queue_ms": 1e3 * figures.queue_s / batches,
        "data/produce_ms": 1e3 * figures.produce_s / batches,
        "data/transfer_ms": 1e3 * figures.transfer_s / batches,
        "data/retries": float(sum(host["retries"] for host in state["hosts"])),
        "data/hedges": float(sum(host["hedges"] for host in state["hosts"])),
    }


@dataclass(frozen=True)
class HostFigures:
    """What a data host did in an epoch.

    Attributes:
        name: Its name, with its address.
        state: "up", "suspect" or "down", at the end.
        why: Why it is not up.
        workers: Its number of workers.
        busy_s: Seconds that its workers worked while trainers had more to request, of all workers together.
        capacity_s: Seconds that they could have worked in this time.
        num_built: Number of batches that they built, for all ranks.
        built_s: Seconds that these took.
        num_received: Number of batches that this rank got from it.
        transfer_s: Seconds that these were on their way.
        num_retries: Number of this rank's requests that had to be sent again, to this host or to another.
        num_lost: How often this rank lost the connection.
        num_hedges: Number of this rank's requests that it sent to a second host, too, because this one was late.
    """

    name: str
    state: str = "up"
    why: str = ""
    workers: int = 0
    busy_s: float = 0.0
    capacity_s: float = 0.0
    num_built: int = 0
    built_s: float = 0.0
    num_received: int = 0
    transfer_s: float = 0.0
    num_retries: int = 0
    num_lost: int = 0
    num_hedges: int = 0

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> HostFigures:
        """Take the difference of two reports of the feeder; a restarted host counts from zero.

        Args:
            before: The host in the first; empty if it was not there.
            after: The host in the second.
        """

        def added(*names: str) -> list[Any]:
            changes = [after[name] - before.get(name, 0) for name in names]
            return [after[name] for name in names] if any(change < 0 for change in changes) else changes

        busy_s, capacity_s, num_built, built_s = added("busy_s", "capacity_s", "built", "built_s")
        num_received, transfer_s, num_retries = added("batches", "transfer_s", "retries")
        num_lost, num_hedges = added("lost", "hedges")
        return cls(
            name=after["name"],
            state=after["state"],
            why=after["why"],
            workers=after["workers"] or 0,
            busy_s=busy_s,
            capacity_s=capacity_s,
            num_built=num_built,
            built_s=built_s,
            num_received=num_received,
            transfer_s=transfer_s,
            num_retries=num_retries,
            num_lost=num_lost,
            num_hedges=num_hedges,
        )


def changes(before: Iterable[HostFigures], after: Iterable[HostFigures]) -> Iterator[tuple[str, str]]:
    """Yield what happened to data hosts between two moments, as events of the run's record: what, and it in words.

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
            ("retry", "repeated", host.num_retries - last.num_retries),
            ("hedge", "sent to a second host, too", host.num_hedges - last.num_hedges),
        ):
            if number > 0:
                requests = "1 request" if number == 1 else f"{number} requests"
                yield what, f"{requests} to data host {host.name} {words}"
