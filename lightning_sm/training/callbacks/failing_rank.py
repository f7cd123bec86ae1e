"""FailingRank: a rank that raises an exception reports it at once, and makes no further collective calls."""

from __future__ import annotations

import logging
import sys
from typing import Any

from lightning_sm._lightning import LightningModule, ModelCheckpoint, Trainer
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
    never printed, and the job hangs until the collective times out. Here the traceback is printed first, and the failed
    rank saves no checkpoint. Nor does any rank after an interruption, for which ``SpotCheckpoint`` has saved one.

    ``sys.exit`` in one of several ranks is reported like an exception. At its exit, a failing rank does not destroy the
    process group, which would wait for the other ranks.

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
        """Print the traceback, and let this rank save no further checkpoint."""
        is_interruption = isinstance(exception, TrainingInterrupted)
        is_alone = trainer.world_size > 1 and isinstance(exception, (Exception, SystemExit))
        if is_interruption or is_alone:
            trainer.save_checkpoint = _save_nothing  # type: ignore[method-assign]
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ModelCheckpoint):
                    callback.save_on_exception = False
        if is_interruption or not is_alone or self._has_failed:
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


def _save_nothing(filepath: Any, *_: Any, **__: Any) -> None:
    logger.info("No checkpoint is saved in %s: training was interrupted, or this rank has failed.", filepath)
