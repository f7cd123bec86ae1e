# A user's script: augments at random, and keeps what training_step got in the folder SEEN.
# Arguments: folder with the data, and how the training loaders are made.
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, LightningModule, seed_everything
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from lightning_sm import DataServiceSettings, SageMakerTrainer

data_dir, kind = sys.argv[1:3]
NUM_SAMPLES, BATCH_SIZE = 90, 4
EPOCHS = int(os.environ.get("EPOCHS", "2"))
SLOW_FROM = int(os.environ.get("SLOW_FROM", "1000000"))
BAD = {int(index) for index in os.environ.get("BAD", "").split()}
SKIP_STEPS = os.environ.get("SKIP_STEPS", "").split()


class Augmented(Dataset):
    def __init__(self, folder):
        self.values = np.load(Path(folder) / "values.npy")
        self.noise = np.random.default_rng()

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        if index in BAD:
            raise OSError(f"sample {index} is truncated")
        noise = torch.randn(3) + self.noise.standard_normal() + random.random()
        return {"x": torch.full((3,), float(self.values[index])) + noise, "index": index, "name": f"sample {index}"}


class Streamed(IterableDataset):
    def __init__(self, folder):
        self.values = np.load(Path(folder) / "values.npy")

    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, len(self.values), info.num_workers):
            yield {"x": torch.full((3,), float(self.values[index])) + torch.randn(3), "index": index}


class Backwards(Sampler):
    # Its state goes on from epoch to epoch.
    def __init__(self, length):
        self.length, self.passes = length, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        self.passes += 1
        yield from (torch.randperm(self.length) if self.passes % 2 else torch.arange(self.length).flip(0)).tolist()


def collate(samples):
    scale = random.random()
    batch = default_collate(samples)
    return {**batch, "x": batch["x"] * scale}


class Data(LightningDataModule):
    def setup(self, stage):
        self.kept = torch.randperm(NUM_SAMPLES)[: NUM_SAMPLES - 2].tolist()

    def train_dataloader(self):
        if kind == "ordered":
            return DataLoader(Augmented(data_dir), BATCH_SIZE)
        augmented = torch.utils.data.Subset(Augmented(data_dir), self.kept)
        if kind == "shards":
            return DataLoader(Streamed(data_dir), BATCH_SIZE)
        if kind == "sampler":
            return DataLoader(augmented, BATCH_SIZE, sampler=Backwards(len(augmented)), collate_fn=collate)
        first = DataLoader(augmented, BATCH_SIZE, shuffle=True, collate_fn=collate)
        return {"a": first, "b": DataLoader(augmented, 3, drop_last=True)} if kind == "two" else first


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        place = f"{self.current_epoch}-{batch_idx}-{self.global_step}-{self.global_rank}-{os.getpid()}"
        torch.save(batch, Path(os.environ["SEEN"]) / f"{place}.pt")
        if self.trainer.ckpt_path is None and self.global_step >= SLOW_FROM:
            time.sleep(0.3)  # the interruption comes meanwhile
        return self.layer((batch["a"] if kind == "two" else batch)["x"]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


if __name__ == "__main__":
    seed_everything(7)
    SageMakerTrainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_model_summary=False,
        accumulate_grad_batches=3 if kind == "accumulated" else 1,
        reload_dataloaders_every_n_epochs=1 if kind == "reloaded" else 0,
        data_service=DataServiceSettings(
            skip_steps=SKIP_STEPS, max_bad_samples=int(os.environ.get("MAX_BAD", len(BAD)))
        ),
    ).fit(Model(), datamodule=Data())
