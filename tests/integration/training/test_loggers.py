"""Loggers in a job: their folders, and how a new attempt continues the runs and curves of earlier attempts."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from lightning_sm import SageMakerCLI, SageMakerTrainer
from tests.fakes.small_app import SmallData, SmallModel

JOB = "seven"
QUIET = {"accelerator": "cpu", "enable_model_summary": False, "log_every_n_steps": 1}

pytestmark = pytest.mark.usefixtures("restored_signals")


@pytest.fixture
def job(host, monkeypatch):
    """A host of a job with a checkpoint folder, which outlives an attempt."""
    monkeypatch.setenv("TRAINING_JOB_NAME", JOB)
    # TensorBoard reads files by name. These share second and process, so a counter from 9 to 10 would misorder them.
    monkeypatch.setattr(event_file_writer._global_uid, "_value", 1000)
    return host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")})


class Model(SmallModel):
    """Logs the loss in each step.

    Args:
        fails_at: Step at which it fails, like a host that is taken away.
    """

    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at = fails_at

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails_at:
            raise RuntimeError("taken away")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def attempt(host, model=None, *, every=3, ends_with=None, **settings):
    """Run one attempt of a script with two steps per epoch, which saves a checkpoint every few steps."""
    host.new_process()
    callbacks = [ModelCheckpoint(every_n_train_steps=every, save_top_k=-1)]
    trainer = SageMakerTrainer(**QUIET, **{"max_epochs": 4, "callbacks": callbacks, **settings})
    with pytest.raises(ends_with) if ends_with else nullcontext():
        trainer.fit(model or Model(), datamodule=SmallData())
    return trainer


def curve(folder):
    """Return the steps of a curve as TensorBoard shows them."""
    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


class TestCurves:
    """Curves of the attempts of a job."""

    def test_a_resumed_attempt_goes_on_in_the_same_folder(self, job):
        """TensorBoard shows both attempts as one curve, with the steps since the checkpoint twice."""
        attempt(job, Model(5), ends_with=RuntimeError)
        folder = Path(attempt(job).logger.log_dir)
        assert curve(folder) == [0, 1, 2, 3, 4, *range(3, 8)]
        assert len(list(folder.glob("events.*"))) == 2

    def test_tables_of_attempts_have_numbers(self, job):
        """Each attempt has a numbered CSV folder, because Lightning would delete the first attempt's file otherwise."""
        attempt(job, Model(5), ends_with=RuntimeError, logger=CSVLogger("csv"))
        table = Path(attempt(job, logger=CSVLogger("csv")).logger.log_dir)
        assert table == job.base_dir / "ck" / "csv" / "lightning_logs" / "version_1"
        assert (table.parent / "version_0" / "metrics.csv").exists()


class TestNames:
    """Names that the job chooses, and names that it leaves to the user."""

    def test_the_default_logger_outlives_the_attempt(self, job):
        """The default logger writes to the TensorBoard output if the job has one, else beside the checkpoints."""
        assert attempt(job, max_epochs=1).logger.log_dir == str(job.base_dir / "ck" / "lightning_logs" / JOB)
        job.configure(
            checkpoint={"LocalPath": str(job.base_dir / "ck")}, tensorboard={"LocalPath": str(job.base_dir / "tb")}
        )
        assert attempt(job, max_epochs=1).logger.log_dir == str(job.base_dir / "tb" / "lightning_logs" / JOB)

    def test_runs_of_one_script_stay_apart(self, job):
        """The second Trainer with the same folder gets a number, which is the same in each attempt."""
        job.new_process()
        names = [SageMakerTrainer(**QUIET).logger.version for _ in range(2)]
        other = SageMakerTrainer(**QUIET, logger=TensorBoardLogger("other")).logger.version
        assert (names, other) == ([JOB, f"{JOB}-2"], JOB)

    def test_what_the_user_has_set_stays(self, job):
        """A version and an absolute folder that the user sets are kept."""
        folder = job.base_dir / "mine"
        own = [TensorBoardLogger(folder, version=3), CSVLogger(folder, version="x")]
        trainer = SageMakerTrainer(**QUIET, logger=own)
        assert [one.log_dir for one in trainer.loggers] == [
            str(folder / "lightning_logs" / "version_3"),
            str(folder / "lightning_logs" / "x"),
        ]

    def test_a_job_without_a_name_leaves_lightnings(self, host):
        """If the job has no name, as in old versions of SDK local mode, Lightning's version number is kept."""
        trainer = SageMakerTrainer(**QUIET, logger=TensorBoardLogger(host.configure().base_dir / "mine"))
        assert trainer.logger.version == 0


class TestRuns:
    """Runs of experiment trackers."""

    @pytest.mark.proof
    def test_wandb_resumes_the_run_of_the_job(self, job, monkeypatch):
        """All attempts share a run id, and files go to the output folder; a second Trainer gets another id."""
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
        ids = []
        for _ in range(2):
            job.new_process()
            loggers = [SageMakerTrainer(**QUIET, logger=WandbLogger(offline=True)).logger for _ in range(2)]
            ids.append([one.version for one in loggers])
            first = loggers[0]
            started = {name: first._wandb_init[name] for name in ("id", "resume", "name")}
            assert started == {"id": first.version, "resume": "allow", "name": JOB}
            assert first.save_dir == first._wandb_init["dir"] == str(job.output_dir)
        assert ids[0] == ids[1]
        assert ids[0][1] == f"{ids[0][0]}-2"
        assert re.fullmatch(r"[0-9a-f]{32}", ids[0][0])

    @pytest.mark.proof
    @pytest.mark.parametrize(
        ("variables", "arguments", "expected"),
        [
            ({}, {"id": "mine"}, "mine"),
            ({}, {"version": "mine"}, "mine"),
            ({"WANDB_RUN_ID": "mine"}, {}, None),
            ({"WANDB_SWEEP_ID": "sweep"}, {}, None),
        ],
    )
    def test_an_id_that_wandb_has_stays(self, job, monkeypatch, variables, arguments, expected):
        """A run id that the user or a sweep's agent sets is kept."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        own = WandbLogger(offline=True, save_dir=job.base_dir, **arguments)
        trainer = SageMakerTrainer(**QUIET, logger=own)
        assert trainer.logger.version == expected
        assert trainer.logger.save_dir == str(job.base_dir)


class TestCommandLine:
    """Options of loggers from hyperparameters."""

    def test_flush_secs(self, job):
        """Options may set arguments of TensorBoard's writer, beyond the logger's own arguments."""
        options = ["TensorBoardLogger", "save_dir=tb", "flush_secs=5", "max_queue=3"]
        cli = job.make(*(f"--trainer.logger{'=' if i == 0 else '.'}{text}" for i, text in enumerate(options)))
        writer = cli.trainer.logger.experiment
        assert (writer.flush_secs, writer.max_queue) == (5, 3)
        writer.close()

    def test_a_logger_of_the_scripts_own_options(self, job):
        """A script may pass the Trainer a TensorBoardLogger with the script's options, as published scripts do."""

        class OwnLoggerCLI(SageMakerCLI):
            def add_arguments_to_parser(self, parser):
                parser.add_class_arguments(TensorBoardLogger, "logger")

            def instantiate_trainer(self, **kwargs):
                return super().instantiate_trainer(logger=self.config_init["logger"], **kwargs)

        cli = job.make("--logger.save_dir=tb", "--logger.flush_secs=5", "--logger.name=tutorial", cli=OwnLoggerCLI)
        logger = cli.trainer.logger
        assert logger.log_dir == str(job.base_dir / "ck" / "tb" / "tutorial" / JOB)
        assert logger.experiment.flush_secs == 5
        logger.experiment.close()
