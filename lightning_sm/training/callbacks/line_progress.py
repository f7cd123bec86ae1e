"""LineProgress: log progress as lines, because progress bars with carriage returns are unreadable in CloudWatch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import psutil
import torch

from lightning_sm._lightning import Callback, LightningModule, ProgressBar, Trainer, rank_zero_only
from lightning_sm._text import clock_time
from lightning_sm._unlisted import UnlistedProgressBar
from lightning_sm.record.progress_metrics import progress_line
from lightning_sm.record.totals import Totals, samples_per_step
from lightning_sm.timing.step_times import StepTimes

logger = logging.getLogger(__name__)
_log_once = rank_zero_only(logger.info)


class LineProgress(UnlistedProgressBar):
    """A progress bar that logs a line every few seconds, after each validation, and at the end of each epoch and run.

    A line looks like ``epoch=3/10 step=45 validation=3 train_loss=0.411723 val_acc=0.9333 steps_per_s=12.5
    samples_per_s=800 eta=0:10:23 memory_gb=2.1 data_wait=1.2%``: one ``name=value`` for each metric, so that
    ``metric_definitions`` such as ``val_acc=([0-9.eE+-]+)`` match. Only rank 0 logs.

    - ``validation`` is only in the first line after each validation, to distinguish it from later lines that repeat the
      metrics. It counts the validations of this run of the Trainer.
    - ``steps_per_s`` (training batches) and ``data_wait`` cover the time since the last line, excluding validations,
      checkpoints and the time between epochs. ``samples_per_s`` counts the samples of all ranks. These rates need
      ``StepTimes``.
    - ``eta`` is the time left, including validations, at the rate since the first batch. It is shown only if
      ``max_epochs`` ends the training.
    - ``memory_gb`` is the peak GPU memory of rank 0 or, without a GPU, the memory of its process, in 10^9 bytes.

    Args:
        every_n_seconds: Minimum time between two lines within an epoch, in seconds.
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        super().__init__()
        self._every_n_seconds = every_n_seconds
        self.is_enabled = True
        self._next_line_at = 0.0
        self._shown = Totals()
        self._num_validations = 0
        self._has_validated = False  # since the last line
        self._began: tuple[float, int] | None = None  # time at the end of the first batch, and batches until then

    def enable(self) -> None:
        """Log lines on rank 0; Lightning calls this on all ranks after a search for a learning rate or batch size."""
        self.is_enabled = self.trainer.is_global_zero

    def disable(self) -> None:
        """Stop logging lines.

        Lightning calls this on all ranks but 0, and on all ranks before a search for a learning rate or batch size.
        """
        self.is_enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, so that the first line comes after ``every_n_seconds``."""
        self._next_line_at = time.monotonic() + self._every_n_seconds
        self._shown = Totals()
        self._began = None
        self._num_validations = 0
        self._has_validated = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a line if ``every_n_seconds`` have passed since the last one."""
        now = time.monotonic()
        if self._began is None:
            self._began = now, _num_done(trainer)
        if now >= self._next_line_at:
            self._log(trainer, self._batch(trainer, batch_idx + 1), **self._rates(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's metrics."""
        self._log(trainer, f"{self._epoch(trainer)} step={trainer.global_step}", **self._rates(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the metrics, unless the epoch ends now, because the epoch's line will contain them."""
        if trainer.state.fn == "validate":
            self._log(trainer, "validation")
        elif trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._num_validations += 1
            self._has_validated = True
            is_last_step = 0 < trainer.max_steps <= trainer.global_step
            if not trainer.is_last_batch and not is_last_step:
                loop: Any = trainer.fit_loop.epoch_loop
                done = loop.batch_progress.current.processed
                self._log(trainer, self._batch(trainer, done), **self._rates(trainer))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the test metrics."""
        self._log(trainer, "test")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the final metrics."""
        self._log(trainer, f"finished: epochs={trainer.current_epoch} step={trainer.global_step}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Log the text that the model prints through ``self.print``."""
        if self.is_enabled:
            logger.info("%s", " ".join(str(arg) for arg in args))

    def _epoch(self, trainer: Trainer) -> str:
        planned = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else "?"
        return f"epoch={trainer.current_epoch + 1}/{planned}"

    def _batch(self, trainer: Trainer, number: int) -> str:
        return f"{self._epoch(trainer)} batch={number}/{trainer.num_training_batches} step={trainer.global_step}"

    def _log(self, trainer: Trainer, position: str, **rates: str) -> None:
        self._next_line_at = time.monotonic() + self._every_n_seconds
        if self.is_enabled:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            number = self._num_validations if self._has_validated else None
            logger.info("%s", progress_line(position, metrics, rates, number))
        self._has_validated = False

    def _rates(self, trainer: Any) -> dict[str, str]:
        """Return the speed of the run since the last line; an empty dict without ``StepTimes``."""
        times = next((callback for callback in trainer.callbacks if isinstance(callback, StepTimes)), None)
        if times is None or not self.is_enabled:
            return {}
        totals = times.totals
        new = totals.plus(self._shown, -1)
        self._shown = totals
        rates: dict[str, str] = {}
        if new.step_s:
            rates["steps_per_s"] = f"{1 / new.step_s:.3g}"
            num_replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
            samples = samples_per_step([new], num_replicas)
            if samples:
                rates["samples_per_s"] = f"{samples / new.step_s:.4g}"
        eta_s = self._eta_s(trainer)
        if eta_s is not None:
            rates["eta"] = clock_time(eta_s)
        device = trainer.strategy.root_device
        on_gpu = device.type == "cuda"
        num_bytes = torch.cuda.max_memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss
        rates["memory_gb"] = f"{num_bytes / 1e9:.3g}"
        if new.step_s:
            rates["data_wait"] = f"{100 * new.waiting:.1f}%"
        return rates

    def _eta_s(self, trainer: Any) -> float | None:
        """Return the seconds until the end of the last epoch, at the rate since the first batch, or None if unknown."""
        num_batches = (trainer.max_epochs or 0) * trainer.num_training_batches
        if self._began is None or trainer.max_steps > 0 or not 0 < num_batches < math.inf:
            return None
        began_at, before = self._began
        done = _num_done(trainer)
        return (num_batches - done) * (time.monotonic() - began_at) / (done - before) if done > before else None


def _num_done(trainer: Any) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def own_progress(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return the LineProgress to add, if any; if the user has another progress bar, log what the job then lacks.

    Args:
        callbacks: All of the user's callbacks.
    """
    bar = next((callback for callback in callbacks if isinstance(callback, ProgressBar)), None)
    if bar is None:
        return [LineProgress()]
    if not isinstance(bar, LineProgress):
        _log_once(
            "%s replaces the progress lines of this job, such as epoch=3/10 step=45 val_acc=0.93: metric_definitions "
            "match only its output. Remove it to get the progress lines.",
            type(bar).__name__,
        )
    return []
