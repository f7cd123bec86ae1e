"""Reports on the data service: metrics for the Trainer's loggers, lines for the record, and a verdict per epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic  # bound here, because tests of scripts may replace time.monotonic
from typing import Any

from msgspec.structs import asdict

from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.errors import DataServiceError
from lightning_sm.record.data_figures import BatchFigures, HostFigures, RankFigures
from lightning_sm.record.events import DataService, Event
from lightning_sm.record.waiting_reasons import trouble, verdict
from lightning_sm.timing.step_times import StepTimes

logger = logging.getLogger(__name__)

# Minimum interval at which a rank shares its figures, which the next heartbeat carries.
_SHARE_PERIOD_S = 0.25
# Minimum interval between lines in the record.
_LINE_S = 5.0


@dataclass(frozen=True)
class _Sums:
    """The figures of data hosts and ranks since their processes started."""

    hosts: Sequence[HostFigures] = ()
    ranks: Mapping[str, RankFigures] = field(default_factory=dict)


class Reporter:
    """A counter for the batches from a rank's training loaders; on rank 0, it also reports on all ranks.

    Step times come from the rank's only clock, ``StepTimes``; the reporter tells it what share of each wait was
    transfer.

    Figures of other ranks and of data hosts arrive with heartbeats, about a second late. They are sums since those
    processes started. Each report covers what was added since the last one, so late figures appear in the next.

    Args:
        feeder: Returns the client of this rank's feeder.
    """

    def __init__(self, feeder: Callable[[], FeederClient]) -> None:
        self._feeder = feeder
        self._counted = RankFigures()  # batches since the process started, and step times of earlier runs
        self._logged = RankFigures()
        self._times: StepTimes | None = None
        self._shared_at = 0.0
        self._next_line_at = 0.0
        self._reported: _Sums | None = None  # at the last report, or at the first batch of the run
        self._written: Sequence[HostFigures] = ()
        # Each rank's latest figures, kept here because data hosts drop the figures of finished ranks.
        self._by_rank: dict[str, RankFigures] = {}

    def begin_run(self) -> None:
        """Prepare for a Trainer's run, which restarts the clock; totals are kept, but left out of the run's reports."""
        self._counted = self._figures()
        self._times = None
        self._reported = None

    def follow(self, times: StepTimes) -> None:
        """Use a step clock from now on; called when training starts."""
        self._times = times

    def batch(self, trainer: Any, figures: BatchFigures, *, is_step: bool) -> None:
        """Count a batch and, when due, share figures with rank 0, log metrics and write to the record.

        Args:
            trainer: The Trainer.
            figures: Figures of the batch.
            is_step: Whether the batch is from the first training loader.
        """
        if self._times is not None:
            self._times.note_wait(figures.in_transit)
        self._counted.count(figures, is_step=is_step)
        if not is_step:
            return
        now = monotonic()
        if now >= self._shared_at + _SHARE_PERIOD_S:
            self._shared_at = now
            self._feeder().share(self._figures().rounded())
        if not trainer.is_global_zero:
            return
        if self._reported is None:
            self._reported = self._sums() or _Sums()
        every = trainer.log_every_n_steps
        if trainer.loggers and every and self._counted.num_steps % every == 0:
            self._log(trainer, figures.num_ready)
        if now >= self._next_line_at:
            self._next_line_at = now + _LINE_S
            self._write(self._sums())

    def end_epoch(self, trainer: Any) -> None:
        """Log on rank 0 what held up the epoch, if anything, and the data hosts' problems.

        Args:
            trainer: The Trainer.
        """
        before, now = self._reported, self._sums() if self._reported is not None else None
        if before is None or now is None:
            return
        self._reported = now
        self._write(now)
        hosts = _since(before.hosts, now.hosts)
        for sentence in trouble(hosts):
            logger.warning("%s", sentence)
        added = {name: figures.since(before.ranks.get(name)) for name, figures in now.ranks.items()}
        ranks = {name: figures for name, figures in added.items() if figures.num_steps}
        held_up = verdict(ranks, hosts)
        if held_up:
            logger.info("Epoch %d: %s", trainer.current_epoch + 1, held_up)

    def _figures(self) -> RankFigures:
        """Return this rank's figures since its process started."""
        if self._times is None:
            return self._counted
        totals = self._times.totals
        wait_s = totals.parts["data_wait"]
        timed = RankFigures(
            num_timed=totals.num_steps,
            wait_s=wait_s,
            transfer_wait_s=totals.in_transit_s,
            busy_s=totals.wall_s - wait_s,
            sync_s=totals.parts["backward"] + totals.parts["optimizer"],
        )
        return self._counted.plus(timed)

    def _log(self, trainer: Any, num_ready: int) -> None:
        sums, measured = self._sums(), self._figures()
        if sums is None:
            return
        values = logger_metrics(measured.since(self._logged), num_ready, sums.hosts)
        self._logged = measured
        for log in trainer.loggers:
            log.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _write(self, sums: _Sums | None) -> None:
        """Write a line to the run's record, and the data hosts' events since the last line."""
        if sums is None or self._times is None:
            return
        ranks = {name: asdict(figures.rounded()) for name, figures in sums.ranks.items()}
        self._times.write(DataService(time.time(), [asdict(host) for host in sums.hosts], ranks))
        for what, text in changes(self._written, sums.hosts):
            self._times.write(Event(time.time(), what, text))
        self._written = sums.hosts

    def _sums(self) -> _Sums | None:
        """Return the sums, or None if the feeder does not answer: missing statistics must not end the training."""
        try:
            snapshot = self._feeder().snapshot()
        except DataServiceError as error:
            logger.warning("Statistics of the data service are unavailable: %s", error)
            return None
        self._by_rank |= snapshot.ranks
        return _Sums(_since((), snapshot.hosts), {**self._by_rank, self._feeder().name: self._figures()})


def _since(before: Sequence[HostFigures], after: Sequence[HostFigures]) -> list[HostFigures]:
    known = {host.name: host for host in before}
    return [host.since(known.get(host.name)) for host in after]


def logger_metrics(figures: RankFigures, ready: int, hosts: Sequence[HostFigures]) -> dict[str, float]:
    """Return the values for Lightning's loggers.

    Args:
        figures: This rank's figures since the last call.
        ready: Number of batches that were buffered when the last one was taken.
        hosts: The data hosts' figures since the start.
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
    """Yield the data hosts' events between two moments, as pairs of kind and text for the run's record.

    Args:
        before: The hosts at the first moment; empty at the start of the run.
        after: The hosts at the second moment.
    """
    known = {host.name: host.state for host in before}
    for host in after:
        was = known.get(host.name, "up")
        if host.state == "down" and was != "down":
            yield "host_lost", f"data host {host.name} is down{f': {host.why}' if host.why else ''}"
        if host.state == "up" and was == "down":
            yield "host_back", f"data host {host.name} is back"
