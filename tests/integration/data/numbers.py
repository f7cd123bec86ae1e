"""A DataModule that records its hooks, a model that records its batches, and two data hosts for both."""

import hashlib
import json
import os

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

from lightning_sm import RemoteDataModule
from lightning_sm.data.settings import DataServiceSettings

NUM_TRAIN, NUM_TEST, BATCH_SIZE = 23, 7, 4
STEPS, TEST_STEPS = 6, 2

# Datasets of one stage are told apart by their first number.
SECOND = 1000


class Numbers(Dataset):
    """Numbers with noise."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"index": self.first + index, "x": torch.rand(2)}


def loader(length, first=0, **options):
    """Return a loader of numbers. Without a worker, it would draw their noise in the training process."""
    return DataLoader(Numbers(length, first), **{"batch_size": BATCH_SIZE, "num_workers": 1, **options})


class Data(LightningDataModule):
    """A DataModule that reads its choice of loaders from a folder, and records there which process ran which hook."""

    def __init__(self, folder, width=2):
        super().__init__()
        self.save_hyperparameters(ignore="folder")
        self.folder = folder
        self.own = 0

    def note(self, what):
        with (self.folder / "journal").open("a") as file:
            file.write(f"{os.getpid()} {what}\n")

    def chosen(self, stage):
        """Return the loaders that the test chose."""
        return LOADERS[json.loads((self.folder / "loaders").read_text())[stage]]()

    def prepare_data(self):
        self.note("prepare_data")

    def setup(self, stage):
        self.note(f"setup {stage}")
        self.num_classes = 10
        self.folders = {self.folder}

    def teardown(self, stage):
        self.note(f"teardown {stage}")

    def train_dataloader(self):
        self.note(f"train_dataloader {self.trainer.current_epoch}")
        return self.chosen("train")

    def val_dataloader(self):
        self.note("val_dataloader")
        return self.chosen("val")

    def test_dataloader(self):
        self.note("test_dataloader")
        return loader(NUM_TEST)

    def predict_dataloader(self):
        self.note("predict_dataloader")
        return loader(NUM_TEST)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.note("on_before_batch_transfer")
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.note("transfer_batch_to_device")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.note("on_after_batch_transfer")
        return batch

    def state_dict(self):
        self.note("state_dict")
        return {"own": self.own}

    def load_state_dict(self, state_dict):
        self.note("load_state_dict")
        (self.own,) = state_dict.values()

    def on_exception(self, exception):
        self.note(f"on_exception {exception}")


def both():
    """Return two loaders, one of which is shorter."""
    return {"a": loader(NUM_TRAIN, shuffle=True), "b": loader(9, SECOND, shuffle=True)}


LOADERS = {
    "shuffled": lambda: loader(NUM_TRAIN, shuffle=True),
    "sequential": lambda: loader(NUM_TRAIN),
    "drop_last": lambda: loader(NUM_TRAIN, shuffle=True, drop_last=True),
    "split": lambda: loader(NUM_TRAIN, sampler=DistributedSampler(Numbers(NUM_TRAIN), 2, 0)),
    "weighted": lambda: loader(NUM_TRAIN, sampler=WeightedRandomSampler([1.0] * NUM_TRAIN, 20)),
    "dict": both,
    "small": lambda: loader(NUM_TEST),
    "small shuffled": lambda: loader(NUM_TEST, shuffle=True),
    "two small": lambda: [loader(NUM_TEST), loader(3, SECOND, batch_size=2)],
    **{mode: lambda mode=mode: CombinedLoader(both(), mode) for mode in ("min_size", "max_size", "max_size_cycle")},
}


class Recorder(LightningModule):
    """Keeps its batches by stage and epoch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen, self.hashes = [], []

    def note(self, stage, batch):
        parts = batch.items() if "index" not in batch else [("", batch)]
        numbers = {name: None if part is None else part["index"].tolist() for name, part in parts}
        self.seen.append((stage, self.current_epoch, numbers.get("", numbers)))
        tensors = [part["x"] for _, part in parts if part is not None]
        self.hashes.append(hashlib.blake2b(torch.cat(tensors).numpy().tobytes(), digest_size=6).hexdigest())
        return self.layer(tensors[0]).mean()

    def indices(self, stage, epoch=None):
        """Return all indices of a stage, in order."""
        return [
            index for what, when, numbers in self.seen if what == stage and epoch in (None, when) for index in numbers
        ]

    def batches(self, stage, epoch=None):
        """Return the batches of a stage."""
        return [numbers for what, when, numbers in self.seen if what == stage and epoch in (None, when)]

    def training_step(self, batch, batch_idx):
        loss = self.note("train", batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("sanity" if self.trainer.sanity_checking else f"val {dataloader_idx}", batch)

    def test_step(self, batch, batch_idx):
        self.note("test", batch)

    def predict_step(self, batch, batch_idx):
        self.note("predict", batch)
        return batch["index"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Cluster:
    """Data hosts with different numbers of workers, and trainings on them.

    Args:
        folder: Folder where the DataModule finds its choice of loaders and records its hooks.
        hosts: The data hosts.
    """

    def __init__(self, folder, hosts):
        self.folder = folder
        self.hosts = hosts

    def module(self, data=None):
        """Return a DataModule on these hosts."""
        settings = DataServiceSettings(startup_timeout_s=90, batch_timeout_s=60)
        return RemoteDataModule(data or Data(self.folder), [host.address for host in self.hosts], settings=settings)

    def choose(self, train="shuffled", val="small"):
        """Choose the loaders of the next run, and clear the recorded hooks."""
        (self.folder / "loaders").write_text(json.dumps({"train": train, "val": val}))
        (self.folder / "journal").write_text("")

    def noted(self):
        """Return the recorded hooks, all of which must have run in this process."""
        lines = [line.split(" ", 1) for line in (self.folder / "journal").read_text().splitlines()]
        assert {pid for pid, _ in lines} <= {str(os.getpid())}
        return [what for _, what in lines]

    def fit(self, train="shuffled", val="small", *, model=None, data=None, ckpt_path=None, **settings):
        """Train, and return the model and the trainer."""
        self.choose(train, val)
        trainer, model = self.trainer(**settings), model or Recorder()
        trainer.fit(model, datamodule=data or self.module(), ckpt_path=ckpt_path)
        return model, trainer

    def trainer(self, **settings):
        """Return a Trainer for two epochs."""
        return quiet_trainer(self.folder, **{"max_epochs": 2, **settings})


def quiet_trainer(folder, **settings):
    """Return a Trainer that writes nothing and has everything optional switched off."""
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    quiet = {**dict.fromkeys(names, False), "num_sanity_val_steps": 0, "accelerator": "cpu"}
    return Trainer(**{**quiet, "default_root_dir": folder, **settings})
