"""FailingRank: report a rank's exception at once, and keep the failed rank from making collective calls."""

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

# Maximum length of the exception's text in a heartbeat, which is one short line.
_MAX_CHARS = 60


class FailingRank(UnlistedCallback):
    """A callback that lets a rank fail without waiting for the others.

    When one of several ranks raises an exception, the others wait for that rank in a collective call. In stock
    Lightning, the callbacks of the failed rank may then make another collective call (``save_on_exception`` ends with a
    barrier). The traceback is then never printed, and the job hangs until the call times out. This callback prints the
    traceback first, and prevents the failed rank from saving a checkpoint. After an interruption, it prevents all ranks
    from saving one, because ``SpotCheckpoint`` has already done so.

    ``sys.exit`` in one of several ranks is reported like an exception. When a failed rank exits, it does not destroy
    the process group, because it would have to wait for the other ranks.

    This must be the first callback that has ``on_exception``. ``SageMakerCLI`` and ``SageMakerTrainer`` add it to every
    job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_failed = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Allow saving checkpoints again, in case the script has caught the exception of an earlier run."""
        vars(trainer).pop("save_checkpoint", None)
        reporter = report_failures()
        if reporter is not None:
            reporter.withdraw()
        if self._has_failed:
            leave_at_exit()
        self._has_failed = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Print the traceback, and prevent this rank from saving another checkpoint."""
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
            # Print now, because Python would print the traceback only when the process exits, which may take minutes or
            # never happen.
            sys.excepthook(type(exception), exception, exception.__traceback__)
            sys.stderr.flush()
        process = announce()
        if process is not None:
            error = " ".join(f"{type(exception).__name__}: {exception}"[:_MAX_CHARS].split())
            process.beat(trainer.global_rank, trainer.global_step, trainer.current_epoch, Phase.FAILED, error)


def _save_nothing(filepath: Any, *_: Any, **__: Any) -> None:
    logger.info("Not saving a checkpoint in %s: training was interrupted, or this rank has failed.", filepath)
