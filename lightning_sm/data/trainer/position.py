"""Where a Trainer stands in the data: at the start of a pass, in a checkpoint, and after a resume."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning_sm._lightning import Callback
from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.passes import Position
from lightning_sm.data.trainer.resume import LoaderPosition, SavedPosition

logger = logging.getLogger(__name__)

_CHECKPOINT_KEY = "lightning_sm.data"


class Progress(Callback):
    """Keeps the position in the data in the checkpoints of a Trainer, and finds it from the Trainer's own progress.

    It has an entry of its own in checkpoints: the state of loaders is dropped when ``estimated_stepping_batches`` is
    read (Lightning issue 20550), and the state of the DataModule is the user's, who may be strict in loading it.
    """

    def __init__(self) -> None:
        # Of the checkpoint that was resumed: another would make another order of the rest of the epoch.
        self.seed: int | None = None
        self._saved: SavedPosition | None = None
        self._loaders: Sequence[RemoteLoader] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the loaders, which belong to this process: strategies that spawn pickle the Trainer."""
        return {**vars(self), "_loaders": ()}

    def follow(self, loaders: Sequence[RemoteLoader]) -> None:
        """Take the training loaders whose position checkpoints hold.

        Args:
            loaders: In the order of what ``train_dataloader()`` returned.
        """
        self._loaders = loaders

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the position to a checkpoint.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            checkpoint: What is saved.
        """
        # A Trainer may go on with another DataModule.
        if not self._loaders or getattr(trainer.datamodule, "_progress", None) is not self:
            return
        fit_loop = trainer.fit_loop
        position = SavedPosition(
            seed=self._loaders[0].place.seed,
            epoch=fit_loop.epoch_progress.current.processed,
            batches=fit_loop.epoch_loop.batch_progress.current.processed,
            loaders=_positions(self._loaders),
        )
        checkpoint[_CHECKPOINT_KEY] = position.to_json()
        # Lightning refuses states of loaders when a run without data hosts, whose loaders have none, resumes.
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take the position from a checkpoint; one of a run without data hosts has none.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            checkpoint: What was saved.

        Raises:
            ResumeError: It was written by a version that this one does not know.
        """
        position = checkpoint.get(_CHECKPOINT_KEY)
        if position is not None:
            self._saved = SavedPosition.from_json(position)
            self.seed = self._saved.seed

    def resume(self, trainer: Any) -> None:
        """Translate the Trainer's batch count when a run of another shape is resumed in the middle of an epoch.

        Args:
            trainer: The Trainer, which is about to look at its progress.

        Raises:
            ResumeError: The data is not that of the checkpoint.
        """
        saved, self._saved = self._saved, None
        if saved is None or not trainer.fit_loop.restarting:
            return
        batches, num_repeated = saved.batches_for(_positions(self._loaders))
        if batches == saved.batches:
            return
        logger.warning(
            "The checkpoint was saved after batch %d of epoch %d, which is batch %d for %d ranks; %d samples repeat.",
            saved.batches,
            saved.epoch,
            batches,
            trainer.world_size,
            num_repeated,
        )
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, max(0, getattr(progress, name) - saved.batches + batches))


def position_of(loader: RemoteLoader, trainer: Any) -> Position:
    """Return where a pass begins; ask at its first batch, as the Trainer may not have restored its state before.

    Args:
        loader: The loader.
        trainer: The Trainer; None without one.
    """
    if trainer is None:
        return Position(max(loader.epoch, 0))
    fit_loop = trainer.fit_loop
    epoch = fit_loop.epoch_progress.current.processed
    is_sequential = trainer.overfit_batches > 0
    if is_sequential and loader.facts.order in ("sampler", "batch_sampler"):
        epoch = 0  # a sampler of the user's would choose others in each epoch
    if loader.place.stage != "train":
        return Position(epoch, 0, 0, _evaluation_limit(loader, trainer), is_sequential)
    taken = batches_taken(trainer)
    if loader.num_passes == 0 and trainer.num_training_batches == float("inf"):
        epoch, taken = _before_reset(fit_loop, epoch, taken)
    pass_index, first_step = _place_in_passes(loader, taken, fit_loop._combined_loader)
    limit = trainer.num_training_batches
    stop_step = None if limit == float("inf") else first_step + max(0, int(limit) - taken)
    return Position(epoch, pass_index, first_step, stop_step, is_sequential)


def _before_reset(fit_loop: Any, epoch: int, taken: int) -> tuple[int, int]:
    """Lightning fetches the first batch of a loader without length before it has tidied up a resumed progress."""
    if not fit_loop.restarting:
        return epoch, 0
    if not fit_loop.epoch_loop.batch_progress.is_last_batch:
        return epoch, taken
    total = fit_loop.epoch_progress.total
    return epoch + (total.processed < total.started), 0


def batches_taken(trainer: Any) -> int:
    """Return how many batches of the epoch are trained on.

    Args:
        trainer: The Trainer.
    """
    # Not "ready": it counts the next one already when a training_step fetches it from a dataloader_iter.
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def _place_in_passes(loader: RemoteLoader, taken: int, combined: Any) -> tuple[int, int]:
    try:
        length = max(1, len(loader))
    except TypeError:
        return 0, taken
    # In a CombinedLoader that cycles, a short loader begins again before the epoch is over; else it stays at its end.
    return divmod(taken, length) if combined._mode == "max_size_cycle" else (0, min(taken, length))


def _evaluation_limit(loader: RemoteLoader, trainer: Any) -> int | None:
    stage, index = loader.place.stage, loader.place.index
    limits = getattr(trainer, "num_sanity_val_batches" if trainer.sanity_checking else f"num_{stage}_batches")
    limit = limits[index] if index < len(limits) else float("inf")
    return None if limit == float("inf") else int(limit)


def _positions(loaders: Sequence[RemoteLoader]) -> tuple[LoaderPosition, ...]:
    return tuple(
        LoaderPosition.of(loader.facts, loader.place.world_size, loader.place.num_shards) for loader in loaders
    )
