"""The record of the batches that a rank trains on: their steps, their contents, and the order of local loaders."""

from __future__ import annotations

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm.data.host.data_host import DataHost
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.record.batch_log import steps_of, unpack
from lightning_sm.record.events import LocalPass, TrainedBatches, find_files, read_file
from lightning_sm.training.callbacks.local_position import LocalPosition
from lightning_sm.training.callbacks.step_times import StepTimes


def points():
    """20 samples, of which each is another one."""
    return TensorDataset(torch.arange(40.0).view(20, 2))


class Data(LightningDataModule):
    """Batches of four of them."""

    def train_dataloader(self):
        return DataLoader(points(), 4)


class Model(LightningModule):
    """Fails at a batch of an epoch."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.fails_at = fails_at

    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == self.fails_at:
            raise ValueError("a broken batch")
        return self.line(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.001)


class Iterating(Model):
    """Takes two batches for a step."""

    def training_step(self, dataloader_iter):
        next(dataloader_iter)
        batch, _, _ = next(dataloader_iter)
        return self.line(batch[0]).mean()


@pytest.fixture
def job(tmp_path):
    """A job whose record lies below its folder."""
    groups = (InstanceGroup("trainer", ("algo-1",)),)
    return SageMakerJob("algo-1", ("algo-1",), groups, "test", base_dir=tmp_path, checkpoint_dir=tmp_path / "kept")


def train(job, model, data, **settings):
    """Train, with the callbacks of a job that write and matter here."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        max_epochs=2, logger=False, accelerator="cpu", callbacks=[LocalPosition(), StepTimes(job)], **quiet, **settings
    )
    trainer.fit(model, data)


def recorded(job, kind):
    """The lines of a kind, of all files."""
    files = find_files(job.checkpoint_dir, with_batches=True)
    return [line for file in files for line in read_file(file) if isinstance(line, kind)]


def steps(job):
    """Epoch, number of the batch, and step of all batches."""
    return [
        (line.epoch, line.first + place, step)
        for line in recorded(job, TrainedBatches)
        for place, step in enumerate(steps_of(line))
    ]


def test_each_batch_has_its_step(job):
    """Of accumulated gradients, several have the same one; the last step of an epoch has the rest."""
    train(job, Model(), DataLoader(points(), 4), accumulate_grad_batches=2)
    assert steps(job) == [(epoch, number, 3 * epoch + number // 2) for epoch in (0, 1) for number in range(5)]


def test_the_batch_with_which_training_fails_is_recorded(job):
    """It is the one that somebody will want to see."""
    with pytest.raises(ValueError, match="a broken batch"):
        train(job, Model(fails_at=(1, 2)), DataLoader(points(), 4))
    assert steps(job)[-2:] == [(1, 1, 6), (1, 2, 7)]


def test_local_orders_are_recorded_as_far_as_torch_makes_them(job):
    """One line for each epoch; a shuffled loader on one rank has no seed."""
    train(job, Model(), DataLoader(points(), 4, drop_last=True))
    passes = recorded(job, LocalPass)
    assert [(one.epoch, one.sampler, one.is_known) for one in passes] == [
        (0, "SequentialSampler", True),
        (1, "SequentialSampler", True),
    ]
    assert (passes[0].num_samples, passes[0].batch_size, passes[0].drop_last, passes[0].distributed) == (
        20,
        4,
        True,
        {},
    )
    train(job, Model(), DataLoader(points(), 4, shuffle=True))
    assert [(one.sampler, one.is_known) for one in recorded(job, LocalPass)[2:]] == [("RandomSampler", False)] * 2


@pytest.mark.processes
def test_batches_of_data_hosts_have_hashes(job):
    """Each batch has its own, the same in each epoch; a step that fetches by itself has none."""
    with DataHost(workers=1) as host:
        for model in (Model(), Iterating()):
            train(job, model, RemoteDataModule(Data(), addresses=[host.address]))
    lines = recorded(job, TrainedBatches)
    by_epoch = [[unpack(line.hashes["0"]) for line in lines if line.hashes and line.epoch == one] for one in (0, 1)]
    hashes = [[value for part in parts for value in part] for parts in by_epoch]
    assert len(set(hashes[0])) == 5
    assert hashes[0] == hashes[1]
    assert any(not line.hashes for line in lines)
    assert sum(line.num for line in lines if line.hashes) == 10
