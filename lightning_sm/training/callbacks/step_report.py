"""StepReport: report the current step to the emulator, so that it can inject a fault at a given step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_sm._lightning import Callback, LightningModule, Trainer
from lightning_sm.job.variables import STEP_FILE


class StepReport(Callback):
    """Write ``STEP EPOCH`` to a file after each training batch; rank 0 writes.

    The step is ``trainer.global_step``, the number of completed optimizer steps. The epoch counts from 1, as in the
    progress lines.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path)
        self._file: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the file once: opening it at each step would cost more than the report itself."""
        if trainer.is_global_zero and self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Overwrite the last report. The width is fixed, so that nothing of a longer one remains."""
        if self._file is not None:
            os.pwrite(self._file, b"%12d %12d\n" % (trainer.global_step, trainer.current_epoch + 1), 0)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def step_reports(env: Mapping[str, str] = os.environ) -> list[Callback]:
    """Return the callback if the emulator asks for it, else nothing."""
    path = STEP_FILE.read(env)
    return [] if path is None else [StepReport(path)]
