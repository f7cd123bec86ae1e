"""Heartbeat: report this rank's progress after each batch, so that the launcher notices a hang."""

from __future__ import annotations

from typing import Any

from lightning_sm._lightning import LightningModule, Trainer
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.job.control_folder import OwnProcess, Phase, announce


class Heartbeat(UnlistedCallback):
    """A callback that writes this rank's step and phase to a file in the control folder, if there is such a folder.

    The launcher considers a rank hung if it is silent for too long between two batches of the same epoch or validation.
    A rank may be silent for ten times as long before the end of the first batch (because of compilation) and while it
    saves a checkpoint, and for any length of time at the end of an epoch or a validation.

    This callback must come before the user's callbacks, so that it reports the end of an epoch or a validation before
    they start their work. ``SageMakerCLI`` and ``SageMakerTrainer`` add it to every job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process: OwnProcess | None = None
        self._is_compiled = False
        self._trained_epoch = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Announce this process, and report that setup has begun."""
        self._process = announce()
        self._is_compiled = False
        self._beat(trainer, Phase.SETTING_UP_FIT if stage == "fit" else Phase.SETTING_UP)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report that the first batch comes next."""
        self._beat(trainer, Phase.STARTING_TRAINING)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Report the start of a step."""
        self._beat(trainer, Phase.TRAINING if self._is_compiled else Phase.FIRST_STEP)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Report that a step has ended, and that this rank is waiting for the next batch."""
        self._is_compiled = True
        self._trained_epoch = trainer.current_epoch + 1
        self._beat(trainer, Phase.WAITING_FOR_BATCH)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the end of an epoch, at which the user's code may run for any length of time."""
        self._beat(trainer, Phase.ENDING_EPOCH)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the start of a validation."""
        self._beat(trainer, Phase.STARTING_VALIDATION)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Report the end of a validation batch."""
        self._beat(trainer, Phase.VALIDATING)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the end of a validation, at which the user's code may run for any length of time."""
        self._beat(trainer, Phase.ENDING_VALIDATION)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Report that a checkpoint is being saved, except after a fit, when the script may run for any length of time.

        A failed rank has already reported its failure, and must not overwrite that report.
        """
        if not (trainer.state.finished or trainer.interrupted):
            self._beat(trainer, Phase.SAVING)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the end of the fit: the model is exported, and the script continues."""
        self._beat(trainer, Phase.FINISHING)

    def _beat(self, trainer: Trainer, phase: Phase) -> None:
        if self._process is not None:
            # When a fit ends, Lightning has already counted the next epoch.
            epoch = max(0, trainer.current_epoch - (phase is Phase.FINISHING))
            rank, step = trainer.global_rank, trainer.global_step
            self._process.beat(rank, step, epoch, phase, trained_epoch=self._trained_epoch)
