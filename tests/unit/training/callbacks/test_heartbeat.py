"""The progress that a rank reports, during a fit and outside it."""

from __future__ import annotations

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_sm.job.control_folder import Phase
from lightning_sm.training.callbacks import heartbeat


class Process:
    """A stand-in for the process's file."""

    def __init__(self):
        self.phases = []
        self.trained = []
        self.epoch = None

    def beat(self, rank, step, epoch, phase, *, trained_epoch):
        """Record a phase and the trained step and epoch."""
        self.phases.append(phase)
        self.trained.append((step, trained_epoch))
        self.epoch = epoch


@pytest.fixture
def process(monkeypatch):
    """The stand-in that the callback writes to."""
    process = Process()
    monkeypatch.setattr(heartbeat, "announce", lambda: process)
    return process


def test_each_part_of_a_fit_has_its_phase(tmp_path, process):
    """Only steps and validation batches may not pause; a checkpoint that the script saves does not change the phase."""
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        val_check_interval=2,
        callbacks=[heartbeat.Heartbeat()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    steps = [Phase.FIRST_STEP, Phase.WAITING_FOR_BATCH, Phase.TRAINING, Phase.WAITING_FOR_BATCH]
    validation = [Phase.STARTING_VALIDATION, Phase.VALIDATING, Phase.ENDING_VALIDATION]
    assert process.phases[:9] == [Phase.SETTING_UP_FIT, Phase.STARTING_TRAINING, *steps, *validation]
    assert [phase for phase in process.phases[:9] if not phase.may_pause] == [*steps[1:], Phase.VALIDATING]
    assert Phase.SAVING in process.phases[9:]
    assert process.phases[-1] is Phase.FINISHING
    assert process.epoch == 0, "the last epoch, not one after it"
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert process.phases[-1] is Phase.FINISHING
    trainer.predict(trainer.model, BoringModel().predict_dataloader())
    assert process.phases[-1] is Phase.SETTING_UP


def test_an_epoch_counts_as_trained_after_its_first_batch(tmp_path, process):
    """The step and epoch, at which faults are injected, count finished batches, not ones that begin."""
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=2,
        limit_val_batches=0,
        callbacks=[heartbeat.Heartbeat()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert list(dict.fromkeys(process.trained)) == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)]
