"""Automatic resumption of a fit from its job's latest valid checkpoint, however the script starts the fit."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_sm._text import shortened
from lightning_sm.errors import CheckpointError, CheckpointMismatchError, LightningSMError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.training.checkpoints.find_newest import JOB_KEY, FoundCheckpoint, newest_checkpoint, optimizer_names
from lightning_sm.training.checkpoints.finder_results import allow_searches, restore_searched, skip_searches
from lightning_sm.training.checkpoints.fits import Fit
from lightning_sm.training.checkpoints.transfer import HostLeaders, on_every_host

logger = logging.getLogger(__name__)

# Errors that are raised by code that does not find the fields it expects in a checkpoint.
_OTHER_FIELDS = (KeyError, IndexError, ValueError, TypeError, AttributeError)
# Maximum length of torch's error, which lists each tensor of a large model. The advice must fit into the failure file,
# too.
_MAX_CHARS = 250


class CheckpointLoader:
    """A loader for a Trainer's checkpoints, which also sends their files to hosts of the job that lack them.

    Args:
        trainer: The Trainer.
        job: The job.
    """

    def __init__(self, trainer: Any, job: SageMakerJob) -> None:
        self._trainer = trainer
        self._job = job
        self._connector = trainer._checkpoint_connector
        self._load = self._connector.resume_start
        self._chosen: FoundCheckpoint | None = None
        self._restores_searched = False
        self._chosen_path: Path | None = None
        self._connector.resume_start = self._resume_start
        for name in ("restore_model", "restore_training_state"):
            setattr(self._connector, name, partial(self._restore, getattr(self._connector, name)))

    @classmethod
    def of(cls, trainer: Any, job: SageMakerJob) -> CheckpointLoader:
        """Return a Trainer's loader; the first call creates it."""
        existing = getattr(trainer._checkpoint_connector.resume_start, "__self__", None)
        return existing if isinstance(existing, cls) else cls(trainer, job)

    def resume_from_latest(self, folder: Path, fit: Fit) -> None:
        """Let the current fit resume from the job's latest valid checkpoint; call it in a callback's ``setup``.

        A checkpoint of an earlier attempt of this job takes precedence over the script's ``ckpt_path``, because
        restarts from ``ckpt_path`` would lose the progress of earlier attempts. ``ckpt_path`` takes precedence over a
        checkpoint of another job with the same folder.

        The hosts choose the checkpoint here, because all ranks are connected by now, and the finders have not searched
        yet, which they must not do in a resumed fit.

        Args:
            folder: The job's checkpoint folder.
            fit: The current fit.
        """
        allow_searches(self._trainer)
        found = None
        leaders = HostLeaders(self._trainer)
        if leaders.is_leader:
            found = newest_checkpoint(folder, self._job, fit=fit, gather=leaders.gather)
        self._chosen = self._trainer.strategy.broadcast(found)
        if self._chosen is not None:
            skip_searches(self._trainer)
        # If the strategy loads checkpoints after the search, the first loaded checkpoint may be the finder's.
        self._restores_searched = not (self._chosen is None and self._trainer.strategy.restore_checkpoint_after_setup)

    def _resume_start(self, checkpoint_path: Any = None, **options: Any) -> None:
        """Replace the connector's ``resume_start``, through which Lightning loads all checkpoints."""
        trainer, connector = self._trainer, self._connector
        chosen, self._chosen, self._chosen_path = self._chosen, None, None
        restores_searched, self._restores_searched = self._restores_searched, False
        if trainer.state.fn != "fit":  # the fit failed before loading it, and the script continued
            chosen, restores_searched = None, False
        if chosen is not None and checkpoint_path is not None and not chosen.is_of(self._job):
            chosen = None
        if chosen is not None and chosen.doubt is not None:
            raise CheckpointError(chosen.doubt)
        if chosen is None:
            self._load_on_all_hosts(checkpoint_path, options)
        else:
            if trainer.is_global_zero:
                instead = "" if checkpoint_path is None else f" It takes precedence over ckpt_path={checkpoint_path}."
                logger.info("Resuming from %s, the latest valid checkpoint of the job.%s", chosen.path, instead)
            # A checkpoint that names its job may hold objects. Lightning 2.5 lacks the parameter: it always uses False.
            if chosen.job is not None and "weights_only" in inspect.signature(self._load).parameters:
                options["weights_only"] = False
            self._chosen_path = chosen.path
            self._load_on_all_hosts(str(chosen.path), options, chosen.host)
            if (chosen.job or {}).get("is_ending") and chosen.is_of(self._job):
                # Callbacks such as EarlyStopping are restored, too, but check their metric only after an epoch.
                trainer.should_stop = True
                if trainer.is_global_zero:
                    logger.info("The fit had already ended in an earlier attempt: it does not train any further.")
        if restores_searched and connector._ckpt_path:
            skip_searches(trainer)
            restore_searched(trainer, connector._ckpt_path, connector._loaded_checkpoint)

    def _restore(self, restore: Callable[[], None]) -> None:
        """Replace the connector's methods that read the loaded checkpoint.

        Raises:
            CheckpointMismatchError: The job, not the script, chose the checkpoint, and the checkpoint does not match
                the script.
        """
        try:
            if self._chosen_path is not None:
                self._check_optimizers()
            restore()
        except Exception as error:
            path = self._chosen_path
            if path is None or not _is_misfit(error):
                raise
            raise CheckpointMismatchError(
                f"The job resumes automatically from {path}, the latest valid checkpoint in its folder, but that does "
                f"not fit this script. {type(error).__name__}: {shortened(str(error), _MAX_CHARS)}\n"
                "It belongs to another model or optimizer. To start over, set another checkpoint_s3_uri (in a job "
                f"file: checkpoints), or delete the files there ({path.parent} on this host). To continue, use the "
                "model that the checkpoint was saved with."
            ) from error

    def _check_optimizers(self) -> None:
        """Check that the checkpoint is from optimizers of the same classes, once the script has made its own.

        Otherwise, an optimizer would take over the settings of another class: torch loads them, too, and may not fail.
        """
        saved = self._connector._loaded_checkpoint.get(JOB_KEY, {}).get("optimizers")
        own = optimizer_names(self._trainer)
        if saved and own and saved != own:
            raise ValueError(f"It was saved with {', '.join(saved)}, but the script trains with {', '.join(own)}.")

    def _load_on_all_hosts(self, path: Any, options: dict[str, Any], host: int = 0) -> None:
        folder = self._job.checkpoint_dir or self._job.host_output_dir
        with on_every_host(self._trainer, path, folder, host) as shared:
            self._load(shared, **options)
        if shared is not None and path is not None:
            self._connector._ckpt_path = path  # not the copy, which has been removed


def _is_misfit(error: Exception) -> bool:
    if isinstance(error, LightningSMError):
        return False
    if isinstance(error, _OTHER_FIELDS):
        return True
    # torch raises a plain RuntimeError for a mismatch, but also for a GPU error: a mismatch comes from load_state_dict.
    return isinstance(error, RuntimeError) and traceback.extract_tb(error.__traceback__)[-1].name == "load_state_dict"
