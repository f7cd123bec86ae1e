"""A Trainer's position in the data: at the start of a pass, in a checkpoint, and after a resume."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_sm._lightning import rank_zero_only
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.data.ipc.feeder_messages import Position
from lightning_sm.data.trainer.loader import RemoteLoader
from lightning_sm.data.trainer.resume import LoaderPosition, SamplerOrderId, SavedPosition, check_foreign

_warn_once = rank_zero_only(logging.getLogger(__name__).warning)

_CHECKPOINT_KEY = "lightning_sm.data"


class Progress(UnlistedCallback):
    """The callback that saves a Trainer's position in the data in its checkpoints, and restores it.

    The position has its own entry in checkpoints. Lightning drops the states of loaders when
    ``estimated_stepping_batches`` is read (issue 20550), and the state of the DataModule is the user's, whose
    ``load_state_dict`` may refuse unknown entries.

    Attributes:
        origin: The position in the checkpoint from which training resumes, else None. With another seed or number
            of shards, the rest of the epoch would have other batches.
    """

    def __init__(self) -> None:
        self._loaders: Sequence[RemoteLoader] = ()
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the checkpoint of an earlier run of the Trainer: this run may have another seed."""
        self.origin: SavedPosition | None = None
        self._is_due = False
        self._foreign_batches = 0  # of an epoch that began without data hosts

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the loaders, which belong to this process: strategies that spawn pickle the Trainer."""
        return {**vars(self), "_loaders": ()}

    def follow(self, loaders: Sequence[RemoteLoader]) -> None:
        """Set the training loaders whose position is saved, in the order of ``train_dataloader()``."""
        self._loaders = loaders

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the position to a checkpoint."""
        # The Trainer may have a different DataModule by now.
        hosts = getattr(trainer.datamodule, "_hosts", None)
        if not self._loaders or getattr(hosts, "progress", None) is not self:
            return
        fit_loop = trainer.fit_loop
        progress = fit_loop.epoch_loop.batch_progress
        position = SavedPosition(
            seed=self._loaders[0].place.seed,
            epoch=fit_loop.epoch_progress.current.processed,
            batches=0 if progress.is_last_batch else progress.current.processed,
            loaders=tuple(_position_in(loader, loader.order) for loader in self._loaders),
        )
        checkpoint[_CHECKPOINT_KEY] = position.to_json()
        # With states of loaders in it, Lightning would refuse to resume without data hosts, from stateless loaders.
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read the position from a checkpoint, or, if a run without data hosts saved it, that of the Trainer.

        Raises:
            ResumeError: The position has an unknown version.
        """
        position = checkpoint.get(_CHECKPOINT_KEY)
        if position is not None:
            self.origin = SavedPosition.from_json(position)
            self._is_due = True
        elif "loops" in checkpoint:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            self._foreign_batches = 0 if progress["is_last_batch"] else int(progress["current"]["processed"])

    def resume(self, trainer: Any) -> None:
        """Convert the Trainer's batch count after a resume within an epoch with other ranks or batch sizes.

        Call it right before the Trainer reads its progress.

        Raises:
            ResumeError: The data is not that of the checkpoint.
        """
        saved = self.origin if self._is_due else None
        foreign_batches, self._foreign_batches = self._foreign_batches, 0
        self._is_due = False
        if (saved is None and not foreign_batches) or not trainer.fit_loop.restarting:
            return
        if foreign_batches:
            positions = [_position_in(loader) for loader in self._loaders]
            check_foreign(foreign_batches, positions, trainer.world_size)
            _warn_once(
                "The checkpoint was saved without data hosts, after batch %d of an epoch. The epoch continues with the "
                "next batch, as if the batch size were the same.",
                foreign_batches,
            )
        if saved is None:
            return
        batches, num_repeated = saved.batches_for(_resumed_positions(self._loaders, saved))
        if batches == saved.batches:
            return
        _warn_once(
            "The checkpoint was saved after batch %d of epoch %d, which is batch %d with the current ranks (%d) and "
            "batch sizes. Samples that repeat: %d.",
            saved.batches,
            saved.epoch + 1,
            batches,
            trainer.world_size,
            num_repeated,
        )
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, max(0, getattr(progress, name) - saved.batches + batches))


def position_of(loader: RemoteLoader, iterator: Iterator[Any], trainer: Any) -> Position:
    """Return where a pass starts.

    Call it at the first batch of the pass: before, the Trainer may not have restored its state.

    Args:
        loader: The loader of the pass.
        iterator: The pass.
        trainer: The Trainer; None if there is none.
    """
    if trainer is None:
        return Position(max(loader.epoch, 0))
    fit_loop = trainer.fit_loop
    epoch = fit_loop.epoch_progress.current.processed
    if trainer.overfit_batches > 0 and loader.description.order == "batch_sampler":
        epoch = 0  # the user's sampler may choose other samples in each epoch
    combined = combined_loader_of(iterator, trainer)
    if combined is None:
        # The user iterates: over all of it, and in another order than the Trainer's pass in this epoch.
        earlier = step_limit(loader, trainer)
        return Position(epoch, loader.next_manual_pass(epoch), is_manual_iteration=True, earlier_stop_step=earlier)
    if loader.place.stage != "train":
        stop_step = _evaluation_limit(loader, combined, trainer)
        pass_index = loader.next_pass_in(combined._iterator)
        return Position(epoch, pass_index, 0, stop_step, earlier_stop_step=step_limit(loader, trainer))
    limit = trainer.num_training_batches
    taken = batches_taken(trainer)
    if loader.num_passes == 0 and limit == float("inf"):
        # Lightning fetches the first batch of a loader without length before it has reset the progress.
        if not fit_loop.restarting:
            taken = 0
        elif fit_loop.epoch_loop.batch_progress.is_last_batch:
            taken = 0
            total = fit_loop.epoch_progress.total
            epoch += total.processed < total.started
    try:
        length = max(1, len(loader))
    except TypeError:
        pass_index, first_step = 0, taken
    else:
        # A CombinedLoader that cycles restarts a short loader within the epoch; otherwise, the loader stays at its end.
        is_cycle = fit_loop._combined_loader._mode == "max_size_cycle"
        pass_index, first_step = divmod(taken, length) if is_cycle else (0, min(taken, length))
    stop_step = None if limit == float("inf") else first_step + max(0, int(limit) - taken)
    if stop_step is None and loader.description.order in ("sampler", "batch_sampler"):
        left = _batches_left(trainer)
        # One more: Lightning validates where the data ends, but not where max_steps ends a training.
        stop_step = None if left is None else first_step + left + 1
    return Position(epoch, pass_index, first_step, stop_step, earlier_stop_step=step_limit(loader, trainer))


def step_limit(loader: RemoteLoader, trainer: Any) -> int | None:
    """Return the batches to which the user limits the Trainer's passes over a loader; None: it has no limit.

    Args:
        loader: The loader.
        trainer: The Trainer; None if there is none.
    """
    limit = getattr(trainer, f"limit_{loader.place.stage}_batches", None)
    return limit if isinstance(limit, int) else None


def reach(loader: RemoteLoader, trainer: Any) -> int | None:
    """Return the batches of a loader that the Trainer can read at most in one pass; None: unknown.

    Args:
        loader: The loader.
        trainer: The Trainer; None if there is none.
    """
    limit = step_limit(loader, trainer)
    if limit is None and trainer is not None and loader.place.stage == "train":
        left = _batches_left(trainer)
        return None if left is None else batches_taken(trainer) + left
    return limit


def _batches_left(trainer: Any) -> int | None:
    """Return the batches until ``max_steps``; None: it is not set, or the user's code decides when to step."""
    if trainer.max_steps < 0 or not trainer.lightning_module.automatic_optimization:
        return None
    steps = max(0, int(trainer.max_steps) - int(trainer.global_step))
    return steps * int(trainer.accumulate_grad_batches)


def batches_taken(trainer: Any) -> int:
    """Return the number of batches of the epoch on which training is complete."""
    # Not "ready", which already counts the next batch when training_step fetches it from a dataloader_iter.
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def combined_loader_of(iterator: Iterator[Any], trainer: Any) -> Any:
    """Return the CombinedLoader of the Trainer that iterates; None if it is the user, over a loader that both have.

    Args:
        iterator: A pass over a loader.
        trainer: The Trainer.
    """
    fit_loop = trainer.fit_loop
    loops = (fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    combined_loaders = (loop._combined_loader for loop in loops)
    return next((combined for combined in combined_loaders if _iterates(combined, iterator)), None)


def _iterates(combined: Any, iterator: Iterator[Any]) -> bool:
    mode = getattr(combined, "_iterator", None)
    iterators = () if mode is None else mode.iterators
    return any(one is iterator or _iterates(one, iterator) for one in iterators)


def _evaluation_limit(loader: RemoteLoader, combined: Any, trainer: Any) -> int | None:
    index = loader.place.index
    name = "num_sanity_val_batches" if trainer.sanity_checking else f"num_{loader.place.stage}_batches"
    limits = getattr(trainer, name)
    # Loaders that are read together end when the longest has its limit, and may give more than theirs until then.
    own = limits[index : index + 1] if combined._mode == "sequential" else limits
    limit = max(own, default=float("inf"))
    return None if limit == float("inf") else int(limit)


def _position_in(loader: RemoteLoader, order: SamplerOrderId | None = None) -> LoaderPosition:
    return LoaderPosition.of(loader.description, loader.place.world_size, loader.place.num_shards, order)


def _resumed_positions(loaders: Sequence[RemoteLoader], saved: SavedPosition) -> list[LoaderPosition]:
    """Describe loaders, with the orders that their samplers have now in the epoch of a position."""
    positions = []
    for number, loader in enumerate(loaders):
        old = saved.loaders[number].sampler_order if number < len(saved.loaders) else None
        if saved.batches and old is not None and loader.description.order == saved.loaders[number].order:
            loader.order = SamplerOrderId(old.pass_index, old.stop, loader.digest(saved.epoch, old))
        positions.append(_position_in(loader, loader.order))
    return positions
