"""The reports of the data service: metrics to the Trainer's loggers, and a verdict at the end of an epoch."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sm._lightning import Callback
from lightning_sm.data.ipc.feeder_messages import FeederSnapshot
from lightning_sm.data.protocol.figures import BatchFigures, HostFigures, RankFigures
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.metrics import logger_metrics
from lightning_sm.data.trainer.position import batches_taken
from lightning_sm.data.trainer.verdict import slowest, trouble, verdict
from lightning_sm.errors import DataServiceError
from lightning_sm.record.progress import progress_line, rate_fields

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


def _add(one: RankFigures, other: RankFigures) -> RankFigures:
    return RankFigures(**{name: value + getattr(other, name) for name, value in vars(one).items()})


def _since(before: Iterable[HostFigures], after: Iterable[HostFigures]) -> list[HostFigures]:
    known = {host.name: host for host in before}
    return [host.since(known.get(host.name)) for host in after]


class Reporter(Callback):
    """The callback that measures the training loaders of a rank, and reports those of all ranks on rank 0.

    Figures of other ranks and of data hosts arrive with heartbeats, about a second later. They are sums since the
    start of the process, and a report takes what was added since the last one: late figures are in the next report.

    Args:
        feeder: Returns the client of this rank's feeder.
    """

    def __init__(self, feeder: Callable[[], FeederClient]) -> None:
        self._feeder = feeder
        self._figures = RankFigures()
        self._shared_at = 0.0
        # From the first backward pass of a step to its end: time in which other ranks may make this one wait.
        self._sync_began: float | None = None
        self._sync_s = 0.0
        self._epoch: _Epoch | None = None
        self._reported: dict[str, RankFigures] = {}  # by rank, at the last report, or when the run began
        self._at_run_start: _Sums | None = None  # when the run began
        # The newest figures that data hosts had of each rank. Data hosts drop those of a rank that has finished.
        self._by_rank: dict[str, RankFigures] = {}
        self._waiting = RankFigures()  # what the slowest rank of each reported epoch of the run measured

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: strategies that spawn pickle the Trainer."""
        return {**vars(self), "_feeder": None, "_epoch": None}

    def begin_run(self) -> None:
        """Leave what the ranks have measured in earlier runs of the Trainer out of the next report."""
        self._epoch = None
        self._reported.clear()
        self._at_run_start = None
        self._waiting = RankFigures()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Note where ranks begin to wait for each other."""
        if self._sync_began is None:
            self._sync_began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note where ranks stop waiting for each other."""
        if self._sync_began is not None:
            self._sync_s += time.perf_counter() - self._sync_began
            self._sync_began = None

    def batch(self, trainer: Any, figures: BatchFigures, wait_s: float, busy_s: float | None, *, is_step: bool) -> None:
        """Count a batch, share the figures with rank 0 from time to time, and log metrics if they are due.

        Args:
            trainer: The Trainer.
            figures: What the batch took.
            wait_s: Seconds that the training loop waited for it.
            busy_s: Seconds since the batch before; None for the first batch of a pass.
            is_step: Whether it is a batch of the first training loader.
        """
        if self._epoch is None:
            self._epoch = self._begin(trainer)
        epoch = self._epoch
        self._figures.count(figures, wait_s, busy_s, self._sync_s, is_step=is_step)
        if not is_step:
            return
        self._sync_s = 0.0
        is_last = batches_taken(trainer) + 1 >= trainer.num_training_batches
        now = time.monotonic()
        if is_last or now >= self._shared_at + _SHARE_PERIOD_S:
            self._shared_at = now
            self._feeder().share(self._figures.rounded())
        own = self._figures.since(epoch.before)
        is_due = trainer.loggers and (is_last or own.num_steps % trainer.log_every_n_steps == 0)
        if not is_due and not (is_last and trainer.is_global_zero):
            return
        snapshot = self._snapshot_or_none()
        if snapshot is None:
            return
        if is_last:
            epoch.hosts = snapshot.hosts
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for log in trainer.loggers:
            log.log_metrics(logger_metrics(own, figures.num_ready, snapshot), step=step)

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
        self._waiting = _add(self._waiting, rank)
        return EpochReport(rank.wait_fraction, verdict(ranks, hosts))

    def sums(self) -> tuple[list[HostFigures], dict[str, dict[str, float]]] | None:
        """Return what data hosts and ranks did since the start, for the record of the run; None if that is not known.

        Returns:
            The data hosts, and the fields of ``RankFigures`` by name of the rank.
        """
        now = self._sums()
        if now is None:
            return None
        return _since((), now.hosts), {name: vars(figures.rounded()) for name, figures in now.ranks.items()}

    def run_verdict(self) -> str | None:
        """Return what held up training in the whole run, and what would help; None if nothing did."""
        now = None if self._at_run_start is None else self._sums()
        if now is None or self._at_run_start is None:
            return None
        ranks = now.since(self._at_run_start.ranks)
        if not ranks:
            return None
        rest = now.since(self._reported)  # that of an epoch without a report, because it was interrupted
        waiting = _add(self._waiting, slowest(rest)[1]) if rest else self._waiting
        return verdict(ranks, _since(self._at_run_start.hosts, now.hosts), waiting)

    def _sums(self) -> _Sums | None:
        snapshot = self._snapshot_or_none()
        if snapshot is None:
            return None
        return _Sums(snapshot.hosts, {**self._by_rank, self._feeder().name: copy.copy(self._figures)})

    def _begin(self, trainer: Any) -> _Epoch:
        """Take the figures at the first batch of an epoch."""
        snapshot = self._snapshot_or_none() if trainer.is_global_zero else None
        number = trainer.fit_loop.epoch_progress.current.processed
        epoch = _Epoch(number, copy.copy(self._figures))
        if snapshot is not None:
            epoch.hosts_before = snapshot.hosts
            self._reported = {**self._by_rank, **self._reported}
        self._reported.setdefault(self._feeder().name, epoch.before)
        if self._at_run_start is None:
            self._at_run_start = _Sums(epoch.hosts_before, dict(self._reported))
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
