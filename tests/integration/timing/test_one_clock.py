"""Log, data service, record and report show the same wait for data in a training with data hosts."""

import logging
import re
import time

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_sm.data.host.data_host import DataHost
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.record import waiting_reasons
from lightning_sm.record.data_figures import RankFigures
from lightning_sm.record.events import DataService, find_files, read_lines
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures
from lightning_sm.timing.step_times import StepTimes
from lightning_sm.training.callbacks.line_progress import LineProgress


class Slow(Dataset):
    """A dataset with slow samples."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.ones(2)


class Data(LightningDataModule):
    """Batches of one sample."""

    def train_dataloader(self):
        return DataLoader(Slow(), 1)

    def val_dataloader(self):
        return DataLoader(torch.ones(1, 2))


class Model(LightningModule):
    """A model whose validation is slower than its training."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.line(batch).mean()

    def validation_step(self, batch, batch_idx):
        time.sleep(0.2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.001)


@pytest.mark.processes
def test_everybody_says_the_same_wait(tmp_path, caplog, monkeypatch):
    """All four agree on the wait, and none counts validations within the epoch as part of a step."""
    caplog.set_level(logging.INFO, "lightning_sm")
    monkeypatch.setattr(waiting_reasons, "_MIN_SECONDS", 0.0)
    groups = (InstanceGroup("trainer", ("algo-1",)),)
    job = SageMakerJob("algo-1", ("algo-1",), groups, "test", base_dir=tmp_path, checkpoint_dir=tmp_path / "kept")
    quiet = {"enable_model_summary": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    with DataHost(workers=1) as host:
        trainer = Trainer(
            max_epochs=1, val_check_interval=4, logger=False, accelerator="cpu", default_root_dir=tmp_path,
            callbacks=[LineProgress(3600.0), StepTimes(job)], **quiet,
        )  # fmt: skip
        trainer.fit(Model(), RemoteDataModule(Data(), addresses=[host.address]))
    run = Figures(read_run(job.checkpoint_dir))
    assert run.pace.num_steps == 19
    assert run.pace.waiting > 0
    lines = [line for path in find_files(job.checkpoint_dir) for line in read_lines(path.read_bytes())]
    *_, last = (line for line in lines if isinstance(line, DataService))
    (figures,) = (RankFigures(**values) for values in last.ranks.values())
    assert figures.num_timed == 19
    assert figures.wait_fraction == pytest.approx(run.pace.waiting, abs=5e-3)
    assert figures.seconds == pytest.approx(run.pace.wall_s, abs=1e-3)
    (line,) = [message for message in caplog.messages if message.startswith("Epoch 1: ")]
    said = re.search(r"Training waits (\d+)% of the time", line)
    assert int(said[1]) == pytest.approx(100 * run.pace.waiting, abs=0.6)
