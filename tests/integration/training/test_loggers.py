"""Loggers that go on: what a restarted attempt adds to the runs, files and curves of the attempts before."""

import csv
import io
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path

import fsspec
import pytest
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from lightning_sm import SageMakerCLI, SageMakerJob, SageMakerTrainer
from lightning_sm.training.loggers import JobCSVLogger, comet_arguments, mark_restart
from tests.fakes.small_app import SmallData, SmallModel

JOB = "seven"
QUIET = {"accelerator": "cpu", "enable_model_summary": False, "log_every_n_steps": 1}

pytestmark = pytest.mark.usefixtures("restored_signals")


@pytest.fixture
def job(host, monkeypatch):
    """A host of a job with a checkpoint folder, which outlives an attempt."""
    monkeypatch.setenv("TRAINING_JOB_NAME", JOB)
    # TensorBoard reads files in the order of their names, here all of one second and one process: "9" and then "10".
    monkeypatch.setattr(event_file_writer._global_uid, "_value", 1000)
    return host.configure(checkpoint={"LocalPath": str(host.base_dir / "ck")})


class Model(SmallModel):
    """Logs in each step, with TensorBoard also a curve in a folder of its own.

    Args:
        fails_at: Step at which it fails, like a host that is taken away.
        stops_in: Epoch in whose validation it is interrupted.
        hyperparameters: What it logs as its hyperparameters.
    """

    def __init__(self, fails_at=None, stops_in=None, **hyperparameters):
        super().__init__()
        self.save_hyperparameters({"lr": 0.1, **hyperparameters})
        self.fails_at, self.stops_in = fails_at, stops_in

    def validation_step(self, batch, batch_idx):
        if self.current_epoch == self.stops_in and not self.trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGUSR2)
        super().validation_step(batch, batch_idx)

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails_at:
            raise RuntimeError("taken away")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        for one in self.loggers:
            if isinstance(one, TensorBoardLogger):
                one.experiment.add_scalars("both", {"a": 1.0}, self.global_step)
        return loss


def attempt(host, model=None, *, every=3, ends_with=None, **settings):
    """Do what the script does in one attempt; it saves a checkpoint every few steps, and has two steps an epoch."""
    host.new_process()
    callbacks = [ModelCheckpoint(every_n_train_steps=every, save_top_k=-1)]
    trainer = SageMakerTrainer(**QUIET, **{"max_epochs": 4, "callbacks": callbacks, **settings})
    with pytest.raises(ends_with) if ends_with else nullcontext():
        trainer.fit(model or Model(), datamodule=SmallData())
    return trainer


def curve(folder, tag="loss"):
    """Steps of a TensorBoard curve, as TensorBoard shows it."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def rows(path, column="loss"):
    """Steps of the rows of a CSV file that have a value in a column."""
    with Path(path).open(encoding="utf-8") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row[column]]


class TestCurves:
    """TensorBoard and CSV show each step once."""

    @pytest.mark.parametrize(("fails_at", "every"), [(5, 3), (4, 2), (5, 4), (2, 3)])
    def test_a_resumed_attempt_goes_on_where_its_checkpoint_is(self, job, fails_at, every):
        """It neither repeats a step nor leaves one out, wherever the checkpoint lies, also at the start."""
        both = {"logger": [TensorBoardLogger("logs"), CSVLogger("logs")]}
        attempt(job, Model(fails_at), every=every, ends_with=RuntimeError, **both)
        trainer = attempt(job, every=every, logger=[TensorBoardLogger("logs"), CSVLogger("logs")])
        board, table = (Path(one.log_dir) for one in trainer.loggers)
        assert board == table == job.base_dir / "ck" / "logs" / "lightning_logs" / JOB
        assert curve(board) == list(range(8))
        assert curve(board / "both_a", "both") == list(range(8))
        assert curve(board, "hp_metric") == [0]
        assert rows(table / "metrics.csv") == list(range(8))

    def test_a_validation_that_is_repeated_loses_no_step(self, job):
        """What the step before it has logged stays, and the validation is logged once."""
        attempt(job, Model(stops_in=1), logger=CSVLogger("csv"), ends_with=SystemExit)
        trainer = attempt(job, logger=CSVLogger("csv"))
        table = Path(trainer.logger.log_dir, "metrics.csv")
        assert rows(table) == list(range(8))
        assert rows(table, "val_score") == [1, 3, 5, 7]

    def test_a_run_that_was_not_interrupted_shows_all_that_it_logged(self, job):
        """Also what was logged before the first step, at step 0."""

        class Announcing(Model):
            def on_fit_start(self):
                self.logger.log_metrics({"before": 1.0}, 0)

        trainer = attempt(job, Announcing())
        folder = Path(trainer.logger.log_dir)
        assert curve(folder, "before") == curve(folder, "hp_metric") == [0]
        assert len(list(folder.glob("events.*"))) == 1

    def test_a_second_fit_hides_nothing_of_the_first(self, job):
        """They share a logger, as in a script that tunes and then trains."""
        shared = CSVLogger("csv")
        attempt(job, logger=shared, max_epochs=2)
        attempt(job, logger=shared, max_epochs=1)
        assert rows(Path(shared.log_dir, "metrics.csv"))[:4] == [0, 1, 2, 3]


class TestCSV:
    """The file of an earlier attempt."""

    def test_a_row_that_a_kill_has_torn_is_left_out(self, job):
        """The rest stays, in whatever order its columns are."""
        path = job.base_dir / "metrics.csv"
        path.write_text("step,loss,old\n0,0.5,1\n1,0.4,2\n1")
        JobCSVLogger(job.base_dir, name="", version="").log_metrics({"loss": 0.3}, 2)
        JobCSVLogger(job.base_dir, name="", version="").experiment.drop_earlier(1)
        assert path.read_text().split() == ["loss,old,step", "0.5,1,0"]

    def test_columns_may_be_new(self, job):
        """Rows of the first attempt keep theirs."""
        attempt(job, Model(fails_at=5), ends_with=RuntimeError, logger=CSVLogger("csv"))

        class More(Model):
            def on_train_batch_end(self, *_):
                self.log("more", 1.0)

        trainer = attempt(job, More(), logger=CSVLogger("csv"))
        table = Path(trainer.logger.log_dir, "metrics.csv")
        assert rows(table, "loss") == list(range(8))
        assert rows(table, "more") == [3, 4, 5, 6, 7]
        assert [path.name for path in table.parent.iterdir() if "ignore" in path.name] == []


class TestObjectStores:
    """Files in a store that knows whole objects only; fsspec's in memory stands for S3."""

    def test_both_kinds_of_files_go_on(self, job):
        """The second attempt begins at step 2: TensorBoard and the table show each step once."""
        for steps in ((0, 1, 2, 3), (2, 3, 4)):
            table = JobCSVLogger("memory://bucket/csv", version=JOB)
            board = TensorBoardLogger("memory://bucket/tb", version=JOB)
            board.log_hyperparams({"lr": 0.1})
            table.experiment.drop_earlier(steps[0])
            mark_restart(board, steps[0])
            for step in steps:
                for one in (table, board):
                    one.log_metrics({"loss": float(step)}, step)
                    one.save()
            board.finalize("success")
        text = fsspec.filesystem("memory").cat(table.experiment.metrics_file_path).decode()
        assert [int(row["step"]) for row in csv.DictReader(io.StringIO(text))] == list(range(5))
        assert curve(board.log_dir) == list(range(5))
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


class TestNames:
    """What the job chooses, and what it leaves to the user."""

    def test_the_default_logger_outlives_the_attempt(self, job):
        """It writes beside the checkpoints; with a TensorBoard output, there."""
        assert attempt(job, max_epochs=1).logger.log_dir == str(job.base_dir / "ck" / "lightning_logs" / JOB)
        job.configure(
            checkpoint={"LocalPath": str(job.base_dir / "ck")}, tensorboard={"LocalPath": str(job.base_dir / "tb")}
        )
        assert attempt(job, max_epochs=1).logger.log_dir == str(job.base_dir / "tb" / "lightning_logs" / JOB)

    def test_runs_of_one_script_stay_apart(self, job):
        """The second Trainer with the same folder has a number, the same in each attempt."""
        job.new_process()
        names = [SageMakerTrainer(**QUIET).logger.version for _ in range(2)]
        other = SageMakerTrainer(**QUIET, logger=CSVLogger("other")).logger.version
        assert (names, other) == ([JOB, f"{JOB}-2"], JOB)

    def test_what_the_user_has_set_stays(self, job):
        """Version and absolute folder."""
        folder = job.base_dir / "mine"
        own = [TensorBoardLogger(folder, version=3), CSVLogger(folder, version="x")]
        trainer = SageMakerTrainer(**QUIET, logger=own)
        assert [one.log_dir for one in trainer.loggers] == [
            str(folder / "lightning_logs" / "version_3"),
            str(folder / "lightning_logs" / "x"),
        ]

    def test_a_job_without_a_name_leaves_lightnings(self, host):
        """SDK local mode of old names none."""
        trainer = SageMakerTrainer(**QUIET, logger=CSVLogger(host.configure().base_dir / "mine"))
        assert trainer.logger.version == 0


class TestRuns:
    """Runs at services for experiments."""

    @pytest.mark.proof
    @pytest.mark.filterwarnings("default")  # MLflow's own, of the libraries that it uses
    def test_mlflow_continues_the_run_with_the_jobs_tag(self, job, monkeypatch):
        """The second attempt adds to the run of the first; a parameter that has changed becomes a tag."""
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        store = f"sqlite:///{job.base_dir}/mlflow.db"
        attempt(job, Model(fails_at=5), ends_with=RuntimeError, logger=MLFlowLogger(tracking_uri=store))
        logger = attempt(job, Model(lr=0.2, new=1), logger=MLFlowLogger(tracking_uri=store)).logger
        client = logger.experiment
        (run,) = client.search_runs([logger.experiment_id])
        assert (run.info.run_id, run.info.status, run.info.run_name) == (logger.run_id, "FINISHED", JOB)
        assert run.data.params == {"lr": "0.1", "new": "1"}
        assert run.data.tags["lightning_sm.changed.lr"] == "0.2"
        # What was logged after the checkpoint is there twice: MLflow has no way to take it back.
        assert [one.step for one in client.get_metric_history(run.info.run_id, "loss")] == [0, 1, 2, 3, 4, *range(3, 8)]
        # A job of the same name in another account, whose ARN differs, has its own.
        monkeypatch.setenv("TRAINING_JOB_ARN", "arn:aws:sagemaker:eu-west-1:1:training-job/seven")
        other = attempt(job, logger=MLFlowLogger(tracking_uri=store)).logger
        assert other.run_id != logger.run_id

    @pytest.mark.proof
    def test_wandb_resumes_the_run_of_the_job(self, job, monkeypatch):
        """Each attempt has the same id, and its files lie where they are kept; a Trainer more has another one."""
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
        """The user's, or that of a sweep's agent."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        own = WandbLogger(offline=True, save_dir=job.base_dir, **arguments)
        trainer = SageMakerTrainer(**QUIET, logger=own)
        assert trainer.logger.version == expected
        assert trainer.logger.save_dir == str(job.base_dir)

    def test_comet_gets_the_jobs_key_when_it_is_made(self, job):
        """Letters and digits, as many as Comet takes; a key or a mode of the user's stays."""
        facts = SageMakerJob.from_environment()
        arguments = comet_arguments(facts, {"project": "digits"})
        assert arguments == {"experiment_key": facts.run_key, "mode": "get_or_create"}
        second = comet_arguments(facts, {})["experiment_key"]
        assert second.isalnum()
        assert 32 <= len(second) <= 50
        assert second != facts.run_key
        assert comet_arguments(facts, {"experiment_key": "mine"}) == {}
        assert comet_arguments(facts, {"mode": "create"}) == {}

    def test_comet_in_the_configuration_of_a_cli(self, job):
        """The logger's class is not needed to set its arguments."""
        entry = "{class_path: CometLogger, init_args: {project: digits}}"
        config = job.make(f"--trainer.logger={entry}", cli=WithoutTrainer).config["trainer"]["logger"]["init_args"]
        run_key = SageMakerJob.from_environment().run_key
        assert (config["experiment_key"], config["mode"], config["project"]) == (run_key, "get_or_create", "digits")


class WithoutTrainer(SageMakerCLI):
    """Makes no Trainer, whose logger is not installed here."""

    def instantiate_classes(self):
        """Leave it at the configuration."""


class TestCommandLine:
    """Options of loggers from hyperparameters."""

    def test_flush_secs(self, job):
        """What TensorBoard's writer takes, beyond the logger's own arguments."""
        options = ["TensorBoardLogger", "save_dir=tb", "flush_secs=5", "max_queue=3"]
        cli = job.make(*(f"--trainer.logger{'=' if i == 0 else '.'}{text}" for i, text in enumerate(options)))
        writer = cli.trainer.logger.experiment
        assert (writer.flush_secs, writer.max_queue) == (5, 3)
        writer.close()

    def test_a_logger_of_the_scripts_own_options(self, job):
        """As in published scripts that pass the Trainer a TensorBoardLogger with options of its own."""

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
