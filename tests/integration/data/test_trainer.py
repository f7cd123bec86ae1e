"""A Trainer sees the same with data hosts as without, whatever its settings."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import BasePredictionWriter, Callback
from torch.utils.data import DataLoader, Sampler

from lightning_sm import RemoteDataModule
from lightning_sm.data.trainer import reporter
from tests.integration.data.datasets import Data as Loaders
from tests.integration.data.numbers import NUM_TEST, NUM_TRAIN, Data, Recorder, quiet_trainer

pytestmark = pytest.mark.processes


class ByHand(Recorder):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.note("train", batch)


LIMITS = {f"limit_{stage}_batches": 0.5 for stage in ("train", "val", "test", "predict")}
CHECKS = {"num_sanity_val_steps": 1, "val_check_interval": 2, "accumulate_grad_batches": 4}
ROWS = {
    "own order": ("weighted", "small shuffled", {}),
    "a loader that begins again": ("max_size_cycle", "max_size_cycle", {"num_sanity_val_steps": -1}),
    "a loader that ends the epoch": ("min_size", "two small", {}),
    "limits": ("sequential", "max_size", LIMITS),
    "overfitting": ("shuffled", "small", {"overfit_batches": 2, "max_epochs": 3}),
    "validation within the epoch": ("shuffled", "small", CHECKS),
    "steps": ("shuffled", "small", {"max_epochs": -1, "max_steps": 13}),
    "reloads": ("shuffled", "small", {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
    "two shares": ("split", "small", {"use_distributed_sampler": False}),
    "by hand": ("sequential", "small", {}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("row", ROWS)
def test_a_trainer_sees_what_it_sees_without_data_hosts(cluster, row):
    """All stages have the same samples in the same order, and the hooks run in this process, equally often."""
    train, val, settings = ROWS[row]
    seen = []
    for data in (Data(cluster.folder), cluster.module()):
        seed_everything(3, verbose=False)
        model = ByHand() if row == "by hand" else Recorder()
        _, trainer = cluster.fit(train, val, model=model, data=data, **settings)
        trainer.test(model, datamodule=data, verbose=False)
        trainer.predict(model, datamodule=data)
        trainer.validate(model, datamodule=data, verbose=False)
        seen.append((model.seen, trainer.global_step, cluster.noted()))
    assert seen[0][0]
    assert seen[0] == seen[1]


class Episodes(Sampler):
    """A sampler that draws each batch from the generator of the process."""

    def __len__(self):
        return 20

    def __iter__(self):
        return (torch.randperm(NUM_TRAIN)[:3].tolist() for _ in range(len(self)))


class Drawing(Recorder):
    """Draws a random number in each step."""

    def training_step(self, batch, batch_idx):
        self.seen.append((batch.tolist(), torch.rand(()).item()))
        return self.layer.weight.sum()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_draws_each_batch_takes_turns_with_the_steps(pool, tmp_path, num_workers):
    """Samplers run as far ahead of training as torch's do if they draw from the same generator."""

    def episodes():
        return DataLoader(torch.arange(NUM_TRAIN), batch_sampler=Episodes(), num_workers=num_workers)

    seen = []
    for data in (Loaders(episodes), RemoteDataModule(Loaders(episodes), [host.address for host in pool.hosts])):
        seed_everything(3, verbose=False)
        model = Drawing()
        quiet_trainer(tmp_path, max_epochs=2).fit(model, datamodule=data)
        seen.append(model.seen)
    assert len(seen[0]) == 40
    assert seen[0] == seen[1]


class Rings(Callback):
    """Records the number of rings of slots at the end of each epoch."""

    def __init__(self):
        self.numbers = []

    def on_train_epoch_end(self, trainer, *_):
        gc.collect()
        self.numbers.append(Path("/proc/self/maps").read_text().count("memfd:lightning_sm"))


def test_iterators_of_a_loader_share_its_slots(cluster):
    """An iterator starts while the previous epoch's still has its slots; later iterators need no more memory."""
    rings = Rings()
    cluster.fit(max_epochs=4, callbacks=[rings])
    assert len(rings.numbers) == 4
    assert len(set(rings.numbers[1:])) == 1


def test_an_epoch_that_is_cut_short_has_its_line_in_the_log(cluster, caplog, monkeypatch):
    """The log has a line for the third epoch, which max_steps cuts short."""
    caplog.set_level(logging.INFO, "lightning_sm")
    monkeypatch.setattr(reporter, "verdict", lambda ranks, _: f"Held up of {len(ranks)}.")
    cluster.fit("sequential", max_epochs=-1, max_steps=13)
    lines = [message for message in caplog.messages if message.startswith("Epoch ")]
    assert lines == [f"Epoch {epoch}: Held up of 1." for epoch in (1, 2, 3)]


class Writer(BasePredictionWriter):
    """Records what it is told to write."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((batch["index"].tolist(), batch_indices))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append((torch.cat(predictions).tolist(), batch_indices))


def test_a_prediction_writer_gets_the_indices_of_the_samples(cluster):
    """Writers use the indices, which Lightning gets from the sampler, to order the predictions of several ranks."""
    cluster.choose()
    written = []
    for data in (Data(cluster.folder), cluster.module()):
        writer = Writer()
        cluster.trainer(callbacks=[writer]).predict(Recorder(), datamodule=data)
        written.append((writer.batches, writer.epochs))
    assert written[0] == written[1]
    assert written[1][1][0][0] == list(range(NUM_TEST))
