"""LineProgress: log progress as lines, because progress bars with carriage returns are unreadable in CloudWatch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from lightning_sm._lightning import Callback, LightningModule, ProgressBar, Trainer, rank_zero_only
from lightning_sm.data.trainer.reporter import data_report

logger = logging.getLogger(__name__)
_log_once = rank_zero_only(logger.info)


class LineProgress(ProgressBar):
    """Log a line of progress every few seconds, at the end of each epoch and at the end of a run.

    A line looks like ``epoch=3/10 step=45 train_loss=0.411723 val_acc=0.9333``: one ``name=value`` for each metric, so
    that ``metric_definitions`` such as ``val_acc=([0-9.eE+-]+)`` find them. Only rank 0 logs. In a job with data hosts,
    the line of an epoch ends with ``data_wait=1.2%``, how long the slowest rank waited for data, and with the cause if
    that is worth a word.

    Args:
        every_n_seconds: Minimum time between two lines of an epoch, in seconds.
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        super().__init__()
        self._every_n_seconds = every_n_seconds
        self.is_enabled = True
        self._next_line_at = 0.0

    def enable(self) -> None:
        """Log lines (Lightning calls it on rank 0)."""
        self.is_enabled = True

    def disable(self) -> None:
        """Log no lines (Lightning calls it on all other ranks)."""
        self.is_enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock: the first line comes after ``every_n_seconds``."""
        self._next_line_at = time.monotonic() + self._every_n_seconds

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a line if the last one is long enough ago."""
        if time.monotonic() >= self._next_line_at:
            batches = self.total_train_batches
            self._log(trainer, f"{self._epoch(trainer)} batch={batch_idx + 1}/{batches} step={trainer.global_step}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's metrics, and what the data service has to say."""
        report = data_report(trainer) if self.is_enabled else ""
        self._log(trainer, f"{self._epoch(trainer)} step={trainer.global_step}", report)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics of ``trainer.validate``; ``fit`` logs them at the end of the epoch."""
        if trainer.state.fn == "validate":
            self._log(trainer, "validation")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the test metrics."""
        self._log(trainer, "test")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the final metrics."""
        self._log(trainer, f"finished: epochs={trainer.current_epoch} step={trainer.global_step}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Log what the model prints through ``self.print``."""
        if self.is_enabled:
            logger.info("%s", " ".join(str(arg) for arg in args))

    def _epoch(self, trainer: Trainer) -> str:
        planned = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "?"
        return f"epoch={trainer.current_epoch + 1}/{planned}"

    def _log(self, trainer: Trainer, position: str, report: str = "") -> None:
        self._next_line_at = time.monotonic() + self._every_n_seconds
        if self.is_enabled:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            values = [f"{name}={value:.6g}" for name, value in metrics.items()]
            logger.info("%s", " ".join(filter(None, [position, *values, report])))


def own_progress(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return a LineProgress, unless the user has a progress bar; then say what the job lacks.

    Args:
        callbacks: All callbacks of the user.
    """
    bar = next((callback for callback in callbacks if isinstance(callback, ProgressBar)), None)
    if bar is None:
        return [LineProgress()]
    if not isinstance(bar, LineProgress):
        _log_once(
            "%s replaces the progress lines of this job, such as epoch=3/10 step=45 val_acc=0.93: metric_definitions "
            "find only what it prints itself. Remove it to have the lines.",
            type(bar).__name__,
        )
    return []
