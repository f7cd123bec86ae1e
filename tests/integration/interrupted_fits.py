"""Train a small model in this process, interrupt it at a chosen moment, and record what it did."""

import gc
import os
import signal

import torch
from pytorch_lightning import seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm._lightning import Callback, LightningModule, ModelCheckpoint, Trainer
from lightning_sm.job.outcomes import INTERRUPTED_EXIT_CODE
from lightning_sm.training.callbacks.local_position import LocalPosition
from lightning_sm.training.callbacks.mid_epoch import MidEpoch
from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint, TrainingInterrupted
from lightning_sm.training.checkpoints.find_newest import newest_checkpoint

NUM_TRAIN, NUM_VAL, BATCH_SIZE = 24, 12, 4
NUM_STEPS, NUM_VAL_BATCHES = NUM_TRAIN // BATCH_SIZE, NUM_VAL // BATCH_SIZE
MOMENTS = {
    "first step": ("on_train_batch_start", 1),
    "a step's end": ("on_train_batch_end", 2),
    "a later step": ("on_train_batch_start", 9),
    "before the last step of an epoch": ("on_train_batch_start", NUM_STEPS),
    "the last step of an epoch": ("on_train_batch_end", NUM_STEPS),
    "the first step of an epoch": ("on_train_batch_start", NUM_STEPS + 1),
    "backward": ("on_after_backward", 4),
    "start of a validation": ("on_validation_start", 2),
    "first batch of a validation": ("on_validation_batch_start", 1),
    "within a validation": ("on_validation_batch_start", NUM_VAL_BATCHES + 2),
    "last batch of a validation": ("on_validation_batch_end", 2 * NUM_VAL_BATCHES),
    "end of a validation": ("on_validation_end", 1),
    "end of an epoch": ("on_train_epoch_end", 1),
    "start of an epoch": ("on_train_epoch_start", 2),
    "a checkpoint is saved": ("on_save_checkpoint", 1),
    "the last validation": ("on_validation_batch_start", 3 * NUM_VAL_BATCHES),
    "the last step": ("on_train_batch_end", 3 * NUM_STEPS),
    "the last epoch's end": ("on_train_epoch_end", 3),
}


class Model(LightningModule):
    """A line through points, with a scheduler. It records every loss and learning rate.

    Args:
        scheduler: "step", "epoch" or "plateau".
    """

    def __init__(self, scheduler="step"):
        super().__init__()
        self.scheduler = scheduler
        self.line = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.events = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.line(x), y)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.events.append(("train", self.current_epoch, batch_idx, round(loss.item(), 12), round(rate, 12)))
        return loss

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.events.append(("validation", self.current_epoch))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.line(x), y)
        if not self.trainer.sanity_checking:
            self.events.append(("val", self.current_epoch, batch_idx, round(loss.item(), 12)))
        self.log("val_loss", loss)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.events.append(("val_loss", round(float(self.trainer.callback_metrics["val_loss"]), 6)))

    def on_train_epoch_end(self):
        self.events.append(("epoch end", self.current_epoch))

    def train_dataloader(self):
        return loader(NUM_TRAIN, 1)

    def val_dataloader(self):
        return loader(NUM_VAL, 2)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        if self.scheduler == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        step = schedulers.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": step, "interval": self.scheduler}}


def loader(length, seed):
    """Create a loader with the same points in the same order every time."""
    points = torch.randn(length, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=BATCH_SIZE)


class Interrupt(Callback):
    """Send this process a signal in the n-th call of a hook, either in the sanity check or outside it."""

    def __init__(self, hook, number=1, signum=signal.SIGUSR2, in_sanity_check=False):
        self.left = number

        def interrupt(trainer, *_args, **_kwargs):
            if trainer.sanity_checking == in_sanity_check:
                self.left -= 1
                if self.left == 0:
                    os.kill(os.getpid(), signum)

        setattr(self, hook, interrupt)


def fit(folder, model, *callbacks, ckpt_path=None, position=True, **settings):
    """Train in one process, with LocalPosition or as stock Lightning does, and return the Trainer."""
    seed_everything(0, verbose=False)
    model.line.reset_parameters()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            MidEpoch(),
            *callbacks,
            *([LocalPosition()] if position else []),
            SpotCheckpoint(folder),
            ModelCheckpoint(folder / "best", monitor="val_loss"),
        ],
        **{"max_epochs": 3, "num_sanity_val_steps": 1, **settings},
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def is_interrupted(folder, model, *callbacks, **settings):
    """Train, return whether the run was interrupted with the right exit code, and stop its workers if so."""
    try:
        fit(folder, model, *callbacks, **settings)
    except TrainingInterrupted as ended:
        code = ended.code
    else:
        return False
    model.trainer = None  # frees the Trainer, which keeps the workers of an interrupted validation
    gc.collect()
    return code == INTERRUPTED_EXIT_CODE


def whole(events):
    """Return a run's events without validations that were interrupted and then repeated."""
    kept = []
    for event in events:
        if event[0] == "validation":
            begins = [index for index, (kind, *_) in enumerate(kept) if kind == "validation"]
            ends = [index for index, (kind, *_) in enumerate(kept) if kind == "val_loss"]
            if begins and (not ends or ends[-1] < begins[-1]):
                del kept[begins[-1] :]
        kept.append(event)
    return kept


def points():
    """Return the training points as a dataset."""
    return loader(NUM_TRAIN, 1).dataset


def successor_of(model):
    """Create a new model that continues the events of another."""
    successor = type(model)(model.scheduler)
    successor.events = list(model.events)
    return successor


def resumed(folder, model, *callbacks, **settings):
    """Train a successor of an interrupted model from the newest checkpoint to the end, and return it."""
    successor = successor_of(model)
    newest = newest_checkpoint(folder)
    fit(folder, successor, *callbacks, ckpt_path=newest and newest.path, **settings)
    return successor
