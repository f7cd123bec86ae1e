"""What the data service measured on one rank, as metrics for loggers and as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Below this fraction of waiting, more data hosts would not be noticed.
_NOTICEABLE_WAIT = 0.05
# Data hosts whose workers are busy for more than this fraction of the time are the limit.
_BUSY = 0.8
_MB = 1e6


class LoaderStats:
    """What a loader measured since the last reset.

    Attributes:
        num_batches: Batches taken.
        num_bytes: Bytes taken.
        first_wait_s: Seconds that the training loop waited for the first batch.
        wait_s: Seconds that it waited for the others.
        busy_s: Seconds between batches, in which the training loop worked.
        queue_s: Seconds that requests waited for a worker, in all.
        produce_s: Seconds that workers took, in all.
        ready: Batches that were waiting when the last one was taken.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.num_batches = self.num_bytes = self.ready = 0
        self.first_wait_s = self.wait_s = self.busy_s = self.queue_s = self.produce_s = 0.0

    def count(self, message: Mapping[str, Any], wait_s: float, busy_s: float | None) -> None:
        """Take in a batch.

        Args:
            message: What the feeder said of it.
            wait_s: Seconds that the training loop waited for it.
            busy_s: Seconds that the training loop worked before; None for the first batch of a pass.
        """
        self.num_batches += 1
        self.num_bytes += message["num_bytes"]
        self.ready = message["ready"]
        self.queue_s += message["queue_s"]
        self.produce_s += message["produce_s"]
        if busy_s is None:
            self.first_wait_s += wait_s
        else:
            self.wait_s += wait_s
            self.busy_s += busy_s

    @property
    def input_bound(self) -> float:
        """Fraction of the time that the training loop waited for batches; 0 before the second batch."""
        return self.wait_s / (self.wait_s + self.busy_s) if self.busy_s else 0.0

    def metrics(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers for Lightning's loggers.

        Args:
            state: What the feeder knows of hosts and passes.
        """
        seconds = self.wait_s + self.busy_s
        steps = max(1, self.num_batches)
        return {
            "data/wait_ms": 1e3 * self.wait_s / steps,
            "data/input_bound": self.input_bound,
            "data/batches_per_s": self.num_batches / seconds if seconds else 0.0,
            "data/bytes_per_s": self.num_bytes / seconds if seconds else 0.0,
            "data/ready": float(self.ready),
            "data/produce_ms": 1e3 * self.produce_s / steps,
            "data/queue_ms": 1e3 * self.queue_s / steps,
            "data/retries": float(sum(host["retries"] for host in state["hosts"])),
            "data/hedges": float(sum(host["hedges"] for host in state["hosts"])),
        }

    def line(self, what: str) -> str:
        """Return one line for people.

        Args:
            what: What the numbers are about.
        """
        seconds = self.first_wait_s + self.wait_s + self.busy_s
        rate = self.num_batches / seconds if seconds else 0.0
        return (
            f"{what}: {self.num_batches} batches, {rate:.1f}/s, {self.num_bytes / _MB / max(seconds, 1e-9):.1f} MB/s; "
            f"waited {self.wait_s:.2f} s of {seconds:.2f} s (input-bound {self.input_bound:.0%}), "
            f"{self.first_wait_s:.2f} s for the first"
        )


def with_busy_fraction(hosts: list[dict[str, Any]], before: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add which part of the time since an earlier report the workers of each data host were busy.

    Args:
        hosts: What the feeder knows of the data hosts.
        before: What it knew then, by name.
    """
    reports = []
    for host in hosts:
        old = before.get(host["name"], {})
        seconds = ((host["up_s"] or 0.0) - (old.get("up_s") or 0.0)) * (host["workers"] or 0)
        busy_s = (host["busy_s"] or 0.0) - (old.get("busy_s") or 0.0)
        # A host that was started again counts from zero.
        fraction = min(1.0, busy_s / seconds) if seconds > 0 and busy_s >= 0 else None
        reports.append({**host, "busy_fraction": fraction})
    return reports


def host_line(host: Mapping[str, Any]) -> str:
    """Return one line about a data host.

    Args:
        host: What the feeder knows of it.
    """
    busy = host.get("busy_fraction")
    parts = [host["state"] + (f" ({host['why']})" if host["why"] else "")]
    if host["workers"]:
        parts.append(f"{host['workers']} workers" + (f" busy {busy:.0%} of the time" if busy is not None else ""))
    parts.append(f"{host['batches']} batches to this rank, {host['retries']} retries, {host['hedges']} hedges")
    return f"data host {host['name']}: {', '.join(parts)}"


def verdict(input_bound: float, hosts: Sequence[Mapping[str, Any]]) -> str | None:
    """Tell what would help, if anything would.

    Args:
        input_bound: Fraction of the time that the training loop waited.
        hosts: What the feeder knows of the data hosts.
    """
    if input_bound < _NOTICEABLE_WAIT:
        return None
    busy = [host["busy_fraction"] for host in hosts if host.get("busy_fraction") is not None]
    if busy and sum(busy) / len(busy) >= _BUSY:
        factor = 1 / (1 - min(input_bound, 0.99))
        return (
            f"The training waits {input_bound:.0%} of its time for the data hosts' CPUs: {factor:.1f} times as many "
            "would remove the wait."
        )
    return (
        f"The training waits {input_bound:.0%} of its time for data, but the data hosts' workers are not busy all the "
        "time: look at the network, at the size of the batches, or widen data_service.window_batches and window_bytes."
    )
