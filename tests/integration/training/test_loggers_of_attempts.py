"""Loggers that go on, in a job whose script is restarted once by its launcher, and the job once by the service."""

import csv

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.emulators import job_dir, local

# test_loggers.py has each kind of restart by itself; here are real processes, and the launcher and the emulator.
pytestmark = [pytest.mark.processes, pytest.mark.proof]

# Saves every other step, fails in step 5 of the first attempt, and is interrupted later.
_SCRIPT = """
import os
from pathlib import Path
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from lightning_sm import SageMakerTrainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        failed = Path("failed")
        if self.global_step == 5 and not failed.exists():
            failed.touch()
            raise RuntimeError("the first failure")
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.rand(40, 1), batch_size=1)

SageMakerTrainer(
    max_epochs=1,
    accelerator="cpu",
    log_every_n_steps=1,
    enable_model_summary=False,
    logger=[TensorBoardLogger("logs"), CSVLogger("logs")],
    callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)],
).fit(Model())
"""


def test_curves_go_on_over_restarts_of_script_and_job(jobs, work):
    """After both kinds of restart there is one folder, with each step once in TensorBoard and in the CSV file."""
    (work / "train.py").write_text(_SCRIPT)
    options = ["--fault", "interrupt@step=9", "--env", "LIGHTNING_SM_MAX_RESTARTS=1"]
    ended = local(jobs, work, *options, "--", "train.py", timeout_s=240)
    assert ended.returncode == 0, ended.stdout
    assert "the first failure" in ended.stdout
    assert "Attempt 2 of 2" in ended.stdout
    (folder,) = (job_dir(jobs) / "checkpoints" / "logs" / "lightning_logs").iterdir()
    assert folder.name == job_dir(jobs).name
    num_steps = 40
    curve = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert [event.step for event in curve] == list(range(num_steps))
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert [int(row["step"]) for row in rows] == list(range(num_steps))
    # What TensorBoard shows is what the file has: of each step, the attempt that went on.
    assert [event.value for event in curve] == pytest.approx([float(row["loss"]) for row in rows])
    # The first attempt, its restart, and the second attempt.
    assert len(list(folder.glob("events.out.tfevents.*"))) == 3
