"""Reports measurements of the data service: metrics to the Trainer's loggers, and log lines after each epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.metrics import LoaderStats, advice, host_line, since
from lightning_sm.data.trainer.position import batches_taken
from lightning_sm.errors import DataServiceError

logger = logging.getLogger(__name__)


class Reporter:
    """Reports on the first training loader.

    Args:
        state: ``FeederClient.state``.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state
        self._hosts: dict[str, dict[str, Any]] = {}
        self._epoch = 0

    def batch(self, loader: RemoteLoader, trainer: Any) -> None:
        """After a batch, log metrics if they are due; after the last batch of an epoch, also log lines.

        Args:
            loader: The loader of the batch.
            trainer: The Trainer; None if there is none.
        """
        if trainer is None:
            return
        self._epoch = trainer.fit_loop.epoch_progress.current.processed
        is_last = batches_taken(trainer) + 1 >= trainer.num_training_batches
        is_due = trainer.loggers and loader.stats.num_batches % trainer.log_every_n_steps == 0
        if not (is_last or is_due):
            return
        state = self._state_or_none()
        if state is None:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for log in trainer.loggers:
            log.log_metrics(loader.stats.metrics(state), step=step)
        if is_last:
            self._log_lines(loader, trainer, state["hosts"])

    def end_epoch(self, loader: RemoteLoader, trainer: Any) -> None:
        """Log the lines of an epoch that ended early, or whose length was unknown.

        Args:
            loader: The loader of the epoch.
            trainer: The Trainer; None if there is none.
        """
        if trainer is None or not loader.stats.num_batches:
            return
        state = self._state_or_none()
        if state is not None:
            self._log_lines(loader, trainer, state["hosts"])

    def _state_or_none(self) -> dict[str, Any] | None:
        """The state, or None if the feeder does not answer: a training must not end because of its statistics."""
        try:
            return self._state()
        except DataServiceError as error:
            logger.warning("There are no statistics of the data service: %s", error)
            return None

    def _log_lines(self, loader: RemoteLoader, trainer: Any, hosts: list[dict[str, Any]]) -> None:
        if trainer.local_rank == 0:
            logger.info("%s", loader.stats.line(f"epoch {self._epoch}, data of rank {trainer.global_rank}"))
        if trainer.is_global_zero:
            reports = since(hosts, self._hosts)
            self._hosts = {host["name"]: host for host in hosts}
            for report in reports:
                logger.info("%s", host_line(report))
            text = advice(loader.stats.input_bound, reports)
            if text is not None:
                logger.info("%s", text)
        loader.stats = LoaderStats()
