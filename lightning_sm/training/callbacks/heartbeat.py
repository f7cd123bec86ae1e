"""Heartbeat: say after each batch where this rank stands, so that the launcher notices a hang."""

from __future__ import annotations

from typing import Any

from lightning_sm._lightning import Callback, LightningModule, Trainer
from lightning_sm.job.control_folder import OwnProcess, Phase, announce


class Heartbeat(Callback):
    """Write the step and what this rank does to its file in the control folder; without a launcher, do nothing.

    Between two batches of the same epoch or validation a rank soon counts as hanging. Before the end of the first one
    (compilation), and in a checkpoint, it may take ten times as long, and at the end of an epoch any time.

    ``SageMakerCLI`` and ``SageMakerTrainer`` add it to every job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process: OwnProcess | None = None
        self._is_compiled = False
        self._trained_epoch = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Announce this process."""
        self._process = announce()
        self._is_compiled = False
        self._beat(trainer, Phase.SETTING_UP_FIT if stage == "fit" else Phase.SETTING_UP)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first batch comes next."""
        self._beat(trainer, Phase.STARTING_TRAINING)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A step begins."""
        self._beat(trainer, Phase.TRAINING if self._is_compiled else Phase.FIRST_STEP)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A step has ended; the next batch is waited for."""
        self._is_compiled = True
        self._trained_epoch = trainer.current_epoch + 1
        self._beat(trainer, Phase.WAITING_FOR_BATCH)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What users compute at the end of an epoch may take any time."""
        self._beat(trainer, Phase.ENDING_EPOCH)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation begins."""
        self._beat(trainer, Phase.STARTING_VALIDATION)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A batch of a validation has ended."""
        self._beat(trainer, Phase.VALIDATING)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What users compute at the end of a validation may take any time."""
        self._beat(trainer, Phase.ENDING_VALIDATION)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is saved. After the fit the script saves it, and what follows that may take any time."""
        if not trainer.state.finished:
            self._beat(trainer, Phase.SAVING)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The model is exported, and the script continues."""
        self._beat(trainer, Phase.FINISHING)

    def _beat(self, trainer: Trainer, phase: Phase) -> None:
        if self._process is not None:
            # Lightning counts one more after the last epoch.
            epoch = max(0, trainer.current_epoch - (phase is Phase.FINISHING))
            self._process.beat(
                trainer.global_rank, trainer.global_step, epoch, phase, trained_epoch=self._trained_epoch
            )
