"""LocalPosition: resume DataLoaders in the middle of an epoch, with or without data hosts.

Lightning restores the number of finished batches of an epoch, but restarts the loaders: a resumed epoch would train on
its first batches twice, and never on its last batches.
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_sm._lightning import Callback, LightningModule, Trainer, rank_zero_only, sized_len
from lightning_sm._random_state import RandomState
from lightning_sm.data.trainer.remote_iterator import IteratorPosition
from lightning_sm.data.trainer.remote_loader import RemoteDataLoader, begin_at, position_of
from lightning_sm.errors import ResumeError
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.strategies.pipeline.loaders import FollowingLoader

logger = logging.getLogger(__name__)
_warn_once = rank_zero_only(logger.warning)

_KEY = "lightning_sm.random_states"
_SETS_LOADERS = "_load_combined_loader_states"


class LocalPosition(Callback):
    """A callback that resumes in the middle of an epoch, with the batch and random numbers that would have come next.

    For each rank, every checkpoint holds the random states from which the rank's loaders drew their sample orders, and
    the random state after the last step. So these orders, and the random numbers of the training process (for dropout,
    or augmentation without workers) and of data hosts, are those of an uninterrupted run. Only the workers of a local
    DataLoader draw different random numbers. Finished batches are not loaded again.

    Streams (loaders of an ``IterableDataset``) resume on data hosts, whose workers read the finished batches again.
    This requires the same ``num_workers``, batch size and number of ranks. Other streams restart, with a warning,
    unless their loader is stateful, like torchdata's.

    With a different number of ranks, an epoch resumes if its samples come from the ``DistributedSampler`` that
    Lightning inserts.

    ``SageMakerCLI`` and ``SageMakerTrainer`` add this callback to every job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loaders: _Loaders = []
        self._step_state: RandomState | None = None
        self._loaded: dict[str, Any] | None = None
        self._loads_in_process = True
        self._has_trained = False
        self._num_done: int | None = None  # finished batches, if a run resumes within an epoch
        self._positions: list[Callable[[], None]] = []  # each sets the position of a loader's next iterator

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset state that an earlier run of the Trainer loaded, and hook into the start of the training loaders.

        Lightning starts to iterate over the training loaders before it calls any other callback hook. Right before
        that, it loads the states of stateful loaders, and this callback sets the positions of the other loaders.
        """
        self._loaded = None
        if stage == "fit":
            vars(trainer.fit_loop).pop("advance", None)  # left by a fit that failed before its first epoch
            self._step_state = self._num_done = None
            self._has_trained, self._positions = False, []
            own: Any = trainer.fit_loop._load_combined_loader_states
            if getattr(own, "func", None) != self._before_first_batch:  # equal if an earlier fit set it
                vars(trainer.fit_loop)[_SETS_LOADERS] = partial(self._before_first_batch, trainer, own)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the random states, if the checkpoint has any."""
        self._loaded = checkpoint.get(_KEY)

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the random states of all ranks; a collective call, except on a rank that has failed and saves alone."""
        if self._step_state is None:
            return
        # Between two steps, Lightning has fetched no batch ahead, unless the loaders' length is unknown.
        fetcher, progress = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress.current
        is_between = fetcher is not None and fetcher.length is not None and progress.ready == progress.processed
        if not trainer.validating and (is_between or not self._loads_in_process):
            self._step_state = RandomState.now()
        own = {
            "orders": [_saved_order(trainer, loader, order) for loader, order in self._loaders],
            "step": self._step_state.saved(),
        }
        checkpoint[_KEY] = {
            "ranks": [own] if trainer.interrupted else of_all_ranks(own),
            "shares": [share and asdict(share) for share in _shares(trainer)],
        }

    def _before_first_batch(self, trainer: Any, load_states: Callable[[], None]) -> None:
        """Record the orders of the training loaders before their iteration starts; resume an epoch in progress.

        With ``reload_dataloaders_every_n_epochs``, Lightning calls this again for new loaders.
        """
        load_states()
        self._loaders = _recorded(trainer)
        if self._has_trained:
            return
        trainer.fit_loop.update_restart_stage()
        num_done = _num_done_in_epoch(trainer.fit_loop)
        if num_done is not None:
            self._num_done = self._resume_epoch(trainer, num_done)
            return
        for (loader, _), state in zip(self._loaders, self._restore_orders(trainer), strict=True):
            if isinstance(loader, RemoteDataLoader) and loader.persistent_workers and state.get("iterator"):
                # Start the next epoch as usual, with the random numbers that follow from the iterator's first seed.
                begin_at(loader, replace(IteratorPosition(**state["iterator"]), num_batches=0, ends={}))

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restore the progress and the random state of a resumed run."""
        fit_loop = trainer.fit_loop
        if self._num_done is None and _num_done_in_epoch(fit_loop) is not None:
            # Code has read ``estimated_stepping_batches``, so iteration started before Lightning restored the progress.
            # Start it again.
            fit_loop._load_combined_loader_states()
            iter(fit_loop._data_fetcher)
        if self._num_done is None:
            self._restore_orders(trainer)
        else:
            _set_num_done(fit_loop.epoch_loop, self._num_done)
        step_state = self._saved(trainer).get("step")
        self._loaded, self._has_trained = None, True
        # This includes loaders without workers on data hosts: they run their samplers in this process for each batch.
        self._loads_in_process = any(
            isinstance(loader, DataLoader) and loader.num_workers == 0 for loader in _all_loaders(trainer)
        )
        # After a resume at the end of an epoch, Lightning has the number of the previous epoch here. With it, Lightning
        # would reload the loaders, which would start over with the order of epoch 0.
        fit_loop._last_train_dl_reload_epoch = trainer.current_epoch
        if step_state is not None:
            RandomState.of(step_state).restore()
        epoch_loop = fit_loop.epoch_loop
        # If a run resumes after the last batch of an epoch, Lightning uses the iterators that it has already started
        # for the next epoch.
        is_at_end = epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch
        if is_at_end and fit_loop.restarted_mid_epoch and trainer.num_training_batches == math.inf:
            # Reset Lightning's count of batches, which would otherwise continue, because the length is unknown.
            _set_num_done(epoch_loop, 0)
        is_within = (fit_loop.restarted_mid_epoch and not is_at_end) or fit_loop.restarted_on_epoch_end
        # If an earlier, higher limit let more batches finish than this run allows, Lightning restarts the epoch.
        is_beyond = self._num_done is not None and self._num_done >= trainer.num_training_batches
        if is_beyond or not is_within:
            # A new epoch starts, but its orders were drawn before any hook could restore the random state. Redraw them.
            self._positions, is_too_early = [], step_state is not None
        else:
            # Workers got their datasets before ``on_train_epoch_start``, which may change them, was called again.
            is_too_early = trainer.current_epoch > 0 and bool(self._positions)
        if is_too_early:
            vars(fit_loop)["advance"] = partial(self._begin_epoch, trainer)
        self._step_state = RandomState.now()

    def _begin_epoch(self, trainer: Any) -> None:
        """Restart the iterators after the epoch-start hooks, which is when an uninterrupted run starts them."""
        vars(trainer.fit_loop).pop("advance")
        now = RandomState.now()
        _restart_iterators(trainer, self._loaders, self._positions)
        if self._positions:  # the interrupted run started these iterators before its last step
            now.restore()
        trainer.fit_loop.advance()

    def _saved(self, trainer: Trainer, rank: int | None = None) -> dict[str, Any]:
        """Return the saved state of a rank (by default, this one), or of another if fewer ranks saved, or else {}."""
        ranks: list[dict[str, Any]] = [{}] if self._loaded is None else self._loaded["ranks"]
        return ranks[(trainer.global_rank if rank is None else rank) % len(ranks)]

    def _restore_orders(self, trainer: Trainer, rank: int | None = None) -> list[dict[str, Any]]:
        """Restore and return the loader states that a rank saved (by default, this rank)."""
        self._loaders = _recorded(trainer)
        saved = iter(self._saved(trainer, rank).get("orders", ()))
        states: list[dict[str, Any]] = []
        for _, order in self._loaders:
            states.append(next(saved, {}))
            if order is not None and states[-1]:
                order.restore(states[-1])
        return states

    def _resume_epoch(self, trainer: Any, num_done: int) -> int:
        """Make the next iterators of the training loaders skip finished batches.

        Args:
            trainer: The Trainer.
            num_done: Number of the epoch's batches on which each rank had trained when the checkpoint was saved.

        Returns:
            The corresponding number of batches for each rank of this run.

        Raises:
            ResumeError: The ranks have changed, and the rest of the epoch cannot be determined.
        """
        # Silence Lightning's warning: this method positions the loaders, or warns about each loader that it cannot
        # position.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        loaders, now = _all_loaders(trainer), _shares(trainer)
        saved = (self._loaded or {}).get("shares", ()) if num_done else ()
        before = [share and _Share(**share) for share in saved]
        if len(before) != len(now):
            before = now
        now_done = _converted(num_done, loaders, before, now)
        is_changed = any(None not in (old, new) and old != new for old, new in zip(before, now, strict=True))
        # Samplers that split one order among ranks draw the same numbers on each rank, so use the state of rank 0.
        states = self._restore_orders(trainer, 0 if is_changed else None)
        is_cycle = trainer.fit_loop._combined_loader._mode == "max_size_cycle"
        resumed = []
        self._positions = []
        for (loader, order), state in zip(self._loaders, states, strict=True):
            iterator, num_skipped = state.get("iterator"), now_done
            if order is not None:
                num_skipped = _num_done_in_cycle(loader, now_done) if is_cycle else now_done
                order.announce_epoch(trainer.fit_loop.epoch_progress.current.processed)
                self._positions.append(partial(order.skip_next, num_skipped))
            elif iterator is not None:
                num_skipped -= state["begun_at"]
            if isinstance(loader, RemoteDataLoader) and iterator is not None and not is_changed:
                position = replace(IteratorPosition(**iterator), num_batches=max(0, num_skipped))
                self._positions.append(partial(begin_at, loader, position))
            elif order is None:
                continue
            resumed.append(loader)
        for set_position in self._positions:
            set_position()
        for loader in loaders:
            has_position = hasattr(loader, "load_state_dict") or isinstance(loader, FollowingLoader)
            if num_done and loader not in resumed and not has_position:
                logger.warning(
                    "Training resumes after batch %d of the epoch, but %s restarts from the first batch, because it is "
                    "not stateful. Use torchdata's StatefulDataLoader, or data hosts from the start of an epoch.",
                    now_done,
                    _name(loader),
                )
        return now_done

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the random state after a step if anything may draw from it before a checkpoint is saved.

        If this process loads the next batch, loading draws from this state. A validation draws from the state before
        any validation hook runs, and a resumed run repeats an interrupted validation.
        """
        if self._loads_in_process or trainer.is_last_batch or (batch_idx + 1) % (trainer.val_check_batch or 1) == 0:
            self._step_state = RandomState.now()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the random state after a validation, which a resumed run does not repeat."""
        if not trainer.sanity_checking:
            self._step_state = RandomState.now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the random state after an epoch."""
        self._step_state = RandomState.now()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the loaders' own samplers; if the fit had already ended and did not train, also its random state.

        With that state, the script continues as it did after the earlier fit. ``predict`` needs the loaders' own
        samplers, because Lightning then rebuilds a loader from its parts.
        """
        step_state = self._saved(trainer).get("step")
        if self._loaded is not None:
            self._restore_orders(trainer)
        for loader, order in self._loaders:
            if order is not None:
                order.remove(loader)
        if step_state is not None:
            RandomState.of(step_state).restore()
        _end_restart(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the Trainer's next fit start normally, even if this one failed before it trained."""
        _end_restart(trainer)


def _end_restart(trainer: Any) -> None:
    """Clear the restart state of Lightning's loops, as the loops themselves do after a step."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (trainer.fit_loop, epoch_loop, epoch_loop.val_loop):
        loop.on_iteration_done()


def _all_loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def _name(loader: Any) -> str:
    return type(getattr(loader, "dataset", loader)).__name__


def _is_stream(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _recorded(trainer: Trainer) -> _Loaders:
    """Return the training loaders that are DataLoaders but not stateful, each with the recorder of its order."""
    loaders = [loader for loader in _all_loaders(trainer) if isinstance(loader, DataLoader)]
    return [
        (loader, None if _is_stream(loader) else _RecordedOrder.of(loader))
        for loader in loaders
        if not hasattr(loader, "load_state_dict")
    ]


def _saved_order(trainer: Trainer, loader: DataLoader[Any], order: _RecordedOrder | None) -> dict[str, Any]:
    """Return the position of a loader, as values that ``torch.load(weights_only=True)`` accepts.

    The position consists of the random states from which the loader drew its order, and its generator's state. For a
    loader with workers on data hosts, it also includes the iterator's position, and the index of the iterator's first
    batch within the epoch.
    """
    drawn_with, generator = (None, None) if order is None else order.drawn()
    iterator = _iterator_of(trainer, loader)
    return {
        "drawn_with": drawn_with and [state.saved() for state in drawn_with],
        "generator": generator,
        "iterator": iterator and asdict(iterator[0]),
        "begun_at": iterator and iterator[1],
    }


def _num_done_in_epoch(fit_loop: Any) -> int | None:
    """Return the number of finished batches if a run resumes within an epoch, else None."""
    progress = fit_loop.epoch_loop.batch_progress
    is_within = fit_loop.restarted_mid_epoch and not progress.is_last_batch
    return int(progress.current.processed) if is_within else None


def _iterator_of(trainer: Any, loader: DataLoader[Any]) -> tuple[IteratorPosition, int] | None:
    """Return the position of a loader's iterator on data hosts, and the index of its first batch within the epoch."""
    position, fit_loop = position_of(loader), trainer.fit_loop
    if position is None:
        return None
    fetcher, combined = fit_loop._data_fetcher, fit_loop._combined_loader
    is_cycle = fetcher is not None and combined is not None and combined._mode == "max_size_cycle"
    return position, max(0, fetcher.fetched - position.num_batches) if is_cycle else 0


def _num_done_in_cycle(loader: DataLoader[Any], num_done: int) -> int:
    """Return the number of batches since Lightning last restarted a loader that is shorter than another loader."""
    length = sized_len(loader)  # None if its batch sampler has no length
    return (num_done - 1) % length + 1 if num_done and length else num_done


def _restart_iterators(trainer: Any, loaders: _Loaders, positions: list[Callable[[], None]]) -> None:
    """Restart the loaders' iterators, which were started before any hook or the samplers' ``set_epoch`` ran.

    The iterators of other loaders are not restarted: a stream may be readable only once, and a stateful loader has just
    loaded its state.
    """
    fit_loop = trainer.fit_loop
    combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
    restarted = [item for item in loaders if item[1] is not None or isinstance(item[0], RemoteDataLoader)]
    are_all = len(restarted) == len(combined.flattened)
    if fetcher.length is None and not are_all:
        return  # too late: Lightning has already fetched a first batch from every loader
    for set_position in positions:
        set_position()
    for _, order in restarted:
        if order is not None:
            order.announce_epoch(fit_loop.epoch_progress.current.processed)
    if restarted and are_all:
        iter(fetcher)  # also fetches a batch if the length is unknown
        return
    for loader, _ in restarted:
        combined._iterator.iterators[combined.flattened.index(loader)] = iter(loader)


@dataclass(frozen=True)
class _Share:
    """How ranks share a loader's data.

    Attributes:
        num_ranks: Number of ranks that get different samples.
        batch_size: Number of samples in a rank's batch; None if the user's batch sampler decides.
        sampler: Class name of the sampler.
        is_split: Whether the sampler is a DistributedSampler, which splits one order among the ranks.
        num_workers: Number of workers per rank for a stream on data hosts, else 0.
    """

    num_ranks: int
    batch_size: int | None
    sampler: str
    is_split: bool
    num_workers: int

    @property
    def ranks(self) -> str:
        """The number of ranks, for messages."""
        return f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"


def _shares(trainer: Any) -> list[_Share | None]:
    """Return how ranks share each training loader's data; None if unknown, or if the loader cannot resume here."""
    return [_share_of(trainer, loader) for loader in _all_loaders(trainer)]


def _share_of(trainer: Any, loader: Any) -> _Share | None:
    if not isinstance(loader, (DataLoader, FollowingLoader)) or hasattr(loader, "load_state_dict"):
        return None
    if isinstance(loader, FollowingLoader) and not isinstance(getattr(loader, "sampler", None), Sampler):
        return None
    num_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
    if _is_stream(loader):
        is_remote = isinstance(loader, RemoteDataLoader)
        return _Share(num_ranks, loader.batch_size, "", False, max(1, loader.num_workers)) if is_remote else None
    batch_sampler = _RecordedOrder.inner(loader.batch_sampler)
    sampler = getattr(batch_sampler, "sampler", _RecordedOrder.inner(loader.sampler))
    batch_size = 1 if batch_sampler is None else None
    if type(batch_sampler) is BatchSampler:
        batch_size = batch_sampler.batch_size
    is_split = isinstance(sampler, DistributedSampler)
    return _Share(sampler.num_replicas if is_split else num_ranks, batch_size, type(sampler).__name__, is_split, 0)


def _converted(num_done: int, loaders: list[Any], before: list[_Share | None], now: list[_Share | None]) -> int:
    """Convert a number of batches per rank to the ranks and batch sizes of this run, rounded down.

    Args:
        num_done: Number of finished batches.
        loaders: The loaders.
        before: How ranks shared the loaders' data in the run that saved the checkpoint.
        now: How ranks share the loaders' data in this run.

    Raises:
        ResumeError: The rest of the epoch cannot be determined.
    """
    converted = {
        (num_done, 0) if old == new else _divided(num_done, _name(loader), old, new)
        for loader, old, new in zip(loaders, before, now, strict=True)
        if old is not None and new is not None
    }
    batches = {number for number, _ in converted} or {num_done}
    if len(batches) > 1:
        raise ResumeError(
            f"The checkpoint was saved after batch {num_done} of an epoch. With this run's ranks and batch sizes, the "
            f"loaders would resume after different batches: {' and '.join(map(str, sorted(batches)))}. Change the "
            "batch sizes of all loaders by the same factor, or resume from a checkpoint at the end of an epoch."
        )
    (now_done,) = batches
    if now_done != num_done or any(rest for _, rest in converted):
        _warn_once(
            "The checkpoint was saved after batch %d of an epoch, which corresponds to batch %d with the ranks and "
            "batch sizes of this run. Repeated samples: %d.",
            num_done,
            now_done,
            max(rest for _, rest in converted),
        )
    return now_done


def _divided(num_done: int, name: str, old: _Share, new: _Share) -> tuple[int, int]:
    """Convert a number of finished batches from an old to a new share; return it and the number of repeated samples."""
    saved = f"The checkpoint was saved after batch {num_done} of an epoch over {name}, on {old.ranks}"
    remedy = "or from a checkpoint at the end of an epoch."
    if old.num_workers or new.num_workers:
        raise ResumeError(
            f"{saved} with num_workers={old.num_workers} and batch_size={old.batch_size}, but this run has {new.ranks} "
            f"with num_workers={new.num_workers} and batch_size={new.batch_size}. A stream can resume only if the same "
            "number of workers read it as before. Resume with the same number of ranks and the same DataLoader "
            f"arguments, {remedy}"
        )
    if old.is_split != new.is_split or (old.num_ranks != new.num_ranks and not old.is_split):
        raise ResumeError(
            f"{saved} with {old.sampler}, but this run has {new.ranks} with {new.sampler}. An epoch can resume on "
            "another number of ranks only with the DistributedSampler that Lightning inserts (on a single rank, with "
            f'strategy="ddp"). Resume with the same number of ranks, sampler and strategy, {remedy}'
        )
    if old.batch_size is None or new.batch_size is None:
        if old.num_ranks == new.num_ranks:
            return num_done, 0
        raise ResumeError(
            f"{saved}, but this run has {new.ranks}, for which the batch sampler may choose other batches. Resume with "
            f"the same number of ranks, {remedy}"
        )
    return divmod(num_done * old.num_ranks * old.batch_size, new.num_ranks * new.batch_size)


def _set_num_done(epoch_loop: Any, num_done: int) -> None:
    """Set Lightning's count of finished batches in the epoch."""
    progress = epoch_loop.batch_progress.current
    difference = num_done - progress.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + difference)


class _DrawnWith(NamedTuple):
    """The random states from which a sampler drew an order.

    Attributes:
        at_iter: The state before the call to ``__iter__``, during which some samplers draw.
        at_first: The state before the request for the first item, during which samplers draw if ``__iter__`` is a
            generator function.
    """

    at_iter: RandomState
    at_first: RandomState


class _RecordedOrder:
    """A wrapper for a loader's sampler that records the random states behind each order, and can skip items.

    All other attributes are delegated to the sampler: Lightning and users read some of them, such as ``sampler``.
    """

    def __init__(self, sampler: Any, inner: list[Any]) -> None:
        self._sampler = sampler
        self._inner = inner
        generators = [getattr(each, "generator", None) for each in inner]
        self._generator = next((each for each in generators if isinstance(each, torch.Generator)), None)
        self._drawn_with: _DrawnWith | None = None
        self._num_skipped: int | None = None

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> _RecordedOrder:
        """Return a loader's wrapper, inserting one if needed."""
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if isinstance(sampler, cls):
            return sampler
        # Lightning looks for ``set_epoch`` in these two places.
        order = cls(sampler, [loader.sampler, getattr(loader.batch_sampler, "sampler", None)])
        _set_sampler(loader, order)
        return order

    @classmethod
    def inner(cls, sampler: Any) -> Any:
        """Return the sampler inside a wrapper; return any other sampler unchanged."""
        return sampler._sampler if isinstance(sampler, cls) else sampler

    def remove(self, loader: DataLoader[Any]) -> None:
        _set_sampler(loader, self._sampler)

    def announce_epoch(self, epoch: int) -> None:
        for sampler in self._inner:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def drawn(self) -> tuple[_DrawnWith | None, torch.Tensor | None]:
        """Return the random states from which the last order was drawn, and the generator's state."""
        return self._drawn_with, None if self._generator is None else self._generator.get_state()

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the generator's state, and the random states from which another run drew its last order."""
        drawn_with = saved["drawn_with"]
        self._drawn_with = None if drawn_with is None else _DrawnWith(*map(RandomState.of, drawn_with))
        if self._generator is not None and saved["generator"] is not None:
            self._generator.set_state(saved["generator"].cpu())

    def skip_next(self, num_skipped: int) -> None:
        """Make the next iteration draw its order from the restored states, and skip its first items."""
        self._num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:
        now = at_iter = RandomState.now(self._generator)
        repeated = None if self._num_skipped is None else self._drawn_with
        if repeated is not None:
            at_iter = repeated.at_iter
            at_iter.restore(self._generator)
        items = iter(self._sampler)
        if repeated is not None:
            now.restore()
        return self._items(items, at_iter)

    def _items(self, items: Iterator[Any], at_iter: RandomState) -> Iterator[Any]:
        """Yield the items of an order, which many samplers draw when the first item is requested.

        DataLoader may call ``__iter__`` twice and use only the second order, so record the order here.
        """
        num_skipped = self._num_skipped
        self._num_skipped = None
        now = RandomState.now(self._generator)
        if num_skipped is None or self._drawn_with is None:
            self._drawn_with = _DrawnWith(at_iter, now)
        if num_skipped is not None:
            self._drawn_with.at_first.restore(self._generator)
            first = list(itertools.islice(items, num_skipped, num_skipped + 1))
            if num_skipped > 0:  # otherwise, the first batch draws from the state after the order was drawn
                now.restore()
            yield from first
        yield from items

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _set_sampler(loader: Any, sampler: Any) -> None:
    # DataLoader forbids setting the sampler, because iterators keep the old one (forever, if workers are persistent).
    # So set the new one in the iterator, too.
    object.__setattr__(loader, "sampler" if loader.batch_sampler is None else "batch_sampler", sampler)
    if loader._iterator is not None:
        loader._iterator._index_sampler = sampler


_Loaders: TypeAlias = list[tuple[DataLoader[Any], _RecordedOrder | None]]
