"""StepTimes finds the part of a step that was made slow, in trainings of every kind."""

import csv
import logging
import pickle
import time
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.job.variables import RECORD_DIR
from lightning_sm.record import events
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures
from lightning_sm.timing.step_times import StepTimes, _num_samples

LONG_S = 0.05


def work():
    """Sleep for ``LONG_S``."""
    time.sleep(LONG_S)


class Slow(torch.utils.data.Dataset):
    """A dataset with slow samples."""

    def __init__(self, length=6):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        work()
        return torch.ones(2)


class SlowSGD(torch.optim.SGD):
    """An optimizer with slow steps."""

    def step(self, closure=None):
        loss = super().step(closure)
        work()
        return loss


class SlowBackward(torch.autograd.Function):
    """An identity function with a slow backward pass."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        work()
        return gradient


class Model(LightningModule):
    """A model that is slow in the part of a step that ``slow`` names."""

    optimizer = torch.optim.SGD
    slow = ""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.slow == "to_device":
            work()
        return batch

    def loss(self, batch):
        loss = self.line(batch).mean()
        return SlowBackward.apply(loss) if self.slow == "backward" else loss

    def training_step(self, batch, batch_idx):
        if self.slow == "forward":
            work()
        return self.loss(batch)

    def on_train_batch_end(self, *_):
        if self.slow == "other":
            work()

    def configure_optimizers(self):
        return (SlowSGD if self.slow == "optimizer" else torch.optim.SGD)(self.parameters(), 0.1)


class Manual(Model):
    """A model that steps two optimizers itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            work()
            loss = self.line(batch).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1), SlowSGD(self.parameters(), 0.1)]


class Iterating(Model):
    """A model that fetches its batches from the loader itself."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        work()
        return self.line(batch).mean()


class SeveralLoaders(Model):
    """A model that uses a batch from each of two loaders in a step."""

    def training_step(self, batch, batch_idx):
        return self.line(batch["a"]).mean() + self.line(batch["b"]).mean()


@pytest.fixture
def fit(tmp_path, caplog):
    """Train and return the measured totals."""
    caplog.set_level(logging.INFO, "lightning_sm")

    def run(model, *loaders, job=None, fails=False, ckpt_path=None, **settings):
        times = StepTimes(job)
        model.times = times
        callbacks = [times, *settings.pop("callbacks", ())]
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        defaults = {"max_epochs": 1, "logger": False, "accelerator": "cpu", "default_root_dir": tmp_path, **quiet}
        trainer = Trainer(**{**defaults, **settings}, callbacks=callbacks)
        if fails:
            with pytest.raises(ValueError, match="the end"):
                trainer.fit(model, *loaders, ckpt_path=ckpt_path)
        else:
            trainer.fit(model, *loaders, ckpt_path=ckpt_path)
        return times.totals

    return run


@pytest.fixture
def job(tmp_path):
    """A job whose record is in a temporary folder."""
    groups = (InstanceGroup("trainer", ("algo-1",)),)
    return SageMakerJob("algo-1", ("algo-1",), groups, "test", base_dir=tmp_path, checkpoint_dir=tmp_path / "kept")


def lines(job, kind):
    """Read the lines of one kind from rank 0's record."""
    path = events.record_folder(job) / "1" / "algo-1-rank-0.jsonl"
    return [line for line in events.read_lines(path.read_bytes()) if isinstance(line, kind)]


def fast():
    """Create a loader with fast batches."""
    return DataLoader(torch.ones(6, 2), 1)


@pytest.mark.parametrize("part", ["to_device", "forward", "backward", "optimizer", "other", "data_wait"])
def test_what_takes_long_is_found(fit, part):
    """The slow part has the most time over five steps; the first step is not timed."""
    model = Model()
    model.slow = part
    totals = fit(model, DataLoader(Slow(), 1) if part == "data_wait" else fast())
    assert totals.num_steps == 5
    assert totals.samples == 5
    assert totals.parts[part] >= 5 * LONG_S
    assert totals.parts[part] == max(totals.parts.values())


@pytest.mark.parametrize("slow", ["backward", "optimizer"])
def test_accumulated_gradients(fit, slow):
    """Each batch is a step, but the optimizer steps only in every third."""
    model = Model()
    model.slow = slow
    totals = fit(model, fast(), accumulate_grad_batches=3)
    assert totals.num_steps == 5
    assert totals.parts[slow] >= LONG_S * (5 if slow == "backward" else 2)


def test_manual_optimization_with_two_optimizers(fit):
    """Both forward passes count as forward, and the slow optimizer's steps as optimizer."""
    totals = fit(Manual(), fast())
    assert totals.parts["forward"] >= 5 * 2 * LONG_S * 0.99
    assert totals.parts["optimizer"] >= 5 * LONG_S


def test_a_training_step_that_fetches_its_batches(fit):
    """Fetching a batch in training_step counts as waiting for data, and the rest as the forward pass."""
    totals = fit(Iterating(), DataLoader(Slow(), 1))
    assert totals.parts["data_wait"] >= 4 * LONG_S
    assert totals.parts["forward"] >= 4 * LONG_S


def test_several_loaders(fit):
    """The wait for data includes the wait for each loader."""
    totals = fit(SeveralLoaders(), {"a": DataLoader(Slow(), 1), "b": DataLoader(Slow(), 1)})
    assert totals.parts["data_wait"] >= 5 * 2 * LONG_S


def test_a_validation_and_a_checkpoint_are_no_part_of_steps(fit, job):
    """Validations and checkpoints are separate spans, and a checkpoint within a validation counts once."""

    class Saves(Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                trainer.save_checkpoint(job.base_dir / "model.ckpt")

    class Validated(Model):
        def validation_step(self, batch, batch_idx):
            time.sleep(0.1)
            self.log("val_loss", self.line(batch).mean())

    totals = fit(Validated(), fast(), fast(), job=job, callbacks=[Saves()])
    (validation_s,) = [span.seconds for span in lines(job, events.Span) if span.name == "validation"]
    assert validation_s >= 0.6 > totals.wall_s
    assert {span.name for span in lines(job, events.Span)} >= {"startup", "first_batch", "validation", "checkpoint"}
    (saved,) = [event for event in lines(job, events.Event) if event.what == "checkpoint_saved"]
    assert saved.text == f"step 6 in {job.base_dir / 'model.ckpt'}"
    assert lines(job, events.Metrics)[0].values.keys() == {"val_loss"}


def test_lines_of_the_record_sum_up(fit, job):
    """The record's lines add up to all steps and their time."""
    totals = fit(Model(), DataLoader(Slow(80), 1), job=job)
    steps = lines(job, events.Steps)
    assert len(steps) >= 2
    assert sum(line.n for line in steps) == totals.num_steps == 79
    assert [line.untimed for line in steps] == [1] + [0] * (len(steps) - 1)
    assert sum(line.wall_s for line in steps) == pytest.approx(totals.wall_s)
    for line in steps:
        assert not line.gpu_parts
    (loader,) = lines(job, events.Loader)
    assert (loader.workers, loader.ranks_of_host) == (0, 1)
    assert lines(job, events.End)[-1].outcome == "succeeded"


@pytest.mark.parametrize("steps", [4, 6, 9], ids=["within an epoch", "at its end", "within the next one"])
def test_the_steps_of_a_run_that_was_resumed(fit, job, tmp_path, steps):
    """After a resume, steps are counted correctly wherever the checkpoint was saved.

    The first step after each start is never timed, even if the start is between two epochs, which was once wrong.
    """

    class SavesAndFails(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == steps + 2:
                raise ValueError("the end")

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == steps and steps % 6:
                trainer.save_checkpoint(tmp_path / "model.ckpt")

        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.global_step == steps:
                trainer.save_checkpoint(tmp_path / "model.ckpt")

    fit(Model(), fast(), job=job, callbacks=[SavesAndFails()], max_epochs=2, fails=True)
    fit(Model(), fast(), job=job, max_epochs=2, ckpt_path=tmp_path / "model.ckpt")
    run = Figures(read_run(tmp_path))
    assert (len(run.attempts), run.num_steps, run.restarts[0].num_repeated) == (2, 12, 2)
    assert (run.pace.num_untimed, run.pace.num_trained) == (2, 14)


def test_several_trainers_of_a_script_are_no_restarts(fit, job, tmp_path, monkeypatch):
    """As in cross-validation, each Trainer begins at step 0, without repeating the steps of the one before."""
    monkeypatch.setenv(RECORD_DIR.name, str(events.record_folder(job) / "1"))
    for _ in range(3):
        fit(Model(), fast(), job=job)
    run = Figures(read_run(tmp_path))
    assert (len(run.attempts), run.restarts) == (1, [])
    assert (run.pace.num_untimed, run.pace.num_trained) == (3, 18)


def test_loggers_get_the_parts_in_milliseconds(fit, tmp_path):
    """Loggers get the mean time of each part every ``log_every_n_steps``, and their sum as the step time."""
    fit(Model(), DataLoader(Slow(), 1), logger=CSVLogger(tmp_path), log_every_n_steps=2)
    (path,) = tmp_path.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(path.read_text().splitlines()) if row["time/step_ms"]]
    assert len(rows) == 2
    for row in rows:
        parts = [float(row[f"time/{name}_ms"]) for name in events.PARTS]
        assert sum(parts) == pytest.approx(float(row["time/step_ms"]))
        assert parts[0] >= 1e3 * LONG_S
        assert float(row["time/input_bound"]) == pytest.approx(parts[0] / sum(parts))


def test_the_record_of_a_run_that_fails_says_why(fit, job):
    """The record of a failed run has the reason, and the steps before the failure."""

    class Fails(Model):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise ValueError("the end")
            return super().training_step(batch, batch_idx)

    fit(Fails(), fast(), job=job, fails=True)
    assert sum(line.n + line.untimed for line in lines(job, events.Steps)) == 4
    end = lines(job, events.End)[-1]
    assert (end.outcome, end.reason) == ("failed", "ValueError: the end")
    assert [event.what for event in lines(job, events.Event)] == ["failure"]


def test_nothing_is_left_of_it_in_the_trainer(fit):
    """After a fit, even a second one, Lightning's methods are restored and the optimizers have no hooks."""
    model = Model()
    for _ in range(2):
        totals = fit(model, fast())
        assert totals.num_steps == 5
    loop = model.trainer.fit_loop.epoch_loop
    assert not {"_on_before_fetch", "_on_after_fetch"} & vars(loop).keys()
    assert "run" not in vars(loop.val_loop)
    assert "save_checkpoint" not in vars(model.trainer)
    assert not model.trainer.optimizers[0]._optimizer_step_post_hooks
    pickle.dumps(model.times)


def test_a_method_that_other_code_replaced_before_is_put_back(fit):
    """A fit puts back a method of the Trainer that other code had replaced."""

    def own_save(*_args, **_kwargs):
        """Save nothing."""

    class Replaces(Model):
        def setup(self, stage):
            self.trainer.save_checkpoint = own_save

    model = Replaces()
    fit(model, fast())
    assert model.trainer.save_checkpoint is own_save


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        (torch.ones(4, 2), 4),
        ({"a": [torch.ones(3), 1], "b": 2}, 3),
        ((torch.ones(5), torch.ones(1)), 5),
        (torch.tensor(1.0), 0),
        ([], 0),
        ({}, 0),
        ("text", 0),
        (SimpleNamespace(x=1), 0),
        (None, 0),
    ],
)
def test_samples_of_a_batch(batch, number):
    """A batch's size is the length of its first tensor, or 0 if it has no tensor with a length."""
    assert _num_samples(batch) == number
