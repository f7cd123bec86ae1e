"""Continued loggers: a restarted attempt of a job continues the run, the files and the curves of earlier attempts.

Names of runs and folders follow from the job, unless the user has set them. Attempts overlap, because an attempt
resumes from a checkpoint that is older than what was logged last: what was logged after the checkpoint is left out.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import logging
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # has no type information

from lightning_sm._lightning import (
    CSVLogger,
    ExperimentWriter,
    LightningModule,
    MLFlowLogger,
    TensorBoardLogger,
    Trainer,
    WandbLogger,
    convert_params,
    flatten_dict,
    rank_zero_experiment,
    rank_zero_only,
)
from lightning_sm._unlisted import UnlistedCallback, UnlistedCSVLogger, UnlistedMLFlowLogger
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.uploads import IGNORED

logger = logging.getLogger(__name__)

RUN_TAG = "lightning_sm.run"
# Prefix of tags for parameters that differ from those of the first attempt: MLflow refuses to change a parameter.
_CHANGED_TAG = "lightning_sm.changed."
# An MLflow server accepts longer tags than parameters, but not tags of any length.
_MAX_TAG_CHARS = 250

# The number of runs that have taken a name, so that a script with several Trainers has several runs. Each attempt makes
# its loggers in the same order, and so gets the same names.
_taken: Counter[str] = Counter()
# A logger that two fits share is continued once: the second fit must not hide what the first has logged.
_continued: WeakSet[Any] = WeakSet()


def log_folder(job: SageMakerJob, *, is_tensorboard: bool) -> Path:
    """Return the job's folder for the files of loggers: one that outlives the attempt, if the job has one."""
    if is_tensorboard and job.tensorboard_dir is not None:
        return job.tensorboard_dir
    return job.checkpoint_dir or job.host_output_dir


def default_logger(job: SageMakerJob, stated: Any, *, barebones: Any) -> tuple[str, Path] | None:
    """Return class and folder of the logger for a job whose user has chosen none; None leaves it to Lightning.

    Args:
        job: The job.
        stated: The Trainer's ``logger``.
        barebones: The Trainer's ``barebones``.
    """
    if stated not in (None, True) or barebones or (job.tensorboard_dir is None and job.checkpoint_dir is None):
        return None
    if importlib.util.find_spec("tensorboard") is not None:
        return "TensorBoardLogger", log_folder(job, is_tensorboard=True)
    if job.tensorboard_dir is not None:
        logger.warning("The job's TensorBoard output needs tensorboard, which is missing: add it to requirements.txt.")
    # Without TensorBoard, Lightning's own default is CSVLogger, too.
    return None if job.checkpoint_dir is None else ("CSVLogger", job.checkpoint_dir)


def is_fixed(folder: Any) -> bool:
    """Return whether a folder is absolute, or an address such as s3://."""
    return folder is not None and ("://" in str(folder) or Path(folder).is_absolute())


def continue_runs(trainer: Trainer, job: SageMakerJob) -> None:
    """Give the loggers of a Trainer the job's folders, and let them continue the job's runs; call it on all ranks.

    Args:
        trainer: The Trainer, before its loggers are used.
        job: The job.
    """
    for one in trainer.loggers:
        if isinstance(one, (TensorBoardLogger, CSVLogger)):
            is_tensorboard = isinstance(one, TensorBoardLogger)
            _place(one, log_folder(job, is_tensorboard=is_tensorboard))
            if job.name is not None and one._version is None:
                # Two loggers of one run may share a folder.
                kind = "tensorboard" if is_tensorboard else "csv"
                one._version = _unique(job.name, f"{kind} {os.path.join(one._root_dir, one.name)}")
            if type(one) is CSVLogger:  # a class of the user's may do anything at its first use
                one.__class__ = JobCSVLogger
        elif isinstance(one, WandbLogger):
            _continue_wandb(one, job)
        elif isinstance(one, MLFlowLogger) and job.run_key is not None:
            if one._run_id is None:
                one.tags = {RUN_TAG: _unique(job.run_key, f"mlflow {one._experiment_name}"), **(one.tags or {})}
                one._run_name = one._run_name or job.name
            if type(one) is MLFlowLogger:
                one.__class__ = JobMLFlowLogger


def comet_arguments(job: SageMakerJob, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which a ``CometLogger`` continues the job's experiment.

    Unlike other loggers, it starts the experiment when it is made, so nothing can be set later.

    Args:
        job: The job.
        given: The logger's arguments so far.
    """
    is_open = given.get("experiment_key") is None and "COMET_EXPERIMENT_KEY" not in os.environ
    if job.run_key is None or not is_open or given.get("mode") not in (None, "get_or_create"):
        return {}
    # A key has 32 to 50 letters and digits, nothing else.
    return {"experiment_key": _unique(job.run_key, "comet", between=""), "mode": "get_or_create"}


class ContinuedCurves(UnlistedCallback):
    """A callback that hides what earlier attempts logged to TensorBoard and CSV files after the step that resumes.

    It cannot be done earlier: the checkpoint to resume from is known only after the loggers have been made.
    ``SageMakerCLI`` and ``SageMakerTrainer`` add it to every job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_due = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the first step: by then, Lightning has restored the step count that it logs with."""
        self._is_due = trainer.is_global_zero

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Continue before the first step is logged."""
        if self._is_due:
            self._continue(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue before an interrupted validation, which belongs to a step that has been logged."""
        if self._is_due and not trainer.sanity_checking:
            self._continue(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped + 1)

    def _continue(self, trainer: Trainer, step: int) -> None:
        self._is_due = False
        for one in trainer.loggers:
            if one in _continued:
                continue
            _continued.add(one)
            if isinstance(one, TensorBoardLogger):
                mark_restart(one, step)
            elif isinstance(one, JobCSVLogger):
                one.experiment.drop_earlier(step)


class JobCSVLogger(UnlistedCSVLogger):
    """A ``CSVLogger`` that appends to the file of an earlier attempt, where Lightning's own removes it."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the file."""
        if self._experiment is None:
            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = _JobCSVWriter(log_dir=self.log_dir)
        return self._experiment


class _JobCSVWriter(ExperimentWriter):
    """A writer that continues a file, whose columns may change."""

    def _check_log_dir_exists(self) -> None:
        self._num_earlier = 0
        if not self._fs.isfile(self.metrics_file_path):
            return
        rows = self._read()
        self._num_earlier = len(rows)
        self._write(rows)  # without a row that a kill has cut short, and with the columns in Lightning's order

    def drop_earlier(self, step: int) -> None:
        """Remove the rows of earlier attempts at this step and after it."""
        if not self._num_earlier:
            return
        rows = self._read()
        earlier = [row for row in rows[: self._num_earlier] if int(row.get("step") or 0) < step]
        kept = earlier + rows[self._num_earlier :]
        if len(kept) < len(rows):
            self._write(kept)

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._write(self._read())

    def _read(self) -> list[dict[str, str]]:
        """Return the rows except for one that was cut short, and add their columns to those of this writer."""
        with self._fs.open(self.metrics_file_path, "r", newline="", encoding="utf-8") as file:
            text = file.read()
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        rows = list(reader)
        self.metrics_keys = sorted({*self.metrics_keys, *(reader.fieldnames or ())})
        return rows

    def _write(self, rows: list[dict[str, str]]) -> None:
        """Replace the file atomically: a kill must leave the old one or the new one."""
        # An object store replaces an object only when all of it has arrived.
        is_local = isinstance(self._fs, LocalFileSystem)
        path = self.metrics_file_path + IGNORED if is_local else self.metrics_file_path
        with self._fs.open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
        if is_local:
            os.replace(path, self.metrics_file_path)


class JobMLFlowLogger(UnlistedMLFlowLogger):
    """An ``MLFlowLogger`` that continues the run with the job's tag: the server chooses the ids of runs."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The client of the server; the first use finds or makes the run."""
        if not self._initialized and self._run_id is None:
            self._run_id = self._find_run()
            if self._run_id is not None:
                logger.info("MLflow: continuing run %s of an earlier attempt.", self._run_id)
                # The earlier attempt marked the run as failed, or could not say how it ended.
                self._mlflow_client.update_run(self._run_id, status="RUNNING")
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log the parameters; set a tag for one that the run has with another value."""
        known = self.experiment.get_run(self.run_id).data.params
        new = {}
        for name, value in flatten_dict(convert_params(params)).items():
            text = str(value)[:_MAX_TAG_CHARS]
            if known.get(name, text) == text:
                new[name] = value
            else:
                self.experiment.set_tag(self.run_id, _CHANGED_TAG + name, text)
        super().log_hyperparams(new)

    def _find_run(self) -> str | None:
        key = (self.tags or {}).get(RUN_TAG)
        experiment = self._mlflow_client.get_experiment_by_name(self._experiment_name)
        if key is None or experiment is None:
            return None
        runs = self._mlflow_client.search_runs(
            [experiment.experiment_id],
            filter_string=f"tags.`{RUN_TAG}` = '{key}'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return runs[0].info.run_id if runs else None


def _continue_wandb(one: WandbLogger, job: SageMakerJob) -> None:
    settings = one._wandb_init
    if one._save_dir is not None and not is_fixed(one._save_dir):
        one._save_dir = settings["dir"] = str(job.host_output_dir / one._save_dir)
    # A sweep's agent gives each run its id.
    is_open = settings.get("id") is None and not {"WANDB_RUN_ID", "WANDB_SWEEP_ID"} & os.environ.keys()
    if job.run_key is None or not is_open or one._experiment is not None:
        return
    one._id = settings["id"] = _unique(job.run_key, f"wandb {settings.get('project')}")
    one._name = settings["name"] = settings.get("name") or job.name


def _place(one: TensorBoardLogger | CSVLogger, folder: Path) -> None:
    """Make a relative folder relative to the job's."""
    if not is_fixed(one._root_dir):
        one._root_dir = os.path.join(folder, one._root_dir)
        if isinstance(one, CSVLogger):
            one._save_dir = one._root_dir


def _unique(name: str, where: str, between: str = "-") -> str:
    """Return the name, with a number if the script has already taken it for another run in the same place."""
    place = f"{where} {name}"
    _taken[place] += 1
    return name if _taken[place] == 1 else f"{name}{between}{_taken[place]}"


def mark_restart(one: TensorBoardLogger, step: int) -> None:
    """Begin the attempt's file with the mark at which TensorBoard hides earlier events of this step and after it.

    The mark must precede everything that this attempt has logged so far, such as hyperparameters at step 0, so the file
    is written again. ``SummaryWriter(purge_step=...)`` writes the mark, but is made before the step is known.

    Args:
        one: The logger, on rank 0.
        step: The first step that this attempt will log.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError:  # only tensorboardX is installed, whose files cannot be read here
        return
    if not isinstance(one.experiment, SummaryWriter):
        return
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader  # noqa: PLC0415

    writer: Any = one.experiment
    old = writer.file_writer
    events: list[Any] = []
    if old is not None:
        path = old.event_writer._file_name
        writer.close()
        events = [event for event in LegacyEventFileLoader(path).Load() if not event.file_version]
        with suppress(FileNotFoundError):
            one._fs.rm_file(path)
    writer.purge_step = step
    new = writer._get_file_writer()
    writer.all_writers = _MarkedWriters(writer.all_writers, step)
    for event in events:
        if not (step and _is_placeholder(event)):
            new.add_event(event, walltime=event.wall_time)
    new.flush()


class _MarkedWriters(dict[str, Any]):
    """The writers of a ``SummaryWriter``, each with a mark; ``add_scalars`` adds one for each of its curves."""

    def __init__(self, writers: Mapping[str, Any], step: int) -> None:
        super().__init__(writers)
        self._step = step

    def __setitem__(self, folder: str, writer: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415

        writer.add_event(Event(step=self._step, session_log=SessionLog(status=SessionLog.START)))
        super().__setitem__(folder, writer)


def _is_placeholder(event: Any) -> bool:
    """Return whether an event is Lightning's hp_metric of -1 at step 0, which a resumed attempt must not log again."""
    return not event.step and any(value.tag == "hp_metric" for value in event.summary.value)
