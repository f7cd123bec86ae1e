"""Measurements of the data service on one rank, as metrics for loggers and as log lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Below this fraction of waiting, more data hosts would make no noticeable difference.
_NOTICEABLE_WAIT = 0.05
# Data hosts are the bottleneck if their workers are busy for at least this fraction of the time.
_BUSY = 0.8


@dataclass
class LoaderStats:
    """Measurements of a loader.

    Attributes:
        num_batches: Number of batches.
        num_bytes: Number of bytes.
        first_wait_s: Seconds that the training loop waited for the first batch.
        wait_s: Seconds that it waited for the other batches.
        busy_s: Seconds that it worked between batches.
        queue_s: Total seconds that requests waited for a worker.
        produce_s: Total seconds that workers spent on the batches.
        ready: Number of buffered batches when the last one was taken.
    """

    num_batches: int = 0
    num_bytes: int = 0
    first_wait_s: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    queue_s: float = 0.0
    produce_s: float = 0.0
    ready: int = 0

    def count(self, message: Mapping[str, Any], wait_s: float, busy_s: float | None) -> None:
        """Add a batch.

        Args:
            message: The feeder's message with the batch.
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
        """Return the values for Lightning's loggers.

        Args:
            state: ``FeederClient.state()``.
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
        """Return a log line that starts with ``what``."""
        seconds = self.first_wait_s + self.wait_s + self.busy_s
        rate = self.num_batches / seconds if seconds else 0.0
        batches = "1 batch" if self.num_batches == 1 else f"{self.num_batches} batches"
        return (
            f"{what}: {batches}, {rate:.1f}/s, {self.num_bytes / 1e6 / max(seconds, 1e-9):.1f} MB/s; "
            f"waited {self.wait_s:.2f} s of {seconds:.2f} s (input-bound {self.input_bound:.0%}), and "
            f"{self.first_wait_s:.2f} s for the first batch"
        )


def since(hosts: list[dict[str, Any]], before: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Count from an earlier report on, and add the fraction of the time since then that a host's workers were busy.

    Args:
        hosts: The data hosts' states from the feeder.
        before: Their states in the earlier report, by name.
    """
    reports = []
    for host in hosts:
        old = before.get(host["name"], {})
        seconds = ((host["up_s"] or 0.0) - (old.get("up_s") or 0.0)) * (host["workers"] or 0)
        busy_s = (host["busy_s"] or 0.0) - (old.get("busy_s") or 0.0)
        # A restarted host counts from zero.
        fraction = min(1.0, busy_s / seconds) if seconds > 0 and busy_s >= 0 else None
        counts = {name: host[name] - old.get(name, 0) for name in ("batches", "retries", "hedges")}
        reports.append({**host, **counts, "busy_fraction": fraction})
    return reports


def host_line(host: Mapping[str, Any]) -> str:
    """Return a log line about a data host."""
    busy = host.get("busy_fraction")
    parts = [host["state"] + (f" ({host['why']})" if host["why"] else "")]
    if host["workers"]:
        parts.append(f"workers: {host['workers']}" + (f" (busy {busy:.0%} of the time)" if busy is not None else ""))
    parts.append(f"batches for this rank: {host['batches']}, retries: {host['retries']}, hedges: {host['hedges']}")
    return f"data host {host['name']}: {', '.join(parts)}"


def advice(input_bound: float, hosts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how to make training wait less for data; None if it does not wait noticeably.

    Args:
        input_bound: Fraction of the time that the training loop waited.
        hosts: The data hosts' states from ``since``.
    """
    if input_bound < _NOTICEABLE_WAIT:
        return None
    busy = [host["busy_fraction"] for host in hosts if host.get("busy_fraction") is not None]
    if busy and sum(busy) / len(busy) >= _BUSY:
        factor = 1 / (1 - min(input_bound, 0.99))
        return (
            f"Training waits {input_bound:.0%} of the time for the data hosts' CPUs: {factor:.1f} times as many would "
            "remove the wait."
        )
    return (
        f"Training waits {input_bound:.0%} of the time for data, but the data hosts' workers are not always busy: "
        "check the network and the size of the batches, or raise data_service.window_batches and window_bytes."
    )
