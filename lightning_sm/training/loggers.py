"""Names of runs and folders of loggers, which follow from the job, unless the user has set them.

A restarted attempt so continues TensorBoard's curves, and the run of W&B.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from lightning_sm._lightning import CSVLogger, TensorBoardLogger, Trainer, WandbLogger
from lightning_sm.job.facts import SageMakerJob

logger = logging.getLogger(__name__)

# The number of runs that have taken a name, so that a script with several Trainers has several runs. Each attempt makes
# its loggers in the same order, and so gets the same names.
_taken: Counter[str] = Counter()


def log_folder(job: SageMakerJob, *, is_tensorboard: bool) -> Path:
    """Return the job's folder for the files of loggers: one that outlives the attempt, if the job has one."""
    if is_tensorboard and job.tensorboard_dir is not None:
        return job.tensorboard_dir
    return job.checkpoint_dir or job.host_output_dir


def default_logger(job: SageMakerJob, stated: Any, *, barebones: Any) -> TensorBoardLogger | CSVLogger | None:
    """Return the logger for a job whose user has chosen none; None leaves it to Lightning.

    Args:
        job: The job.
        stated: The Trainer's ``logger``.
        barebones: The Trainer's ``barebones``.
    """
    if stated not in (None, True) or barebones or (job.tensorboard_dir is None and job.checkpoint_dir is None):
        return None
    if importlib.util.find_spec("tensorboard") is not None:
        return TensorBoardLogger(log_folder(job, is_tensorboard=True))
    if job.tensorboard_dir is not None:
        logger.warning("The job's TensorBoard output needs tensorboard, which is missing: add it to requirements.txt.")
    # Without TensorBoard, Lightning's own default is CSVLogger, too.
    return None if job.checkpoint_dir is None else CSVLogger(job.checkpoint_dir)


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
            _place(one, log_folder(job, is_tensorboard=isinstance(one, TensorBoardLogger)))
        # Not for CSVLogger, which removes an earlier file of the same version: it numbers its folders itself.
        if isinstance(one, TensorBoardLogger) and job.name is not None and one._version is None:
            one._version = _unique(job.name, f"tensorboard {os.path.join(one._root_dir, one.name)}")
        elif isinstance(one, WandbLogger):
            _continue_wandb(one, job)


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


def _unique(name: str, where: str) -> str:
    """Return the name, with a number if the script has already taken it for another run in the same place."""
    place = f"{where} {name}"
    _taken[place] += 1
    return name if _taken[place] == 1 else f"{name}-{_taken[place]}"
