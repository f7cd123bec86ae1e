"""Interrupting training at any moment and resuming it gives the same result as an uninterrupted run."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from lightning_sm._lightning import Callback, Trainer
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.variables import CONTROL_DIR
from lightning_sm.training.callbacks.spot_checkpoint import STOP_SIGNALS, SpotCheckpoint, TrainingInterrupted
from lightning_sm.training.checkpoints.find_newest import newest_checkpoint
from tests.integration.interrupted_fits import (
    MOMENTS,
    NUM_STEPS,
    Interrupt,
    Model,
    fit,
    is_interrupted,
    resumed,
    successor_of,
    whole,
)

pytestmark = pytest.mark.usefixtures("restored_signals")

SETTINGS = {
    "plain": {},
    "validation twice per epoch": {"val_check_interval": 0.5},
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation, validation within": {"accumulate_grad_batches": 4, "val_check_interval": 0.5},
    "no validation": {"limit_val_batches": 0},
    "validation every second epoch": {"check_val_every_n_epoch": 2},
    "max_steps": {"max_steps": 2 * NUM_STEPS + 3, "max_epochs": -1},
    "epochs of one step": {"limit_train_batches": 1, "max_epochs": 8},
    "epochs of one step, rare validation": {"limit_train_batches": 1, "check_val_every_n_epoch": 3, "max_epochs": 8},
    "epochs of one step, validation by steps": {
        "limit_train_batches": 1,
        "check_val_every_n_epoch": None,
        "val_check_interval": 3,
        "max_steps": 8,
        "max_epochs": -1,
    },
    "epochs of one accumulation, no validation": {
        "limit_train_batches": 2,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 0,
        "max_steps": 8,
        "max_epochs": -1,
    },
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Models trained without interruption, by class, scheduler and settings."""
    trained = {}

    def model(cls=Model, scheduler="step", name="plain"):
        if (cls, scheduler, name) not in trained:
            trained[cls, scheduler, name] = cls(scheduler)
            fit(tmp_path_factory.mktemp("reference"), trained[cls, scheduler, name], **SETTINGS[name])
        return trained[cls, scheduler, name]

    return model


@pytest.mark.matrix
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_an_interrupted_run_and_its_continuation_make_a_whole_one(tmp_path, uninterrupted, name, moment):
    """Losses, learning rates, validations and epoch ends match an uninterrupted run, in the same order."""
    settings = SETTINGS[name]
    reference, model = uninterrupted(name=name), Model()
    if is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment]), **settings):
        (saved,) = (tmp_path / "run").glob("interrupted-*.ckpt")
        model = successor_of(model)
        fit(tmp_path / "run", model, ckpt_path=saved, **settings)
    assert whole(model.events) == reference.events
    assert torch.equal(model.line.weight, reference.line.weight)


@pytest.mark.matrix(rows=["within a validation", "the last step of an epoch"])
@pytest.mark.parametrize("scheduler", ["epoch", "plateau"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_schedulers_resume(tmp_path, uninterrupted, scheduler, moment):
    """Schedulers that step per epoch, with or without a metric, give the learning rates of an uninterrupted run."""
    reference, model = uninterrupted(scheduler=scheduler), Model(scheduler)
    if is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment])):
        model = resumed(tmp_path / "run", model)
    assert whole(model.events) == reference.events


@pytest.mark.matrix
@pytest.mark.parametrize("scheduler", ["step", "epoch", "plateau"])
@pytest.mark.parametrize("moment", ["the last step of an epoch", "end of a validation", "end of an epoch"])
def test_schedulers_resume_between_epochs_of_one_step(tmp_path, uninterrupted, scheduler, moment):
    """A run interrupted between two epochs of one step has stepped its schedulers once per epoch."""
    name = "epochs of one step"
    reference, model = uninterrupted(scheduler=scheduler, name=name), Model(scheduler)
    assert is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment]), **SETTINGS[name])
    model = resumed(tmp_path / "run", model, **SETTINGS[name])
    assert whole(model.events) == reference.events


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("epochs of one")])
def test_epochs_of_one_step_are_left_between_them(tmp_path, name):
    """With epochs of one step, an interrupted run trains for at most one more epoch."""
    settings = SETTINGS[name]
    model = Model()
    assert is_interrupted(tmp_path, model, Interrupt("on_train_batch_start", 3), **settings)
    num_steps = sum(event[0] == "train" for event in model.events)
    assert num_steps <= 3 + settings.get("accumulate_grad_batches", 1)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A model trained without interruption, and validated on its averaged weights."""
    model = Model()
    fit(tmp_path_factory.mktemp("averaged"), model, EMAWeightAveraging(decay=0.5))
    return model


@pytest.mark.matrix(rows=["within a validation", "backward"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_averaged_weights_resume(tmp_path, averaged, moment):
    """The averaged and the current weights match an uninterrupted run."""
    model = Model()
    if is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment]), EMAWeightAveraging(decay=0.5)):
        model = resumed(tmp_path / "run", model, EMAWeightAveraging(decay=0.5))
    assert whole(model.events) == averaged.events
    assert torch.equal(model.line.weight, averaged.line.weight)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_in_the_sanity_check_there_is_nothing_to_save(tmp_path, monkeypatch, signum):
    """A run interrupted before its first step exits at once, without a checkpoint.

    The launcher learns of the interruption, so that a host that was not stopped itself does not exit first.
    """
    (folder := tmp_path / "control").mkdir()
    monkeypatch.setenv(CONTROL_DIR.name, str(folder))
    interrupt = Interrupt("on_validation_batch_start", signum=signum, in_sanity_check=True)
    assert is_interrupted(tmp_path, model := Model(), interrupt)
    assert not model.events
    assert not list(tmp_path.rglob("*.ckpt"))
    assert ControlFolder(folder).saved() == []


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_outside_of_fit_it_leaves_at_once(tmp_path, signum):
    """Outside ``fit`` there is nothing to save, so an interrupted run exits at once."""
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
    """The checkpoints of the last two interruptions are kept, because the newest may be half uploaded."""
    for step in (2, 3, 4):
        interrupt = Interrupt("on_train_batch_start", step - 1)
        newest = newest_checkpoint(tmp_path)
        assert is_interrupted(tmp_path, Model(), interrupt, ckpt_path=newest and newest.path)
    assert len(list(tmp_path.glob("interrupted-*.ckpt"))) == 2


@pytest.mark.parametrize(
    "names",
    [
        ("interrupted-epoch=90-step=900.ckpt", "interrupted-epoch=95-step=950.ckpt"),
        ("interrupted-epoch=7-step=2.ckpt", "interrupted-epoch=8-step=2.ckpt"),
    ],
    ids=["later steps", "the same step of a later epoch"],
)
def test_what_it_has_just_saved_is_kept(tmp_path, names):
    """A new checkpoint is kept even if the folder has later ones, of another job or from before a rollback."""
    for name in names:
        (tmp_path / name).touch()
    assert is_interrupted(tmp_path, Model(), Interrupt("on_train_batch_end", 2))
    kept = {path.name for path in tmp_path.glob("interrupted-*.ckpt")}
    assert kept == {*names, "interrupted-epoch=0-step=2.ckpt"}


def test_each_host_removes_its_own_shards(tmp_path, monkeypatch):
    """A host without rank 0 removes old shards as well, because each host has only those of its ranks."""
    monkeypatch.setattr(Trainer, "is_global_zero", property(lambda _: False))
    older = [tmp_path / f"interrupted-epoch=0-step={step}.ckpt" for step in (0, 1)]
    for folder in older:
        folder.mkdir()
        (folder / "__8_0.distcp").touch()
    assert is_interrupted(tmp_path, Model(), Interrupt("on_train_batch_end", 2))
    assert [folder.exists() for folder in older] == [False, True]


def test_an_asynchronous_checkpoint_is_complete_before_the_training_leaves(tmp_path):
    """The process does not exit while a thread is writing the checkpoint."""
    assert is_interrupted(tmp_path, Model(), Interrupt("on_train_batch_start", 3), plugins=[AsyncCheckpointIO()])
    assert newest_checkpoint(tmp_path) is not None


@pytest.mark.parametrize("first", STOP_SIGNALS, ids=["SIGUSR2", "SIGTERM"])
def test_handlers_stay_after_the_run(tmp_path, capfd, first):
    """After ``fit``, the first signal reports that nothing is saved, and the script continues until SIGTERM."""
    fit(tmp_path, Model(), max_epochs=1)
    os.kill(os.getpid(), first)
    said = f"{first.name}: not training, so there is no checkpoint to save. The script continues until SIGTERM."
    assert said in capfd.readouterr().err
    with pytest.raises(TrainingInterrupted) as exit_of_script:
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_of_script.value.code == 143


class ForkChild(Callback):
    """Forks a child during training, sends it signals, and records its exit code."""

    def __init__(self, *signals):
        self.signals, self.exit_code = signals, None

    def on_train_start(self, *_):
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=say_and_wait, args=(is_there := fork.Event(),))
        child.start()
        is_there.wait()  # Python drops signals that arrive during a fork
        for signum in self.signals:
            os.kill(child.pid, signum)
        child.join(10)
        self.exit_code = child.exitcode
        child.kill()
        child.join()


def say_and_wait(is_there):
    """Report that the child is running, then sleep."""
    is_there.set()
    time.sleep(60)


def test_sigterm_ends_a_child_that_was_forked_within_the_training(tmp_path):
    """``Process.terminate()`` kills a child that inherited the handlers, while SIGUSR2 has no effect."""
    fit(tmp_path, Model(), child := ForkChild(signal.SIGUSR2, signal.SIGTERM), max_epochs=1)
    assert child.exit_code == -signal.SIGTERM
