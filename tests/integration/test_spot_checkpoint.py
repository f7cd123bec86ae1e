"""A training that is interrupted at any moment, and the run that goes on from its checkpoint: together one run."""

import gc
import os
import random
import signal

import numpy as np
import pytest
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm._lightning import Callback, LightningModule, ModelCheckpoint, Trainer
from lightning_sm.callbacks.local_position import LocalPosition
from lightning_sm.callbacks.spot import INTERRUPTED_EXIT_CODE, STOP_SIGNALS, SpotCheckpoint, TrainingInterrupted
from lightning_sm.checkpoints import newest_checkpoint

NUM_TRAIN, NUM_VAL, BATCH_SIZE = 24, 12, 4
NUM_STEPS, NUM_VAL_BATCHES = NUM_TRAIN // BATCH_SIZE, NUM_VAL // BATCH_SIZE


@pytest.fixture(autouse=True)
def _restored_signals():
    """The callback keeps its handlers when the run is over; other tests need the old ones."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class Model(LightningModule):
    """A line through points, with schedulers of all kinds; notes every loss and every learning rate.

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
    """The same points in the same order, every time."""
    points = torch.randn(length, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=BATCH_SIZE)


class Interrupt(Callback):
    """Send this process a signal in the n-th call of a hook (not counting the sanity check, unless it is asked for)."""

    def __init__(self, hook, number=1, signum=signal.SIGUSR2, in_sanity_check=False):
        self.left = number

        def interrupt(trainer, *_args, **_kwargs):
            if trainer.sanity_checking == in_sanity_check:
                self.left -= 1
                if self.left == 0:
                    os.kill(os.getpid(), signum)

        setattr(self, hook, interrupt)


def fit(folder, model, *callbacks, ckpt_path=None, **settings):
    """Train on one process; returns what was noted and the Trainer."""
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
            *callbacks,
            LocalPosition(),
            SpotCheckpoint(folder),
            ModelCheckpoint(folder / "best", monitor="val_loss"),
        ],
        **{"max_epochs": 3, "num_sanity_val_steps": 1, **settings},
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def is_interrupted(folder, model, *callbacks, **settings):
    """Train; returns whether the run left early, with the exit code that says so. Its workers are gone then."""
    try:
        fit(folder, model, *callbacks, **settings)
    except TrainingInterrupted as ended:
        code = ended.code
    else:
        return False
    model.trainer = None  # with the Trainer, workers go that it keeps when a validation is left
    gc.collect()
    return code == INTERRUPTED_EXIT_CODE


def whole(events):
    """What a run did, without validations that were interrupted and then repeated."""
    kept = []
    for event in events:
        if event[0] == "validation":
            begins = [index for index, (kind, *_) in enumerate(kept) if kind == "validation"]
            ends = [index for index, (kind, *_) in enumerate(kept) if kind == "val_loss"]
            if begins and (not ends or ends[-1] < begins[-1]):
                del kept[begins[-1] :]
        kept.append(event)
    return kept


SETTINGS = {
    "plain": {},
    "validation twice per epoch": {"val_check_interval": 0.5},
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation, validation within": {"accumulate_grad_batches": 4, "val_check_interval": 0.5},
    "no validation": {"limit_val_batches": 0},
    "validation every second epoch": {"check_val_every_n_epoch": 2},
    "max_steps": {"max_steps": 2 * NUM_STEPS + 3, "max_epochs": -1},
}
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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Models that were trained without interruption, by their class, scheduler and settings."""
    trained = {}

    def model(cls=Model, scheduler="step", name="plain"):
        if (cls, scheduler, name) not in trained:
            trained[cls, scheduler, name] = cls(scheduler)
            fit(tmp_path_factory.mktemp("reference"), trained[cls, scheduler, name], **SETTINGS[name])
        return trained[cls, scheduler, name]

    return model


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_an_interrupted_run_and_its_continuation_make_a_whole_one(tmp_path, uninterrupted, name, moment):
    """Losses, learning rates, validations and epoch ends are those of an uninterrupted run, in the same order."""
    settings = SETTINGS[name]
    reference, model = uninterrupted(name=name), Model()
    if is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment]), **settings):
        (saved,) = (tmp_path / "run").glob("interrupted-*.ckpt")
        model = continued(model)
        fit(tmp_path / "run", model, ckpt_path=saved, **settings)
    assert whole(model.events) == reference.events
    assert torch.equal(model.line.weight, reference.line.weight)


def continued(model):
    """A new model that goes on with the notes of another."""
    successor = Model(model.scheduler)
    successor.events = model.events
    return successor


@pytest.mark.parametrize("scheduler", ["epoch", "plateau"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_schedulers_go_on(tmp_path, uninterrupted, scheduler, moment):
    """Schedulers that step by epoch, with or without a metric, have the same learning rates as without interruption."""
    reference, model = uninterrupted(scheduler=scheduler), Model(scheduler)
    if is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment])):
        model = continued(model)
        fit(tmp_path / "run", model, ckpt_path=newest_checkpoint(tmp_path / "run"))
    assert whole(model.events) == reference.events


class Shuffled(Model):
    """The same in a random order, with dropout, and noise that the loader draws."""

    workers = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((torch.nn.functional.dropout(x, 0.2), y), batch_idx)

    def train_dataloader(self):
        dataset = loader(NUM_TRAIN, 1).dataset
        collate = noisy if self.workers == 0 else None
        return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=self.workers, collate_fn=collate)


class ShuffledInWorkers(Shuffled):
    """The same without noise, with workers."""

    workers = 1


def noisy(samples):
    """Batches with a little noise from each of the libraries."""
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.randn(1) + np.random.rand() + random.random(), y


@pytest.mark.parametrize("cls", [Shuffled, ShuffledInWorkers])
@pytest.mark.parametrize(
    "moment", ["a later step", "the last step of an epoch", "within a validation", "end of an epoch"]
)
def test_random_numbers_go_on(tmp_path, uninterrupted, cls, moment):
    """Order, dropout and noise of the resumed run are those of the uninterrupted one: no sample twice or left out."""
    reference, model = uninterrupted(cls), cls()
    assert is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment]))
    successor = cls()
    successor.events = model.events
    fit(tmp_path / "run", successor, ckpt_path=newest_checkpoint(tmp_path / "run"))
    assert whole(successor.events) == reference.events


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A model that was trained without interruption, with an average of its weights, on which it is validated."""
    model = Model()
    fit(tmp_path_factory.mktemp("averaged"), model, EMAWeightAveraging(decay=0.5))
    return model


@pytest.mark.parametrize("moment", MOMENTS)
def test_averaged_weights_go_on(tmp_path, averaged, moment):
    """The average of the weights, and the weights beside it, are those of an uninterrupted run."""
    model = Model()
    if is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment]), EMAWeightAveraging(decay=0.5)):
        model = continued(model)
        fit(tmp_path / "run", model, EMAWeightAveraging(decay=0.5), ckpt_path=newest_checkpoint(tmp_path / "run"))
    assert whole(model.events) == averaged.events
    assert torch.equal(model.line.weight, averaged.line.weight)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_in_the_sanity_check_there_is_nothing_to_save(tmp_path, signum):
    """A run that is interrupted before its first step leaves at once, without a checkpoint."""
    interrupt = Interrupt("on_validation_batch_start", signum=signum, in_sanity_check=True)
    assert is_interrupted(tmp_path, model := Model(), interrupt)
    assert not model.events
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_outside_of_fit_it_leaves_at_once(tmp_path, signum):
    """A validation, test or prediction saves nothing, so that nothing is waited for."""
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        callbacks=[Interrupt("on_validation_batch_start", signum=signum), SpotCheckpoint(tmp_path)],
    )
    with pytest.raises(TrainingInterrupted):
        trainer.validate(model := Model(), verbose=False)
    assert not [event for event in model.events if event[0] == "val"]


def test_two_of_its_checkpoints_are_kept(tmp_path):
    """Each interruption leaves one more checkpoint; the newest may be half uploaded, so that the one before stays."""
    for step in (2, 3, 4):
        interrupt = Interrupt("on_train_batch_start", step - 1)
        assert is_interrupted(tmp_path, Model(), interrupt, ckpt_path=newest_checkpoint(tmp_path))
    assert len(list(tmp_path.glob("interrupted-*.ckpt"))) == 2


def test_an_asynchronous_checkpoint_is_complete_before_the_training_leaves(tmp_path):
    """The process does not leave while a thread writes."""
    assert is_interrupted(tmp_path, Model(), Interrupt("on_train_batch_start", 3), plugins=[AsyncCheckpointIO()])
    assert newest_checkpoint(tmp_path) is not None


def test_handlers_stay_after_the_run(tmp_path):
    """A late signal does not end a process that is about to leave."""
    fit(tmp_path, Model(), max_epochs=1)
    for signum in STOP_SIGNALS:
        os.kill(os.getpid(), signum)
