"""Heartbeat: say after each batch where this rank stands, so that the launcher notices a hang."""

from __future__ import annotations

from typing import Any

from lightning_sm._lightning import Callback, LightningModule, Trainer
from lightning_sm.job.control_folder import FIRST_STEP, OwnProcess, announce


class Heartbeat(Callback):
    """Write the step and what this rank does to its file in the control folder; without a launcher, do nothing.

    Only between two batches of the same epoch or validation does a rank count as hanging: what happens at the first
    batch (compilation), at the end of an epoch, or while a checkpoint is saved may take any time.

    ``SageMakerCLI`` and ``SageMakerTrainer`` add it to every job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process: OwnProcess | None = None
        self._is_compiled = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Announce this process."""
        self._process = announce()
        self._is_compiled = False
        self._beat(trainer, f"setting up to {stage}", may_pause=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first batch comes next."""
        self._beat(trainer, "starting the training", may_pause=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A step begins."""
        self._beat(trainer, "training" if self._is_compiled else FIRST_STEP, may_pause=not self._is_compiled)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A step has ended; the next batch is waited for."""
        self._is_compiled = True
        self._beat(trainer, "waiting for a batch", may_pause=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What users compute at the end of an epoch may take any time."""
        self._beat(trainer, "ending the epoch", may_pause=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation begins."""
        self._beat(trainer, "starting the validation", may_pause=True)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A batch of a validation has ended."""
        self._beat(trainer, "validating", may_pause=False)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What users compute at the end of a validation may take any time."""
        self._beat(trainer, "ending the validation", may_pause=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is saved."""
        self._beat(trainer, "saving a checkpoint", may_pause=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is exported, and the script goes on."""
        self._beat(trainer, "finishing", may_pause=True)

    def _beat(self, trainer: Trainer, phase: str, *, may_pause: bool) -> None:
        if self._process is not None:
            epoch = trainer.current_epoch
            self._process.beat(trainer.global_rank, trainer.global_step, epoch, phase, may_pause=may_pause)
