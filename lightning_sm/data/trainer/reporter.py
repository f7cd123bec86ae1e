"""The reports of the data service: metrics to the Trainer's loggers, and a verdict at the end of an epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.data.ipc.feeder_messages import FeederSnapshot
from lightning_sm.data.protocol.figures import BatchFigures, HostFigures, RankFigures
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.metrics import logger_metrics, wait_metrics
from lightning_sm.data.trainer.verdict import slowest, trouble, verdict
from lightning_sm.errors import DataServiceError
from lightning_sm.record import step_clock
from lightning_sm.record.progress import progress_line, rate_fields
from lightning_sm.record.totals import Totals

logger = logging.getLogger(__name__)

# A rank shares its figures at most this often; the next heartbeat carries them.
_SHARE_PERIOD_S = 0.25


@dataclass
class _Epoch:
    """The figures at the first batch of an epoch and, from its last batch on, those of the data hosts."""

    number: int
    before: RankFigures
    hosts_before: Sequence[HostFigures] = ()
    hosts: Sequence[HostFigures] = ()
    is_reported: bool = False


@dataclass(frozen=True)
class EpochReport:
    """The data service's report on an epoch.

    Attributes:
        data_wait: The share of the time that the slowest rank waited for data, 0 to 1.
        verdict: What held up training, and what would help; None if nothing did.
    """

    data_wait: float
    verdict: str | None


@dataclass
class _Sums:
    """The figures of data hosts and ranks since the start of their processes."""

    hosts: Sequence[HostFigures]
    ranks: dict[str, RankFigures]

    def since(self, before: Mapping[str, RankFigures]) -> dict[str, RankFigures]:
        """Return what each rank measured since an earlier moment; none that had no batch."""
        added = {name: figures.since(before.get(name)) for name, figures in self.ranks.items()}
        return {name: figures for name, figures in added.items() if figures.num_steps}


def _since(before: Iterable[HostFigures], after: Iterable[HostFigures]) -> list[HostFigures]:
    known = {host.name: host for host in before}
    return [host.since(known.get(host.name)) for host in after]


class Reporter(UnlistedCallback):
    """The callback that counts the batches of a rank's training loaders, and reports on all ranks on rank 0.

    Times of steps are those of the rank's one clock, to which it adds why batches were waited for. ``StepTimes`` has
    that clock; a Trainer without it gets a simpler one, which knows waits, backward passes and the rest.

    Figures of other ranks and of data hosts arrive with heartbeats, about a second later. They are sums since the
    start of the process, and a report takes what was added since the last one: late figures are in the next report.

    Args:
        feeder: Returns the client of this rank's feeder.
    """

    def __init__(self, feeder: Callable[[], FeederClient]) -> None:
        self._feeder = feeder
        self._counted = RankFigures()  # batches since the process started, and the steps of earlier clocks
        self._clock: step_clock.StepClock | None = None
        self._totals: Callable[[], Totals] = Totals  # of this clock
        self._own_clock: step_clock.StepClock | None = None  # the same, if this callback drives it
        self._shared_at = 0.0
        self._logged = RankFigures()
        self._epoch: _Epoch | None = None
        self._reported: dict[str, RankFigures] = {}  # by rank, at the last report, or when the run began
        # The newest figures that data hosts had of each rank. Data hosts drop those of a rank that has finished.
        self._by_rank: dict[str, RankFigures] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: strategies that spawn pickle the Trainer."""
        own = {"_feeder": None, "_epoch": None, "_clock": None, "_own_clock": None, "_totals": Totals}
        return {**vars(self), **own}

    def begin_run(self) -> None:
        """Leave what the ranks have measured in earlier runs of the Trainer out of the next report."""
        self._take_times()
        self._epoch = None
        self._reported.clear()

    def follow(self, clock: step_clock.StepClock, totals: Callable[[], Totals] | None = None) -> None:
        """Take the times of steps from a clock from now on.

        Args:
            clock: The clock.
            totals: Returns what it has measured; None: this callback drives the clock.
        """
        self._take_times()
        self._clock = clock
        self._totals = totals or (lambda: clock.totals)
        self._own_clock = clock if totals is None else None

    def _take_times(self) -> None:
        """Keep what the clock has measured, which starts again from zero."""
        self._counted = self._figures()
        self._clock, self._own_clock, self._totals = None, None, Totals

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start a clock, in case that nobody else has one."""
        self.follow(step_clock.StepClock())

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Charge the first batch of an epoch to a span: it cannot be fetched ahead."""
        if self._own_clock is not None:
            while self._own_clock.span:
                self._own_clock.end_span(self._own_clock.span)
        self._begin_span("first_batch")

    def begin_wait(self) -> None:
        """Charge time to the wait for a batch."""
        self._enter(step_clock.DATA_WAIT)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Charge time to the backward pass, where ranks wait for each other."""
        self._enter(step_clock.BACKWARD)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step."""
        if self._own_clock is not None:
            self._own_clock.end_step(0)
        if trainer.is_last_batch:  # what follows is not part of the next epoch's first step
            self._begin_span("between")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Charge time to the validation."""
        self._begin_span("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Charge time to steps again."""
        if self._own_clock is not None:
            self._own_clock.end_span("validation")

    def _enter(self, part: int) -> None:
        if self._own_clock is not None:
            self._own_clock.enter(part)

    def _begin_span(self, name: str) -> None:
        if self._own_clock is not None:
            self._own_clock.begin_span(name)

    def batch(self, trainer: Any, figures: BatchFigures, *, is_step: bool) -> None:
        """Count a batch, share the figures with rank 0 from time to time, and log metrics if they are due.

        Args:
            trainer: The Trainer.
            figures: What the batch took.
            is_step: Whether it is a batch of the first training loader.
        """
        if self._epoch is None:
            self._epoch = self._begin(trainer)
        epoch = self._epoch
        if self._clock is not None:
            self._clock.note_wait(figures.in_transit)
        if self._own_clock is not None:
            self._own_clock.end_span("first_batch")
            self._own_clock.enter(step_clock.FORWARD)
        self._counted.count(figures, is_step=is_step)
        if not is_step:
            return
        # Not "ready", which already counts the next batch when training_step fetches it from a dataloader_iter.
        num_done = int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)
        is_last = num_done + 1 >= trainer.num_training_batches
        now = time.monotonic()
        if is_last or now >= self._shared_at + _SHARE_PERIOD_S:
            self._shared_at = now
            self._feeder().share(self._figures().rounded())
        num_steps = self._counted.num_steps - epoch.before.num_steps
        is_due = trainer.loggers and (is_last or num_steps % trainer.log_every_n_steps == 0)
        if not is_due and not (is_last and trainer.is_global_zero):
            return
        snapshot = self._snapshot_or_none()
        if snapshot is None:
            return
        if is_last:
            epoch.hosts = snapshot.hosts
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        measured = self._figures()
        new, self._logged = measured.since(self._logged), measured
        values = logger_metrics(new, figures.num_ready, snapshot)
        values |= wait_metrics(new) if self._own_clock is not None else {}  # else the metrics of StepTimes say it
        for log in trainer.loggers:
            log.log_metrics(values, step=step)

    def end_epoch(self, trainer: Any) -> None:
        """Log the report of the epoch on rank 0, if no progress line has it.

        Args:
            trainer: The Trainer; None if there is none, and so no epoch.
        """
        epoch = self._epoch
        if epoch is None:
            return
        report = self.report() if trainer.is_global_zero else None
        self._epoch = None
        if report is not None:
            planned = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else "?"
            position, waited = f"epoch={epoch.number + 1}/{planned}", rate_fields(data_wait=report.data_wait)
            logger.info("%s", progress_line(position, {}, rates=waited, verdict=report.verdict))

    def report(self) -> EpochReport | None:
        """Return the report on the epoch, once, and log the trouble that data hosts had.

        Returns:
            None if the epoch had no batches, or has been reported.
        """
        epoch = self._epoch
        if epoch is None or epoch.is_reported:
            return None
        epoch.is_reported = True
        now = self._sums()
        if now is None:
            return None
        ranks = now.since(self._reported)
        self._reported = now.ranks
        if not ranks:
            return None
        hosts = _since(epoch.hosts_before, epoch.hosts or now.hosts)
        for sentence in trouble(hosts):
            logger.warning("%s", sentence)
        _, rank = slowest(ranks)
        return EpochReport(rank.wait_fraction, verdict(ranks, hosts))

    def sums(self) -> tuple[list[HostFigures], dict[str, dict[str, float]]] | None:
        """Return what data hosts and ranks did since the start, for the record of the run; None if that is not known.

        Returns:
            The data hosts, and the fields of ``RankFigures`` by name of the rank.
        """
        now = self._sums()
        if now is None:
            return None
        return _since((), now.hosts), {name: asdict(figures.rounded()) for name, figures in now.ranks.items()}

    def _figures(self) -> RankFigures:
        """Return what this rank has counted and timed since the start of the process."""
        totals = self._totals()
        wait_s = totals.parts["data_wait"]
        timed = RankFigures(
            num_timed=totals.num_steps,
            first_wait_s=totals.spans.get("first_batch", 0.0),
            wait_s=wait_s,
            transfer_wait_s=totals.in_transit_s,
            busy_s=totals.wall_s - wait_s,
            sync_s=totals.parts["backward"] + totals.parts["optimizer"],
        )
        return self._counted.plus(timed)

    def _sums(self) -> _Sums | None:
        snapshot = self._snapshot_or_none()
        if snapshot is None:
            return None
        return _Sums(snapshot.hosts, {**self._by_rank, self._feeder().name: self._figures()})

    def _begin(self, trainer: Any) -> _Epoch:
        """Take the figures at the first batch of an epoch."""
        snapshot = self._snapshot_or_none() if trainer.is_global_zero else None
        number = trainer.fit_loop.epoch_progress.current.processed
        epoch = _Epoch(number, self._figures())
        if snapshot is not None:
            epoch.hosts_before = snapshot.hosts
            self._reported = {**self._by_rank, **self._reported}
        self._reported.setdefault(self._feeder().name, epoch.before)
        return epoch

    def _snapshot_or_none(self) -> FeederSnapshot | None:
        """Return the snapshot; None if the feeder does not answer: statistics must not end a training."""
        try:
            snapshot = self._feeder().snapshot()
        except DataServiceError as error:
            logger.warning("There are no statistics of the data service: %s", error)
            return None
        self._by_rank |= snapshot.ranks
        return snapshot


def data_report(trainer: Any) -> EpochReport | None:
    """Return the data service's report on the epoch that ends, on rank 0; None without data hosts.

    Args:
        trainer: The Trainer.
    """
    reports = [callback.report() for callback in trainer.callbacks if isinstance(callback, Reporter)]
    return next((report for report in reports if report is not None), None)
