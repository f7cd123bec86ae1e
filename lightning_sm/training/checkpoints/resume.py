"""Resuming of a fit from the latest valid checkpoint of its job, however the script starts the fit."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # fsspec has no type information

from lightning_sm._lightning import TorchCheckpointIO, WrappingCheckpointIO
from lightning_sm.errors import CheckpointError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.training.checkpoints.durable_io import DurableCheckpointIO
from lightning_sm.training.checkpoints.newest import Load, newest_checkpoint, object_stores

logger = logging.getLogger(__name__)


def resume_from_latest(trainer: Any, folder: Path | None, job: SageMakerJob, fit: str) -> None:
    """Let the current fit resume from the job's latest valid checkpoint; call it in a callback's ``setup``.

    A checkpoint of an earlier attempt of this job takes precedence over the script's ``ckpt_path``, from which every
    restart would lose the progress of earlier attempts; ``ckpt_path`` takes precedence over a checkpoint of another job
    with the same folder.

    Rank 0 chooses when Lightning is about to load: by then, all ranks are connected, and none has begun the collective
    calls with which some strategies load.

    Args:
        trainer: The Trainer.
        folder: The job's checkpoint folder, if it has one. Object stores to which callbacks write are searched, too.
        job: The job.
        fit: Which of the script's fits this is, as in ``job_facts``.
    """
    connector = trainer._checkpoint_connector
    vars(connector).pop("resume_start", None)  # left by a fit that failed before it loaded
    load = connector.resume_start

    def resume_start(checkpoint_path: Any = None, **options: Any) -> None:
        # Replace it for one call only: Lightning's tuner loads checkpoints of its own with the same method.
        vars(connector).pop("resume_start", None)
        chosen, has_objects = _choose(trainer, folder, job, fit, checkpoint_path)
        # Load as newest_checkpoint did. Lightning 2.5 has no such parameter, and loads all files with False.
        if has_objects and "weights_only" in inspect.signature(load).parameters:
            options["weights_only"] = False
        load(checkpoint_path if chosen is None else chosen, **options)

    connector.resume_start = resume_start


def _choose(trainer: Any, folder: Path | None, job: SageMakerJob, fit: str, stated: Any) -> tuple[str | None, bool]:
    """Return rank 0's choice on all ranks, and whether it holds objects; None leaves the choice to the script.

    Raises:
        CheckpointError: A host does not have the checkpoint that rank 0 chose.
    """
    choice: tuple[str | None, bool] = None, False
    if trainer.is_global_zero:
        load = _reader_of_another_format(trainer.strategy.checkpoint_io)
        found = newest_checkpoint(
            folder, job, load, fit=fit, is_own=stated is not None, object_stores=object_stores(trainer)
        )
        if found is not None:
            choice = str(found.path), found.has_objects
    choice = trainer.strategy.broadcast(choice)
    latest = choice[0]
    if latest is None:
        return choice
    filesystem, address = url_to_fs(latest)
    missing = not filesystem.exists(address)
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
    return choice


def _reader_of_another_format(checkpoint_io: Any) -> Load | None:
    """Return ``load_checkpoint`` if a class of the user's reads checkpoints.

    Lightning's own reads the same formats as ``newest_checkpoint``, and some versions run the code of any file.
    """
    ours = {kind.load_checkpoint for kind in (TorchCheckpointIO, WrappingCheckpointIO, DurableCheckpointIO)}
    inner = checkpoint_io
    while inner is not None:
        if type(inner).load_checkpoint not in ours:
            load: Load = checkpoint_io.load_checkpoint
            return load
        inner = inner.checkpoint_io if isinstance(inner, WrappingCheckpointIO) else None
    return None
