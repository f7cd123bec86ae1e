"""A job that is interrupted within an epoch and resumes matches an undisturbed job, bit by bit."""

import contextlib
import copy
import logging
import random
import runpy

import pytest
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_sm import SageMakerTrainer
from lightning_sm._lightning import LightningModule
from lightning_sm.errors import CheckpointError
from lightning_sm.job.control_folder import ControlFolder
from lightning_sm.job.variables import CONTROL_DIR
from lightning_sm.training.callbacks.spot_checkpoint import TrainingInterrupted
from lightning_sm.training.checkpoints import fits
from tests.integration.hosts import REPOSITORY
from tests.integration.interrupted_fits import BATCH_SIZE, NUM_STEPS, Interrupt, points

pytestmark = pytest.mark.usefixtures("restored_signals")

MID_EPOCH = ("on_train_batch_start", NUM_STEPS + 4)


class Net(LightningModule):
    """Two layers with dropout and a random sample order; records the steps of this process."""

    def __init__(self, lr=0.01, batch_size=BATCH_SIZE):
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.batch_size, self.steps = lr, batch_size, []
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)).double()

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def training_step(self, batch, batch_idx):
        self.steps.append((self.current_epoch, batch_idx))
        return self.loss(batch)

    def train_dataloader(self):
        return DataLoader(points(), self.batch_size, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Job:
    """One host of a job with a checkpoint folder, whose attempts run in this process."""

    def __init__(self, host):
        self.host = host
        self.begin("checkpoints")

    def begin(self, name):
        """Start another job, with an empty checkpoint folder."""
        self.checkpoints = self.host.base_dir / name
        self.host.configure(checkpoint={"LocalPath": str(self.checkpoints), "S3Uri": "s3://bucket/checkpoints"})

    def fit(self, model, *callbacks, strategy=SingleDeviceStrategy, **settings):
        """Run one attempt of a script that trains three epochs, and return the model."""
        self.host.new_process()
        seed_everything(0, verbose=False)
        model = model()
        quiet = {"accelerator": "cpu", "logger": False, "enable_model_summary": False, "enable_progress_bar": False}
        settings = {"max_epochs": 3, "strategy": strategy(torch.device("cpu")), **settings}
        self.trainer = SageMakerTrainer(**quiet, callbacks=[*callbacks], **settings)
        self.trainer.fit(model)
        return model

    def fit_twice(self, model, *callbacks, at=MID_EPOCH, make=tuple, **settings):
        """Return the models of an undisturbed job and of a job that is interrupted once.

        Args:
            model: Creates the model.
            callbacks: Callbacks of both jobs.
            at: Hook, and the number of its call, at which the job is interrupted.
            make: Creates further callbacks for each attempt.
            settings: Arguments of the Trainer.
        """
        self.begin("undisturbed")
        undisturbed = self.fit(model, *callbacks, *make(), **settings)
        self.begin("interrupted")
        with pytest.raises(TrainingInterrupted):
            self.fit(model, Interrupt(*at), *callbacks, *make(), **settings)
        return undisturbed, self.fit(model, *callbacks, *make(), **settings)


@pytest.fixture
def job(host):
    """The only host of a job."""
    return Job(host)


def check_equal(undisturbed, resumed):
    """Check that weights are equal and that the resumed attempt made the last steps of the undisturbed one."""
    for ours, theirs in zip(resumed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert 0 < len(resumed.steps) < len(undisturbed.steps)
    assert resumed.steps == undisturbed.steps[-len(resumed.steps) :]


class AfterSetup(SingleDeviceStrategy):
    """Loads checkpoints after setup, as the sharded strategies do."""

    restore_checkpoint_after_setup = True


class TestSearches:
    """LearningRateFinder and BatchSizeFinder, which train before the fit and then restore the state before it."""

    @pytest.mark.parametrize("strategy", [SingleDeviceStrategy, AfterSetup])
    def test_a_learning_rate(self, job, caplog, strategy):
        """A resumed fit does not search for a learning rate again, and uses the one that was found."""
        caplog.set_level(logging.INFO, "lightning_sm")

        def finder():
            return [LearningRateFinder(min_lr=1e-4, max_lr=1e-2, num_training_steps=20)]

        undisturbed, resumed = job.fit_twice(Net, make=finder, strategy=strategy)
        assert resumed.lr == resumed.hparams.lr == undisturbed.lr != 0.01
        check_equal(undisturbed, resumed)
        assert f"LearningRateFinder does not search again: training resumes with lr={resumed.lr}." in caplog.messages

    def test_a_batch_size(self, job):
        """A resumed fit does not search for a batch size again, and uses the one that was found."""

        def finder():
            return [BatchSizeFinder(init_val=2, steps_per_trial=2, max_trials=1)]

        undisturbed, resumed = job.fit_twice(Net, make=finder, at=("on_train_batch_start", 15))
        assert resumed.batch_size == resumed.hparams.batch_size == undisturbed.batch_size != BATCH_SIZE
        check_equal(undisturbed, resumed)

    def test_a_search_where_nothing_is_resumed(self, job):
        """In a first attempt, the finder searches once, even if the strategy loads checkpoints after setup."""
        finder = LearningRateFinder(min_lr=1e-4, max_lr=1e-2, num_training_steps=20)
        job.fit(Net, finder, strategy=AfterSetup)
        assert finder.optimal_lr is not None
        assert "on_fit_start" not in vars(finder)
        assert job.trainer.global_step == 3 * NUM_STEPS

    def test_a_checkpoint_without_what_was_found(self, job, caplog):
        """If training resumes from the user's file, which has no batch size, a warning is logged."""
        job.fit(Net)
        job.trainer.save_checkpoint(file := job.checkpoints.parent / "own.ckpt")
        job.begin("next")
        job.host.new_process()
        trainer = SageMakerTrainer(
            accelerator="cpu", logger=False, max_epochs=4, callbacks=[BatchSizeFinder(max_trials=1, steps_per_trial=1)]
        )
        trainer.fit(model := Net(), ckpt_path=file)
        assert {epoch for epoch, _ in model.steps} == {3}
        assert f"BatchSizeFinder does not search, because training resumes from {file}, which has no" in caplog.text


class Wide(Net):
    """A model with other shapes."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 9), torch.nn.Dropout(0.2), torch.nn.Linear(9, 1)).double()


# The beginning of all scripts: ``make`` creates a Trainer, and ``train`` fits it.
STAGES = """
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from lightning_sm import SageMakerTrainer
from tests.integration.interrupted_fits import Interrupt
from tests.integration.training.test_exact_resume import Net, Wide

def make(stage, **settings):
    interrupt = [Interrupt("on_train_batch_start", 9)] if stage == interrupted else []
    quiet = dict(accelerator="cpu", logger=False, enable_model_summary=False, enable_progress_bar=False)
    return SageMakerTrainer(**quiet, callbacks=[ModelCheckpoint(save_last=True), *interrupt], **settings)

def train(trainer, model):
    model.on_train_start = lambda: starts.append(trainer.global_step)
    trainer.fit(model)
"""
ON_TWO_LINES = """
model = Net()
if not result(0).exists():
    train(make(0, max_epochs=4), model)
    torch.save(model.state_dict(), result(0))
train(make(1, max_epochs=3), model)
"""
IN_A_LOOP = """
for stage, epochs in enumerate([4, 3]):
    if not result(stage).exists():
        train(make(stage, max_epochs=epochs), model := Net())
        torch.save(model.state_dict(), result(stage))
"""
IN_A_COMPREHENSION = """
def run(stage):
    train(make(stage, max_epochs=4 - stage), model := Net())
    torch.save(model.state_dict(), result(stage))

[run(stage) for stage in (0, 1) if not result(stage).exists()]
"""
ALL_AGAIN = """
for stage in (0, 1):
    train(make(stage, max_epochs=3), Net())
"""
MODELS = """
for kind in (Net, Wide):
    if not result(kind.__name__).exists():
        train(make((Net, Wide).index(kind), max_epochs=3), model := kind())
        torch.save(model.state_dict(), result(kind.__name__))
"""


class TestSeveralTrainers:
    """A script that trains in stages."""

    @pytest.fixture
    def attempt(self, job, tmp_path, monkeypatch):
        """Run an attempt of a script, and return the step at which each of its fits starts."""
        job.host.script = None
        monkeypatch.setattr(fits, "_LIBRARIES", (*fits._LIBRARIES, str(REPOSITORY)))  # skip the lines of the tests
        monkeypatch.setenv("TRAINING_JOB_NAME", "job-1")

        def attempt(script, interrupted=None):
            (tmp_path / "train.py").write_text(STAGES + script)
            job.host.new_process()
            seed_everything(0, verbose=False)
            variables = {"result": lambda stage: tmp_path / f"{stage}.pt", "interrupted": interrupted, "starts": []}
            ends = contextlib.nullcontext() if interrupted is None else pytest.raises(TrainingInterrupted)
            with ends:
                runpy.run_path(str(tmp_path / "train.py"), variables, "__main__")
            return variables["starts"]

        return attempt

    @pytest.mark.parametrize(
        "script", [ON_TWO_LINES, IN_A_LOOP, IN_A_COMPREHENSION], ids=["on two lines", "in a loop", "in a comprehension"]
    )
    def test_a_stage_that_is_skipped(self, attempt, tmp_path, script):
        """A restart that skips the first stage resumes the second one, and never from the first one's checkpoints."""
        assert attempt(script, interrupted=1) == [0, 0]
        assert attempt(script) == [8]

    @pytest.mark.parametrize("script", [ON_TWO_LINES, IN_A_LOOP], ids=["on two lines", "in a loop"])
    def test_a_stage_that_had_saved_nothing(self, attempt, job, script):
        """A stage without checkpoints starts from the beginning, not from the other stage's checkpoints."""
        attempt(script, interrupted=1)
        for path in job.checkpoints.glob("interrupted-*"):
            path.unlink()
        for path in job.checkpoints.glob("*.ckpt"):
            if torch.load(path, weights_only=True)["epoch"] < 3:
                path.unlink()
        assert attempt(script) == [0]

    def test_stages_that_are_all_made_again(self, attempt):
        """A completed fit does not train again, and the next one resumes where it was."""
        assert attempt(ALL_AGAIN, interrupted=1) == [0, 0]
        assert attempt(ALL_AGAIN) == [8]

    def test_models_in_a_loop(self, attempt):
        """Trainers that are created on the same line are told apart by the class of the model."""
        assert attempt(MODELS, interrupted=1) == [0, 0]
        assert attempt(MODELS) == [8]

    def test_a_first_attempt_says_nothing(self, attempt, caplog):
        """In a first attempt, the second Trainer of a script logs nothing about the first one's checkpoints."""
        caplog.set_level(logging.INFO, "lightning_sm")
        assert attempt(ALL_AGAIN) == [0, 0]
        assert not [
            text for text in caplog.messages if "checkpoint" in text and "ckpt" in text and "model:" not in text
        ]

    def test_a_job_with_an_edited_script(self, attempt, monkeypatch):
        """A job that continues another one resumes, although the line that creates its only Trainer has moved."""
        script = "train(make(0, max_epochs=3), Net())"
        attempt(script, interrupted=0)
        monkeypatch.setenv("TRAINING_JOB_NAME", "job-2")
        assert attempt("# edited\n" + script) == [8]

    def test_a_job_with_an_edited_script_of_several_trainers(self, attempt, monkeypatch):
        """Resuming fails if an earlier job's checkpoints are of several Trainers, none of which is on this line."""
        attempt(ON_TWO_LINES, interrupted=1)
        monkeypatch.setenv("TRAINING_JOB_NAME", "job-2")
        with pytest.raises(CheckpointError, match=r"has a checkpoint of fit 1 of the Trainer at .* this is fit 1"):
            attempt("# edited\n" + ON_TWO_LINES)


class Curriculum(Net):
    """Weights the loss by the epoch and by a random number, which are set when an epoch starts."""

    scale = 1.0

    def on_train_epoch_start(self):
        self.scale = 1 / (1 + self.current_epoch) + torch.rand(()).item()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale

    def validation_step(self, batch, batch_idx):
        self.log("weighed", self.loss(batch) * self.scale)

    def val_dataloader(self):
        return DataLoader(points(), BATCH_SIZE)


class CurriculumOfCallback(Callback):
    """Sets the scale of the loss from a callback, which counts the epochs in its state."""

    def __init__(self):
        self.num_epochs, self.scales = 0, []

    def on_train_epoch_start(self, trainer, pl_module):
        self.num_epochs += 1
        pl_module.scale = 1 / (1 + self.num_epochs) + random.random()
        self.scales.append(pl_module.scale)

    def state_dict(self):
        return {"num_epochs": self.num_epochs}

    def load_state_dict(self, state_dict):
        self.num_epochs = state_dict["num_epochs"]


class Scaled(Curriculum):
    """A ``Curriculum`` whose scale a callback sets."""

    def on_train_epoch_start(self):
        """Leave the scale to the callback."""


class Validated(Net):
    """A model with validation and test, whose metric gets worse."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.current_epoch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def val_dataloader(self):
        return DataLoader(points(), BATCH_SIZE)

    test_dataloader = val_dataloader


class TestAFitThatHadEnded:
    """Interruptions after fit."""

    @pytest.mark.parametrize(
        "settings", [{"max_epochs": 9}, {"max_epochs": 9, "val_check_interval": 0.5}, {"max_epochs": 2}]
    )
    def test_it_does_not_train_any_further(self, job, settings):
        """A fit that EarlyStopping or max_epochs ended trains no further, however often the test is interrupted."""

        def attempt(*callbacks):
            model = job.fit(Validated, EarlyStopping("val_loss", patience=2), *callbacks, **settings)
            results = []
            with contextlib.suppress(TrainingInterrupted):
                results = job.trainer.test(model, verbose=False)
            return model, results

        undisturbed, expected = attempt()
        job.begin("interrupted")
        first, results = attempt(Interrupt("on_test_batch_start", 2))
        assert (len(first.steps), results) == (len(undisturbed.steps), [])
        for _ in range(2):
            model, results = attempt(Interrupt("on_test_batch_start", 2))
            assert (model.steps, results) == ([], [])
        model, results = attempt()
        assert (model.steps, results) == ([], expected)

    def test_another_job_goes_on(self, job, monkeypatch):
        """A job that continues another one trains on, even if the other one was stopped early."""
        for name, callbacks in (("job-1", [EarlyStopping("val_loss", patience=2)]), ("job-2", [])):
            monkeypatch.setenv("TRAINING_JOB_NAME", name)
            model = job.fit(Validated, *callbacks, max_epochs=6)
            assert len(model.steps) == 3 * NUM_STEPS


class Teacher(Net):
    """Copies itself as a teacher when an epoch starts, halves the learning rate, and resets Adam."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.register_buffer("num_epochs", torch.zeros(1))

    def on_train_epoch_start(self):
        self.teacher.load_state_dict(self.layers.state_dict())
        self.num_epochs += 1
        optimizer = self.trainer.optimizers[0]
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.state.clear()

    def loss(self, batch):
        return super().loss(batch) + torch.nn.functional.mse_loss(self.layers(batch[0]), self.teacher(batch[0]))


class Backbone(Net):
    """Has a backbone that is trained later than the head."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = self.layers[0], self.layers[2]

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda one: one.requires_grad, self.parameters()), lr=self.lr)


class TestEpochStart:
    """Values that on_train_epoch_start sets, which Lightning does not call again in a resumed epoch."""

    @pytest.mark.parametrize("at", [MID_EPOCH, ("on_validation_batch_start", NUM_STEPS + 2)])
    def test_a_curriculum_of_the_model(self, job, at):
        """The rest of the epoch is trained and validated with the same values, random ones included."""
        undisturbed, resumed = job.fit_twice(Curriculum, at=at, num_sanity_val_steps=0)
        assert resumed.scale == undisturbed.scale
        check_equal(undisturbed, resumed)

    def test_a_curriculum_of_a_callback(self, job):
        """A resumed epoch calls the callback again with the state that it had before."""
        check_equal(*job.fit_twice(Scaled, make=lambda: [CurriculumOfCallback()]))

    @pytest.mark.parametrize("at", [MID_EPOCH, ("on_train_batch_start", 2 * NUM_STEPS + 2)])
    def test_gradient_accumulation(self, job, at):
        """The rest of the epoch accumulates over as many batches as its beginning."""

        def scheduler():
            return [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]

        check_equal(*job.fit_twice(Net, make=scheduler, at=at))
        assert job.trainer.global_step == NUM_STEPS + NUM_STEPS // 3 + NUM_STEPS // 2

    def test_what_the_checkpoint_restores(self, job):
        """A hook that copies weights, changes the learning rate and drops the optimizer's state takes effect once."""
        undisturbed, resumed = job.fit_twice(Teacher)
        check_equal(undisturbed, resumed)
        assert resumed.num_epochs == undisturbed.num_epochs == 3

    @pytest.mark.parametrize(
        "at", [("on_train_batch_start", NUM_STEPS + 3), ("on_train_batch_start", 2 * NUM_STEPS + 3)]
    )
    def test_averaged_weights(self, job, at):
        """StochasticWeightAveraging continues its schedule in a resumed epoch."""

        def averaging():
            return [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=3)]

        check_equal(*job.fit_twice(Net, make=averaging, at=at, max_epochs=5))

    @pytest.mark.parametrize("epoch", [1, 2])
    def test_a_backbone(self, job, epoch):
        """Layers that were unfrozen before the interruption are trained after it."""

        def finetuning():
            return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.5)]

        check_equal(
            *job.fit_twice(Backbone, make=finetuning, at=("on_train_batch_start", epoch * NUM_STEPS + 3), max_epochs=4)
        )


class ByHand(Net):
    """Accumulates gradients over four batches manually, across the ends of epochs."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.num_batches = 0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["num_batches"] = self.num_batches

    def on_load_checkpoint(self, checkpoint):
        self.num_batches = checkpoint["num_batches"]

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx) / 4)
        self.num_batches += 1
        if self.num_batches % 4 == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class TestGradients:
    """Accumulated gradients in checkpoints."""

    @pytest.mark.parametrize("batch", [1, 2, 3, 4, 6, 7])
    def test_of_manual_optimization(self, job, batch):
        """With manual optimization, no gradient is lost, whichever batches an interruption falls between."""
        check_equal(*job.fit_twice(ByHand, at=("on_train_batch_start", batch + 1), max_epochs=4))

    def test_that_are_left_at_the_end_of_an_epoch(self, job):
        """A periodic checkpoint at the end of an epoch has the gradients of the last batches."""
        job.begin("undisturbed")
        undisturbed = job.fit(ByHand, max_epochs=4)
        job.begin("killed")
        job.fit(ByHand, max_epochs=1)
        check_equal(undisturbed, job.fit(ByHand, max_epochs=4))

    def test_of_a_checkpoint_within_an_accumulation(self, job):
        """A periodic checkpoint at a validation within an accumulation has the gradients of the batches before."""
        settings = {"accumulate_grad_batches": 4, "val_check_interval": 5, "num_sanity_val_steps": 0}

        def keep():
            return [ModelCheckpoint(filename="{epoch}-{step}", save_top_k=-1, monitor="val_loss", every_n_epochs=1)]

        job.begin("undisturbed")
        undisturbed = job.fit(Validated, *keep(), **settings)
        job.begin("killed")
        with pytest.raises(RuntimeError, match="killed"):
            job.fit(Validated, *keep(), Fail("on_train_batch_start", 6), **settings)
        assert list(job.checkpoints.glob("*.ckpt"))
        check_equal(undisturbed, job.fit(Validated, *keep(), **settings))

    def test_there_are_none_after_a_step(self, job):
        """Without accumulation, checkpoints contain no gradients."""
        job.fit(Net)
        for path in job.checkpoints.glob("*.ckpt"):
            assert torch.load(path, weights_only=True)["lightning_sm.mid_epoch"]["gradients"] == {}


class DrawsAtEpochEnds(Net):
    """Draws random numbers at both ends of an epoch; the first one scales the loss of the epoch's steps."""

    def on_train_epoch_start(self):
        self.share = float(torch.rand(()))

    def training_step(self, batch, batch_idx):
        return self.share * super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        torch.rand(())


class TestRandomNumbers:
    """Random numbers of the training process."""

    def test_of_hooks_after_a_checkpoint_of_an_epochs_end(self, job):
        """Hooks and the next epoch's sample order draw the same random numbers as without an interruption."""
        job.begin("undisturbed")
        undisturbed = job.fit(DrawsAtEpochEnds)
        job.begin("stopped")
        job.fit(DrawsAtEpochEnds, max_epochs=1)
        check_equal(undisturbed, job.fit(DrawsAtEpochEnds))

    def test_after_a_validation(self, job):
        """Counting a validation's batches, which a resume does not repeat, draws no random numbers."""
        settings = {"val_check_interval": 3, "num_sanity_val_steps": 0, "enable_checkpointing": False}
        check_equal(*job.fit_twice(Validated, at=("on_train_batch_start", NUM_STEPS + 4), **settings))


class Fail(Interrupt):
    """Fails in the n-th call of a hook."""

    def __init__(self, hook, number):
        super().__init__(hook, number)
        count = getattr(self, hook)

        def fail(*args):
            if self.left == 1:
                raise RuntimeError("killed")
            count(*args)

        setattr(self, hook, fail)


class EndsBatches(Net):
    """Changes its weights at the end of each batch, after the callbacks have saved."""

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            self.layers[0].weight *= 0.9


class TestAPeriodicCheckpointOfTheSameStep:
    """An interruption while a ModelCheckpoint saves."""

    @pytest.mark.parametrize("model", [Net, EndsBatches])
    def test_the_interruption_saves_its_own(self, job, tmp_path, monkeypatch, model):
        """The step is saved again with the changes since, and the launcher waits for the upload of the later file."""
        (control := tmp_path / "control").mkdir()
        monkeypatch.setenv(CONTROL_DIR.name, str(control))

        def keep():
            return [ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)]

        check_equal(*job.fit_twice(model, make=keep, at=("on_save_checkpoint", 2)))
        assert ControlFolder(control).saved() == [job.checkpoints / "interrupted-epoch=1-step=8.ckpt"]


class Logged(Validated):
    """Logs the loss per step and per epoch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Notes(Callback):
    """Records the last validation's metric as seen at the start of each batch."""

    def __init__(self):
        self.values = {}

    def on_train_batch_start(self, trainer, *_):
        self.values[trainer.global_step] = trainer.callback_metrics.get("val_loss", torch.tensor(-1.0)).item()


class TestMetrics:
    """Metrics of the epoch and of the last validation."""

    @pytest.mark.parametrize("at", [MID_EPOCH, ("on_train_batch_start", NUM_STEPS + 2)])
    def test_those_of_the_last_validation_are_there(self, job, at):
        """A resumed fit has the last validation's metrics, which ReduceLROnPlateau or ModelCheckpoint may need."""
        notes = []

        def note():
            notes.append(Notes())
            return [notes[-1]]

        settings = {"val_check_interval": 3, "num_sanity_val_steps": 0}
        check_equal(*job.fit_twice(Logged, make=note, at=at, **settings))
        whole, _, rest = notes
        assert rest.values == {step: value for step, value in whole.values.items() if step in rest.values}

    @pytest.mark.parametrize("at", [MID_EPOCH, ("on_validation_batch_start", 2 * NUM_STEPS + 3)])
    def test_the_log_says_that_those_of_the_epoch_cover_a_part(self, job, caplog, at):
        """A resumed epoch logs that its metrics cover only the remaining batches: earlier values are not saved."""
        job.fit_twice(Logged, at=at, val_check_interval=3, num_sanity_val_steps=0)
        assert caplog.text.count("its metrics cover only the remaining batches") == 1

    def test_a_fit_that_had_ended_has_its_last_values(self, job):
        """A script finds its metrics after a completed fit, even if a restart does not train any further."""
        job.fit(Logged)
        expected = {name: value.item() for name, value in job.trainer.callback_metrics.items()}
        job.fit(Logged)
        found = {name: value.item() for name, value in job.trainer.callback_metrics.items()}
        assert found["val_loss"] == expected["val_loss"]
        assert found["loss_epoch"] == expected["loss_epoch"]
