"""A user's script: dropout, random augmentation, an adaptive optimizer, a schedule, and a checkpoint in each epoch.

FORGETS makes the loss depend on an attribute that no checkpoint has. STEP_S: how long a step takes.
NUM_SAMPLES: samples of an epoch.
"""

import os
import time

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm import SageMakerCLI

STEP_S = float(os.environ.get("STEP_S", "0.02"))
NUM_SAMPLES = int(os.environ.get("NUM_SAMPLES", "200"))


class Points(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        point = torch.randn(8, generator=generator)
        return point + 0.1 * torch.randn(8), int(point.sum() > 0)


class PointsData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Points(), batch_size=5, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Points(), batch_size=20)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
        )
        self.seen = 0

    def training_step(self, batch, batch_idx):
        time.sleep(STEP_S)
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if os.environ.get("FORGETS"):
            self.seen += 1
            loss = loss * (1 + self.seen / 100)
        return loss

    def validation_step(self, batch, batch_idx):
        time.sleep(STEP_S)
        self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


if __name__ == "__main__":
    SageMakerCLI(Net, PointsData, seed_everything_default=1, trainer_defaults={"max_epochs": 4, "deterministic": True})
