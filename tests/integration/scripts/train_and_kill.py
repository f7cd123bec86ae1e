"""A training of which ranks are killed once, in the middle of an epoch. The jobs of test_restart_states run it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import distributed
from torch.nn import BatchNorm1d, Dropout, Linear, Sequential
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerTrainer
from lightning_sm.job.variables import RESTART_DIR
from lightning_sm.training.checkpoints import state_schedule

KIND = os.environ.get("KIND", "automatic")
# Ranks to be killed, at which step at the earliest, and how many states there must be in memory by then.
VICTIMS = [int(rank) for rank in os.environ.get("VICTIMS", "").split()]
FAIL_AT, NUM_STATES = int(os.environ.get("FAIL_AT", "11")), int(os.environ.get("NUM_STATES", "0"))
IS_DAMAGED, ROOM = "IS_DAMAGED" in os.environ, os.environ.get("ROOM")
IS_LOST = "IS_LOST" in os.environ  # the first host's newest state
BACKEND = os.environ.get("BACKEND")
NUM_EPOCHS, STEP_S = int(os.environ.get("NUM_EPOCHS", "3")), float(os.environ.get("STEP_S", "0.1"))
FAILED = Path("failed")  # in the working directory, which outlives an attempt
NUM_BATCHES, BATCH_SIZE, NUM_RANKS = 8, 4, int(os.environ.get("NUM_RANKS", "2"))


def say(*words):
    """Write a line at once: hosts share their output."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def states():
    """The states in the memory of this host, the newest one last; none while one is written."""
    folder = RESTART_DIR.read(os.environ)
    if folder is None or list(folder.glob("*.sagemaker-ignore")):
        return []
    return sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))  # one may go meanwhile


def of_all(value):
    """A value of all ranks."""
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


class Model(LightningModule):
    """Its weights depend on the order of batches, on the random state, and on buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        # No bias: its gradient is rounding, which Adam makes a step of.
        self.net = Sequential(Linear(8, 8, bias=False), BatchNorm1d(8), Dropout(0.1), Linear(8, 1))
        self.automatic_optimization = KIND != "manual"
        self.seen = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def training_step(self, batch, batch_idx):
        time.sleep(STEP_S)  # as the work of a larger model
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        if not self.automatic_optimization:
            self.seen.data += 1  # before the optimizer's step: a failure in between has changed the weights
            optimizer = self.optimizers()
            self.manual_backward(loss / 2)
            if batch_idx % 2:  # gradients of two batches
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_start(self):
        say("starts at", self.trainer.global_step)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if KIND == "averaged" and self.global_rank == 0:
            buffers = " ".join(f"{one.double().sum().item():.15f}" for one in self.buffers())
            say("reads", 0, self.trainer.current_epoch, batch_idx, "with buffers", buffers)

    def on_train_end(self):
        say("ends with", self.trainer.global_rank, *(f"{one.double().sum().item():.15f}" for one in self.parameters()))
        if self.global_rank == 0:  # those of the others count in no checkpoint
            say("has buffers", 0, *(f"{one.double().sum().item():.15f}" for one in self.buffers()))
        say("has loss", self.trainer.global_rank, f"{self.trainer.callback_metrics['loss'].item():.6f}")


class Kill(Callback):
    """Some ranks are killed once, all at the same moment; and a list of the samples of each step."""

    def on_train_start(self, trainer, *_):
        self.pids = of_all(os.getpid())
        self.are_enough = False

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        say("reads", trainer.global_rank, trainer.current_epoch, batch_idx, f"{batch[0].sum().item():.4f}")
        if not VICTIMS or FAILED.exists() or trainer.global_step < FAIL_AT or batch_idx % NUM_BATCHES in (0, 7):
            return
        if NUM_STATES:
            # One rank of each host keeps states.
            if min(of_all(NUM_STATES if trainer.local_rank else len(states()))) < NUM_STATES:
                return
            if not self.are_enough:  # no further ones: none is being written in one of the next steps
                self.are_enough = True
                state_schedule.MAX_SHARE = 1e-9
                return
            if IS_DAMAGED and trainer.local_rank == 0:
                damage(states()[-1], is_cut=trainer.global_rank == 0)
            if IS_LOST and trainer.global_rank == 0:
                states()[-1].unlink()
            distributed.barrier()
        if trainer.global_rank == VICTIMS[-1]:
            FAILED.touch()
            say("kills at", trainer.global_step, *(path.stem.rpartition("=")[2] for path in states()))
            for rank in VICTIMS:
                os.kill(self.pids[rank], signal.SIGKILL)


def damage(path, *, is_cut):
    """Cut a file in the middle, or change its bytes there."""
    content = bytearray(path.read_bytes())
    third = len(content) // 3
    if is_cut:
        del content[third:]
    else:
        content[third : 2 * third] = bytes(255 - byte for byte in content[third : 2 * third])
    path.write_bytes(content)


class Data(LightningDataModule):
    """Points that data hosts serve, if there are any."""

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(NUM_BATCHES * BATCH_SIZE * NUM_RANKS, 8, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), BATCH_SIZE, shuffle=True)

    def val_dataloader(self):
        return self.train_dataloader()


def main():
    """Train."""
    state_schedule.MAX_SHARE = float(os.environ.get("SHARE", state_schedule.MAX_SHARE))
    folder = RESTART_DIR.read(os.environ)
    if ROOM and folder is not None and int(os.environ.get("LOCAL_RANK", "0")) == 0 and not FAILED.exists():
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", folder], check=True)
    strategy: Any = "auto"
    if BACKEND:
        importlib.import_module("tests.gpu.staged")  # registers it
        strategy = DDPStrategy(process_group_backend=BACKEND)
    trainer = SageMakerTrainer(
        accelerator=os.environ.get("ACCELERATOR", "cpu"),
        strategy=strategy,
        max_epochs=NUM_EPOCHS,
        callbacks=[
            Kill(),
            ModelCheckpoint(monitor="val_loss", every_n_epochs=100),
            *([EMAWeightAveraging(decay=0.5)] if KIND == "averaged" else []),
        ],
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), Data())


if __name__ == "__main__":
    main()
