"""Default run names and folders for loggers, derived from the job.

With these defaults, a restarted job continues the TensorBoard curves and the W&B run of its earlier attempts.
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

# Number of runs that use each name: a script with several Trainers needs several runs. Each attempt creates its loggers
# in the same order, so they get the same names.
_taken: Counter[str] = Counter()


def log_folder(job: SageMakerJob, *, is_tensorboard: bool) -> Path:
    """Return the job's folder for log files, if possible one that outlives the attempt."""
    if is_tensorboard and job.tensorboard_dir is not None:
        return job.tensorboard_dir
    return job.checkpoint_dir or job.host_output_dir


def default_logger(job: SageMakerJob, stated: Any, *, barebones: Any) -> TensorBoardLogger | CSVLogger | None:
    """Return the job's default logger, or None to leave the choice to the user or Lightning.

    Args:
        job: The job.
        stated: The Trainer's ``logger`` argument.
        barebones: The Trainer's ``barebones`` argument.
    """
    if stated not in (None, True) or barebones or (job.tensorboard_dir is None and job.checkpoint_dir is None):
        return None
    if importlib.util.find_spec("tensorboard") is not None:
        return TensorBoardLogger(log_folder(job, is_tensorboard=True))
    if job.tensorboard_dir is not None:
        logger.warning("The job has a TensorBoard output, but tensorboard is missing: add it to requirements.txt.")
    # Without TensorBoard, Lightning's default is CSVLogger, too.
    return None if job.checkpoint_dir is None else CSVLogger(job.checkpoint_dir)


def is_fixed(folder: Any) -> bool:
    """Return whether a folder is absolute, or a URL such as s3://..."""
    return folder is not None and ("://" in str(folder) or Path(folder).is_absolute())


def continue_runs(trainer: Trainer, job: SageMakerJob) -> None:
    """Move a Trainer's loggers to the job's folders, to continue earlier attempts' runs; call this on all ranks.

    Args:
        trainer: The Trainer, before its loggers are used.
        job: The job.
    """
    for item in trainer.loggers:
        if isinstance(item, (TensorBoardLogger, CSVLogger)):
            _place(item, log_folder(job, is_tensorboard=isinstance(item, TensorBoardLogger)))
        # Do not set CSVLogger's version: it numbers its folders itself, and removes earlier files of the same version.
        if isinstance(item, TensorBoardLogger) and job.name is not None and item._version is None:
            item._version = _unique(job.name, f"tensorboard {os.path.join(item._root_dir, item.name)}")
        elif isinstance(item, WandbLogger):
            _continue_wandb(item, job)


def _continue_wandb(wandb: WandbLogger, job: SageMakerJob) -> None:
    settings = wandb._wandb_init
    if wandb._save_dir is not None and not is_fixed(wandb._save_dir):
        wandb._save_dir = settings["dir"] = str(job.host_output_dir / wandb._save_dir)
    # Keep the id that a W&B sweep agent assigns to each run.
    is_open = settings.get("id") is None and not {"WANDB_RUN_ID", "WANDB_SWEEP_ID"} & os.environ.keys()
    if job.run_key is None or not is_open or wandb._experiment is not None:
        return
    wandb._id = settings["id"] = _unique(job.run_key, f"wandb {settings.get('project')}")
    wandb._name = settings["name"] = settings.get("name") or job.name


def _place(file_logger: TensorBoardLogger | CSVLogger, folder: Path) -> None:
    """Resolve a logger's relative folder against the job's folder."""
    if not is_fixed(file_logger._root_dir):
        file_logger._root_dir = os.path.join(folder, file_logger._root_dir)
        if isinstance(file_logger, CSVLogger):
            file_logger._save_dir = file_logger._root_dir


def _unique(name: str, where: str) -> str:
    """Return the name, with a number appended if the script has already used it for another run in the same place."""
    place = f"{where} {name}"
    _taken[place] += 1
    return name if _taken[place] == 1 else f"{name}-{_taken[place]}"
