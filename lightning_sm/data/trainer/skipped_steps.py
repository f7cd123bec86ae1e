"""The steps that a run leaves out (``data_service.skip_steps``): Trainer and loaders go on behind their batches."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from lightning_sm._lightning import rank_zero_only
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.data.ipc.feeder_messages import Position
from lightning_sm.data.plan.skipped import skipped_batches
from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.position import batches_left, batches_taken, training_position
from lightning_sm.errors import DataServiceError, DataSettingsError

_log = rank_zero_only(logging.getLogger(__name__).warning)

_SETTING = "data_service.skip_steps"


class SkippedSteps(UnlistedCallback):
    """The callback that leaves out steps: the Trainer counts their batches, and nobody requests them.

    Lightning's loop advances by one batch without fetching it. What else an advance does stays: it counts the optimizer
    step, moves learning rates, and validates where a validation is due. So counters, schedules and the position in the
    data are at each later step those of a run that left out nothing.

    Args:
        steps: The steps, as loggers count: ranges in ascending order, with gaps between them.
    """

    def __init__(self, steps: Sequence[range]) -> None:
        self.steps = tuple(steps)
        self._loaders: Sequence[RemoteLoader] = ()
        self._skipping = range(0)  # the batches that follow, of those that are left out together
        self._undo: Callable[[], None] = _nothing

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: strategies that spawn pickle the Trainer."""
        return {**vars(self), "_loaders": (), "_undo": _nothing}

    def follow(self, loaders: Sequence[RemoteLoader]) -> None:
        """Set the training loaders."""
        self._loaders = loaders

    def paused(self, position: Position, loader: RemoteLoader, trainer: Any) -> Position:
        """Return the position of a pass that ends before the next batch which is left out.

        Args:
            position: Where the Trainer's pass over a training loader starts.
            loader: The loader.
            trainer: The Trainer.

        Raises:
            DataSettingsError: The number of batches in an epoch is not known.
            DataServiceError: The pass starts with a batch that is left out.
        """
        batches = self._next(trainer) if self.steps else None
        if batches is None or self._undo is _nothing:  # a search, such as that of LearningRateFinder, runs no callbacks
            return position
        taken = batches_taken(trainer)
        if batches.start <= taken:
            raise DataServiceError(
                f"{loader.description.name} was asked for batch {taken} of epoch {position.epoch + 1}, which "
                f"{_SETTING} leaves out. Nothing but the Trainer's own loop may fetch training batches then."
            )
        pause = position.first_step + batches.start - taken
        return replace(position, pause_step=pause) if pause < len(loader) else position

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace how Lightning's loop advances.

        Raises:
            DataSettingsError: The code of the model decides how many batches a step has.
        """
        self._undo()
        self._skipping = range(0)
        if not self.steps:
            return
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise DataSettingsError(
                f"{_SETTING} leaves out the batches of steps, but this training_step fetches as many as it wants from "
                "a dataloader_iter. Give it a parameter batch."
            )
        loop = trainer.fit_loop.epoch_loop
        advance = loop.advance
        loop.advance = partial(self._advance, trainer, advance)
        self._undo = partial(_restore, loop, loop.advance)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore Lightning's loop."""
        self._undo()
        self._undo = _nothing

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore Lightning's loop."""
        self.teardown(trainer, pl_module, "fit")

    def _next(self, trainer: Any) -> range | None:
        """Return the next batches of the epoch that are left out, from the Trainer's next batch on.

        Raises:
            DataSettingsError: The number of batches in an epoch is not known.
        """
        if trainer.num_training_batches == float("inf"):
            raise DataSettingsError(
                f"{_SETTING} needs the number of batches in an epoch, to tell the step of each batch, and "
                f"{self._loaders[0].description.name} has no length. Set data_service.batches_per_epoch (iterable "
                "dataset) or trainer.limit_train_batches."
            )
        return skipped_batches(
            self.steps,
            step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            batch=batches_taken(trainer),
            per_step=trainer.accumulate_grad_batches,
            num_batches=int(trainer.num_training_batches),
        )

    def _advance(self, trainer: Any, advance: Callable[[Any], None], fetcher: Any) -> None:
        """Advance by a batch that is left out, or as Lightning does."""
        loop = trainer.fit_loop.epoch_loop
        ends_validation = loop.restarting and loop._should_check_val_fx(fetcher)
        is_validating = ends_validation and (loop.val_loop.restarted_mid_evaluation or loop.restarted_on_last)
        if is_validating or not self._is_left_out(trainer):
            advance(fetcher)
            return
        if ends_validation:
            loop.val_loop.increment_progress_to_evaluation_end()
        loop.val_loop.restarting = False
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length
        loop.batch_progress.increment_by(1, is_last_batch=fetcher.done)
        if trainer.lightning_module.automatic_optimization and not loop._should_accumulate():
            optimizer_steps = loop.automatic_optimization.optim_progress.optimizer.step
            optimizer_steps.increment_ready()
            optimizer_steps.increment_completed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _is_left_out(self, trainer: Any) -> bool:
        """Return whether the Trainer's next batch is left out, and note the first one of several."""
        taken = batches_taken(trainer)
        if self._skipping:
            self._skipping = self._skipping[1:]
            return True
        batches = self._next(trainer)
        if batches is None or batches.start > taken:
            return False
        batches = batches[: batches_left(trainer)]
        self._skipping = batches[1:]
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        steps = range(step, step + -(-len(batches) // trainer.accumulate_grad_batches))
        epoch = trainer.fit_loop.epoch_progress.current.processed
        _log(
            "Leaving out steps %d to %d (%s), which are batches %d to %d of epoch %d.",
            steps[0],
            steps[-1],
            _SETTING,
            taken,
            batches[-1],
            epoch + 1,
        )
        for loader in self._loaders:
            _tell(loader, trainer, epoch, batches, steps)
        return True


def _tell(loader: RemoteLoader, trainer: Any, epoch: int, batches: range, steps: range) -> None:
    """Let a loader tell which batches are left out: they may be in several of its passes, if it cycles."""
    while batches:
        num = loader.leave_out(training_position(loader, trainer, epoch, batches.start), len(batches), steps)
        if not num:  # it has no more in this epoch
            return
        batches = batches[num:]


def _restore(loop: Any, replaced: Any) -> None:
    if vars(loop).get("advance") is replaced:
        del loop.advance


def _nothing() -> None:
    """Do nothing, where nothing was replaced."""
