"""A script with SMDDP but without lightning_sm, as AWS documents it: Lightning's stock DDP with another backend.

Argument: "prepare" to train with a prepare_data hook, "log" to log a mean over the ranks.
"""

import os
import sys

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  # registers the backend
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 1))


class Preparing(Model):
    def prepare_data(self):
        pass


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        strategy=DDPStrategy(process_group_backend="smddp"),
    ).fit(Preparing() if sys.argv[1] == "prepare" else Model())
