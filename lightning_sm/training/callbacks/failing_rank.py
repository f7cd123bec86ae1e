"""FailingRank: a rank that raises an exception reports it at once, and makes no further collective calls."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import Any

from lightning_sm._lightning import LightningModule, ModelCheckpoint, OnExceptionCheckpoint, Strategy, Trainer
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.job.control_folder import Phase, announce
from lightning_sm.job.failure_file import report_failures
from lightning_sm.training.callbacks.spot_checkpoint import TrainingInterrupted
from lightning_sm.training.group_exit import leave_at_exit, stay_at_exit

logger = logging.getLogger(__name__)

# A heartbeat is one short line: it holds no more of the exception's text than this.
_MAX_CHARS = 60


class FailingRank(UnlistedCallback):
    """A callback that lets a rank fail alone.

    When one of several ranks raises an exception, the others wait for it in a collective call. In stock Lightning, the
    callbacks of the failed rank may then make another one (``save_on_exception`` ends with a barrier): the traceback is
    never printed, and the job hangs until the collective times out. Here the traceback is printed first. The failed
    rank saves a checkpoint on exception alone if it has the complete model (DDP), and otherwise none (FSDP).

    ``sys.exit`` in one of several ranks is reported like an exception. At its exit, a failing rank does not destroy the
    process group, which would wait for the other ranks.

    After an interruption, for which ``SpotCheckpoint`` has saved a checkpoint, no second one is written.

    It must be the first callback with ``on_exception``. ``SageMakerCLI`` and ``SageMakerTrainer`` add it to every job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_failed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let all ranks save together again, in case the script has caught an exception."""
        vars(trainer).pop("save_checkpoint", None)
        reporter = report_failures()
        if reporter is not None:
            reporter.withdraw()
        if self._has_failed:
            leave_at_exit()
        self._has_failed = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Print the traceback, and let this rank save checkpoints alone."""
        if isinstance(exception, TrainingInterrupted):
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ModelCheckpoint):
                    callback.save_on_exception = False
                elif isinstance(callback, OnExceptionCheckpoint):
                    trainer.save_checkpoint = _save_nothing  # type: ignore[method-assign]
            return
        if self._has_failed or trainer.world_size == 1 or not isinstance(exception, (Exception, SystemExit)):
            return
        self._has_failed = True
        stay_at_exit()
        if isinstance(exception, Exception):
            # Call the hook now. Otherwise it prints when the process exits, which may take minutes, or never happen.
            sys.excepthook(type(exception), exception, exception.__traceback__)
            sys.stderr.flush()
        process = announce()
        if process is not None:
            error = " ".join(f"{type(exception).__name__}: {exception}"[:_MAX_CHARS].split())
            process.beat(trainer.global_rank, trainer.global_step, trainer.current_epoch, Phase.FAILED, error)
        trainer.save_checkpoint = partial(_save_alone, trainer)  # type: ignore[method-assign]


def _needing_all_ranks(strategy: Any) -> Any | None:
    """Return the optimizer, or the strategy itself, that saves a checkpoint with all ranks; None if one rank can."""
    for optimizer in strategy.optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer gathers its state
            return optimizer
    return None if type(strategy).save_checkpoint is Strategy.save_checkpoint else strategy


def _save_nothing(*_: Any, **__: Any) -> None:
    logger.info("Skipping OnExceptionCheckpoint: SpotCheckpoint handles interruptions.")


def _save_alone(
    trainer: Any, filepath: str | os.PathLike[str], weights_only: bool | None = None, storage_options: Any = None
) -> None:
    """Save a checkpoint without any other rank, if this one has the complete model and optimizers."""
    strategy = trainer.strategy
    part = _needing_all_ranks(strategy)
    if part is not None:
        logger.warning(
            "Rank %d has failed and cannot save a checkpoint in %s: %s needs all ranks for that.",
            trainer.global_rank,
            filepath,
            type(part).__name__,
        )
        return
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
    strategy.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
    logger.info("Rank %d has failed, and has saved a checkpoint in %s.", trainer.global_rank, filepath)
