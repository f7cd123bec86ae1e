"""A training in which rank 1 fails once, followed by tests of the best and the last checkpoint.

The jobs in test_unshared_checkpoints run this script.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import LearningRateFinder, ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Dropout, Linear, Sequential
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerTrainer

KIND, FAIL_AT = os.environ["KIND"], int(os.environ["FAIL_AT"])
FAILED = Path("failed")  # in the working directory, which outlives an attempt


def whole(tensor):
    """Gather a weight if it is sharded over the ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def say(*words):
    """Write a line in one piece, because hosts share their output."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Model(LightningModule):
    """A model whose weights depend on the order of batches and on the random state."""

    def __init__(self):
        super().__init__()
        self.lr = 0.01
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(1)
            self.net = Sequential(Linear(8, 8), Dropout(0.1), Linear(8, 1))
            if KIND == "sharded":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def on_train_start(self):
        say("starts at", self.trainer.global_step, len(self.trainer.optimizers[0].state))

    def on_train_end(self):
        self.show("ends with")

    def on_test_start(self):
        self.show("tests")

    def show(self, words):
        total = sum(whole(weight.detach()).double().sum() for weight in self.parameters())
        say(words, f"{total.item():.15f}")


class Fail(Callback):
    """Makes rank 1 fail once."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == FAIL_AT and not FAILED.exists():
            FAILED.touch()
            raise ConnectionError("meant to fail once")


def main():
    """Train and test."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    saves = ModelCheckpoint(monitor="val_loss", save_last=True, every_n_train_steps=5)
    callbacks = [Fail(), saves]
    if KIND == "search":
        callbacks.append(LearningRateFinder(num_training_steps=5, min_lr=1e-3, max_lr=1e-2))
    trainer = SageMakerTrainer(
        accelerator="cpu",
        devices=1,
        strategy=ModelParallelStrategy() if KIND == "sharded" else "auto",
        max_epochs=2,
        val_check_interval=5,
        callbacks=callbacks,
        logger=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(data, 4))
    for name in ("best", "last"):
        trainer.test(model, DataLoader(data, 4), ckpt_path=name)


if __name__ == "__main__":
    main()
