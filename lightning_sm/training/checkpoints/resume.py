"""Resume a fit from the latest valid checkpoint of its job, however the script starts the fit."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any

from lightning_sm.errors import CheckpointError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.training.checkpoints.newest import newest_checkpoint

logger = logging.getLogger(__name__)


def resume_from_latest(trainer: Any, folder: Path, job: SageMakerJob, fit: str) -> None:
    """Let the current fit resume from the job's latest valid checkpoint; call it in a callback's ``setup``.

    A checkpoint of an earlier attempt of this job wins over the ``ckpt_path`` of the script, from which every restart
    would lose the progress of the attempts before. That wins over a checkpoint of another job with the same folder.

    Rank 0 chooses when Lightning is about to load: all ranks are connected by then, and none has begun the collective
    calls with which some strategies load.

    Args:
        trainer: The Trainer.
        folder: The job's checkpoint folder.
        job: The job.
        fit: Which of the script's fits this is, as in ``job_facts``.
    """
    connector = trainer._checkpoint_connector
    vars(connector).pop("resume_start", None)  # of a fit that failed before it loaded
    load = connector.resume_start

    def resume_start(checkpoint_path: Any = None, **options: Any) -> None:
        # Once: Lightning's tuner loads checkpoints of its own with the same method.
        vars(connector).pop("resume_start", None)
        chosen = _choose(trainer, folder, job, fit, checkpoint_path)
        # The job's own file, with hyperparameters of any type: read as newest_checkpoint has read it. Lightning 2.5
        # has no such parameter, and reads all files so.
        if chosen is not None and "weights_only" in inspect.signature(load).parameters:
            options["weights_only"] = False
        load(checkpoint_path if chosen is None else chosen, **options)

    connector.resume_start = resume_start


def _choose(trainer: Any, folder: Path, job: SageMakerJob, fit: str, stated: Any) -> str | None:
    """Return rank 0's choice on all ranks; None leaves the choice to the script.

    Raises:
        CheckpointError: A host does not have the checkpoint that rank 0 chose.
    """
    latest: str | None = None
    if trainer.is_global_zero:
        found = newest_checkpoint(
            folder, job, trainer.strategy.checkpoint_io.load_checkpoint, fit=fit, is_own=stated is not None
        )
        latest = None if found is None else str(found)
    latest = trainer.strategy.broadcast(latest)
    if latest is None:
        return None
    missing = not os.path.exists(latest)
    if trainer.strategy.reduce_boolean_decision(missing, all=False):
        own = "does not have it" if missing else "has it, but another host does not"
        raise CheckpointError(
            f"Rank 0 resumes from {latest}, but not all hosts can: {job.current_host} {own}. Every host needs all "
            "files of the checkpoint folder, as SageMaker provides them at the start of a job; remove the checkpoint "
            "or copy it to all hosts."
        )
    if trainer.is_global_zero:
        instead = "" if stated is None else f" It takes precedence over ckpt_path={os.fspath(stated)}."
        logger.info("Resuming from %s, the latest valid checkpoint of the job.%s", latest, instead)
    return latest
