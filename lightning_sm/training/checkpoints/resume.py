"""Resuming of a fit from the latest valid checkpoint of its job, however the script starts the fit."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_sm.job.facts import SageMakerJob
from lightning_sm.training.checkpoints.fits import Fit
from lightning_sm.training.checkpoints.misfit import explain_misfit
from lightning_sm.training.checkpoints.newest import JOB_KEY, FoundCheckpoint, newest_checkpoint
from lightning_sm.training.checkpoints.searches import HeldSearches
from lightning_sm.training.checkpoints.transfer import HostLeaders, on_every_host

logger = logging.getLogger(__name__)


class CheckpointLoader:
    """The loading of a Trainer's checkpoints in a job: files are sent to hosts that lack them.

    Args:
        trainer: The Trainer.
        job: The job.
    """

    def __init__(self, trainer: Any, job: SageMakerJob) -> None:
        self._trainer = trainer
        self._job = job
        self._connector = trainer._checkpoint_connector
        self._load = self._connector.resume_start
        self._resuming: tuple[Path, Fit, HeldSearches] | None = None
        self._connector.resume_start = self._resume_start

    @classmethod
    def of(cls, trainer: Any, job: SageMakerJob) -> CheckpointLoader:
        """Return the loader of a Trainer, which is made by the first call."""
        found = getattr(trainer._checkpoint_connector.resume_start, "__self__", None)
        return found if isinstance(found, cls) else cls(trainer, job)

    def resume_from_latest(self, folder: Path, fit: Fit) -> None:
        """Let the current fit resume from the job's latest valid checkpoint; call it in a callback's ``setup``.

        A checkpoint of an earlier attempt of this job takes precedence over the script's ``ckpt_path``, from which
        every restart would lose the progress of earlier attempts; ``ckpt_path`` takes precedence over a checkpoint of
        another job with the same folder.

        The hosts choose when Lightning is about to load: by then, all ranks are connected, and none has begun the
        collective calls with which some strategies load.

        Args:
            folder: The job's checkpoint folder.
            fit: Which of the script's fits this is.
        """
        self._resuming = folder, fit, HeldSearches(self._trainer)

    def _resume_start(self, checkpoint_path: Any = None, **options: Any) -> None:
        """Take the place of the connector's ``resume_start``, with which Lightning loads all checkpoints."""
        resuming, self._resuming = self._resuming, None
        if self._trainer.state.fn != "fit":  # the fit has failed in between, and the script went on
            resuming = None
        if resuming is None:  # the tuner's own, or one that a test or a validation loads
            self._load_on_all_hosts(checkpoint_path, options)
            return
        folder, fit, searches = resuming
        chosen = self._choose(folder, fit, checkpoint_path)
        if chosen is None:
            self._load_on_all_hosts(checkpoint_path, options)
        else:
            # Load as newest_checkpoint did. Lightning 2.5 has no such parameter, and loads all files with False.
            if chosen.has_objects and "weights_only" in inspect.signature(self._load).parameters:
                options["weights_only"] = False
            explain_misfit(self._connector, str(chosen.path))
            self._load_on_all_hosts(str(chosen.path), options, chosen.host)
            _end_again(self._trainer, self._job, self._connector._loaded_checkpoint)
        path = self._connector._ckpt_path
        if path:
            searches.skip(path, self._connector._loaded_checkpoint)
        else:
            searches.start()

    def _load_on_all_hosts(self, path: Any, options: dict[str, Any], host: int = 0) -> None:
        folder = self._job.checkpoint_dir or self._job.host_output_dir
        with on_every_host(self._trainer, path, folder, host) as shared:
            self._load(shared, **options)
        if shared is not None and path is not None:
            self._connector._ckpt_path = path  # not a copy, which is removed by now

    def _choose(self, folder: Path, fit: Fit, stated: Any) -> FoundCheckpoint | None:
        """Return the hosts' choice on all ranks; None leaves the choice to the script."""
        trainer = self._trainer
        found = None
        leaders = HostLeaders(trainer)
        if leaders.takes_part:
            found = newest_checkpoint(
                folder,
                self._job,
                fit=fit,
                is_own=stated is not None,
                gather=leaders.gather,
            )
        choice: FoundCheckpoint | None = trainer.strategy.broadcast(found)
        if choice is not None and trainer.is_global_zero:
            instead = "" if stated is None else f" It takes precedence over ckpt_path={os.fspath(stated)}."
            logger.info("Resuming from %s, the latest valid checkpoint of the job.%s", choice.path, instead)
        return choice


def _end_again(trainer: Any, job: SageMakerJob, checkpoint: Mapping[str, Any]) -> None:
    """Let a fit that a callback such as ``EarlyStopping`` has ended in an earlier attempt of the job end at once.

    A checkpoint holds the states of these callbacks, but they look at a metric only after the next epoch.
    """
    facts = checkpoint.get(JOB_KEY) or {}
    if facts.get("is_ending") and facts.get("name") == job.name:
        trainer.should_stop = True
        if trainer.is_global_zero:
            logger.info("The fit had ended in an earlier attempt: it does not train any further.")
