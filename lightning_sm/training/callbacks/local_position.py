"""LocalPosition: resume DataLoaders that read the data in the training process, without data hosts.

Lightning restores the number of batches of an epoch that are done, but restarts the loaders: a resumed epoch would
train on its first batches twice, and never on its last ones.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_sm._lightning import Callback, LightningModule, Trainer
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.random_state import RandomState
from lightning_sm.training.strategies.pipeline.loaders import FollowingLoader

logger = logging.getLogger(__name__)

RANDOM_STATES_KEY = "lightning_sm.random_states"


@dataclass(frozen=True)
class LoaderOrders:
    """The random states of a rank between two steps.

    Attributes:
        orders: For each loader, the states with which it drew its order, and that of its generator.
        step: The state after the step.
    """

    orders: list[tuple[_DrawnWith | None, torch.Tensor | None]]
    step: RandomState

    def saved(self) -> dict[str, Any]:
        """Convert to values that ``torch.load(weights_only=True)`` accepts."""
        orders = [
            {"drawn_with": drawn_with and [state.saved() for state in drawn_with], "generator": generator}
            for drawn_with, generator in self.orders
        ]
        return {"orders": orders, "step": self.step.saved()}


class LocalPosition(Callback):
    """A callback that resumes in the middle of an epoch, with the batch and the random numbers that would come next.

    Every checkpoint holds random states of each rank: those with which its loaders drew their orders, and the one after
    the last step. The orders, and the random numbers of the training process (dropout, augmentation without workers),
    are those of an uninterrupted run. The random numbers that the workers of a DataLoader draw are not.

    ``SageMakerCLI`` and ``SageMakerTrainer`` add it to every job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._orders: list[_RecordedOrder] = []
        self._step_state: RandomState | None = None
        self._loaded: dict[str, Any] | None = None
        self._loads_in_process = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what another run of the Trainer has loaded: a test, or a fit that was at its end already.

        Lightning begins the pass over loaders for training before it calls any other hook of callbacks, so their orders
        are recorded from where they are processed.
        """
        self._loaded = None
        if stage == "fit":
            self._step_state = None
            strategy: Any = trainer.strategy
            if not isinstance(strategy.process_dataloader, _RecordingProcess):
                strategy.process_dataloader = _RecordingProcess(trainer, strategy.process_dataloader)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the random states, if the checkpoint has any."""
        self._loaded = checkpoint.get(RANDOM_STATES_KEY)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the random states of all ranks; a collective call, except on a rank that has failed and saves alone."""
        position = self.position(trainer)
        if position is None:
            return
        own = position.saved()
        checkpoint[RANDOM_STATES_KEY] = {"ranks": [own] if trainer.interrupted else of_all_ranks(own)}

    def position(self, trainer: Trainer) -> LoaderOrders | None:
        """Return the random states of this rank that a checkpoint holds now; None before the training."""
        if self._step_state is None:
            return None
        if not (self._loads_in_process or trainer.validating):
            self._step_state = RandomState.now()
        return LoaderOrders([order.drawn() for order in self._orders], self._step_state)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Set the loaders of a resumed run to its position."""
        fit_loop = trainer.fit_loop
        loaders = _resumable_loaders(trainer)
        step_state = self._restore_orders(trainer, loaders)
        self._loads_in_process = any(
            isinstance(loader, DataLoader) and loader.num_workers == 0 for loader in _all_loaders(trainer)
        )
        # After a resume at the end of an epoch, Lightning has stored the previous epoch here, and would reload the
        # loaders, which would start over with the order of epoch 0.
        fit_loop._last_train_dl_reload_epoch = trainer.current_epoch
        num_done = int(fit_loop.epoch_loop.batch_progress.current.processed)
        if fit_loop.restarted_mid_epoch and num_done < trainer.num_training_batches:
            _resume_epoch(trainer, loaders, num_done)
        if step_state is not None:
            step_state.restore()
        is_resumed = step_state is not None or fit_loop.epoch_progress.current.processed > 0
        if is_resumed and not (fit_loop.restarted_mid_epoch or fit_loop.restarted_on_epoch_end):
            # The run starts with a new epoch, whose orders were drawn before any hook could restore the random state.
            _restart_iterators(trainer, loaders)
        self._step_state = RandomState.now()

    def _restore_orders(self, trainer: Trainer, loaders: list[DataLoader[Any]]) -> RandomState | None:
        """Restore the states of the loaders, and return that of the process; None if none is to be restored."""
        ranks: list[dict[str, Any]] = [{}] if self._loaded is None else self._loaded["ranks"]
        states = ranks[trainer.global_rank % len(ranks)]
        self._loaded = None
        self._orders = [_RecordedOrder.of(loader) for loader in loaders]
        for order, saved in zip(self._orders, states.get("orders", ()), strict=False):
            order.restore(saved)
        return RandomState.of(states["step"]) if states else None

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Look up the loaders of the epoch: ``reload_dataloaders_every_n_epochs`` replaces them."""
        self._orders = [_RecordedOrder.of(loader) for loader in _resumable_loaders(trainer)]

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the random state after a step if something may draw from it before a checkpoint is saved.

        The next batch does, if this process loads it, and a validation does, before any of its hooks is called. A
        resumed run repeats an interrupted validation.
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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the loaders' samplers: for ``predict``, Lightning rebuilds a loader from its parts."""
        _remove_recorded(_resumable_loaders(trainer))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave a fit that was at its end and has not trained as if it had: the script and its next fit go on."""
        if self._loaded is not None:
            loaders = _resumable_loaders(trainer)
            step_state = self._restore_orders(trainer, loaders)
            _remove_recorded(loaders)
            if step_state is not None:
                step_state.restore()
        _end_restart(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the next fit of the Trainer begin as any other, also if this one has failed before it trained."""
        _end_restart(trainer)


def _remove_recorded(loaders: list[DataLoader[Any]]) -> None:
    for loader in loaders:
        _RecordedOrder.of(loader).remove(loader)


def _end_restart(trainer: Any) -> None:
    """Note in Lightning's loops that they go on from no checkpoint, as they do themselves after a step."""
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (trainer.fit_loop, epoch_loop, epoch_loop.val_loop):
        loop.on_iteration_done()


def _all_loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def _resumable_loaders(trainer: Any) -> list[DataLoader[Any]]:
    """Return the training loaders whose position this callback can set: DataLoaders that are not stateful."""
    loaders = _all_loaders(trainer)
    resumable = [loader for loader in loaders if _is_resumable(loader)]
    # Next to a stream of unknown length, Lightning fetches a first batch from every loader before any hook. A fit that
    # is at its end fetches none.
    fetcher = trainer.fit_loop._data_fetcher
    is_prefetched = len(resumable) < len(loaders) and fetcher is not None and fetcher.length is None
    return [] if is_prefetched else resumable


def _is_resumable(loader: object) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
    )


def _resume_epoch(trainer: Any, loaders: list[DataLoader[Any]], num_done: int) -> None:
    """Restart the pass over the training loaders, without its first ``num_done`` batches."""
    is_cycle = trainer.fit_loop._combined_loader._mode == "max_size_cycle"
    for loader in loaders:
        _RecordedOrder.of(loader).skip_next(_num_done_in_cycle(loader, num_done) if is_cycle else num_done)
    _restart_iterators(trainer, loaders)
    for loader in _all_loaders(trainer):
        has_position = hasattr(loader, "load_state_dict") or isinstance(loader, FollowingLoader)
        if num_done and loader not in loaders and not has_position:
            logger.warning(
                "Training resumes after batch %d of the epoch, but %s restarts from the first batch: it is not "
                "stateful. Use torchdata's StatefulDataLoader or data hosts, which are.",
                num_done,
                type(getattr(loader, "dataset", loader)).__name__,
            )
    # Silence Lightning's own warning: the loaders are positioned above, or named in a warning of ours.
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")


def _num_done_in_cycle(loader: DataLoader[Any], num_done: int) -> int:
    """Return the number of batches since Lightning last restarted a loader that is shorter than another one."""
    try:
        length = len(loader)
    except TypeError:  # a batch sampler without a length
        return num_done
    return (num_done - 1) % length + 1 if num_done and length else num_done


def _restart_iterators(trainer: Any, loaders: list[DataLoader[Any]]) -> None:
    """Restart the iterators of loaders, which started before any hook, and before samplers were told the epoch.

    The iterators of other loaders are left alone: a stream may be readable only once, and a stateful loader has just
    been given its state.
    """
    fit_loop = trainer.fit_loop
    combined = fit_loop._combined_loader
    for loader in loaders:
        _RecordedOrder.of(loader).announce_epoch(fit_loop.epoch_progress.current.processed)
    if loaders and len(loaders) == len(combined.flattened):
        iter(fit_loop._data_fetcher)  # also fetches a batch if the length is unknown
        return
    for loader in loaders:
        combined._iterator.iterators[combined.flattened.index(loader)] = iter(loader)


class _DrawnWith(NamedTuple):
    """The random states with which a sampler drew an order.

    Attributes:
        at_iter: Before its ``__iter__``, in which some samplers draw.
        at_first: Before its first item, for which those draw whose ``__iter__`` is a generator function.
    """

    at_iter: RandomState
    at_first: RandomState


class _RecordingProcess:
    """A strategy's ``process_dataloader``, which also records the orders of loaders for training."""

    def __init__(self, trainer: Trainer, own: Callable[[object], object]) -> None:
        self._trainer, self._own = trainer, own

    def __call__(self, loader: object) -> object:
        processed = self._own(loader)
        if self._trainer.training and _is_resumable(processed):
            _RecordedOrder.of(cast("DataLoader[Any]", processed))
        return processed


class _RecordedOrder:
    """A wrapper of a loader's sampler that records the random states with which an order is drawn, and can skip items.

    All other attributes are those of the wrapped sampler: Lightning and users look for some, such as ``sampler``.
    """

    def __init__(self, sampler: Any, inner: list[Any]) -> None:
        self._sampler = sampler
        self._inner = inner
        generators = [getattr(each, "generator", None) for each in inner]
        self._generator = next((own for own in generators if isinstance(own, torch.Generator)), None)
        self._drawn_with: _DrawnWith | None = None
        self._num_skipped: int | None = None

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> _RecordedOrder:
        """Return the wrapper in a loader; put one in if there is none."""
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if isinstance(sampler, cls):
            return sampler
        # Lightning looks for ``set_epoch`` in these two places.
        order = cls(sampler, [loader.sampler, getattr(loader.batch_sampler, "sampler", None)])
        _set_sampler(loader, order)
        return order

    def remove(self, loader: DataLoader[Any]) -> None:
        _set_sampler(loader, self._sampler)

    def announce_epoch(self, epoch: int) -> None:
        for sampler in self._inner:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def drawn(self) -> tuple[_DrawnWith | None, torch.Tensor | None]:
        """Return the states with which the last order was drawn, and that of the generator."""
        return self._drawn_with, None if self._generator is None else self._generator.get_state()

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore what another run saved: the generator's state, and the states with which it drew its last order."""
        drawn_with = saved["drawn_with"]
        self._drawn_with = None if drawn_with is None else _DrawnWith(*map(RandomState.of, drawn_with))
        if self._generator is not None and saved["generator"] is not None:
            self._generator.set_state(saved["generator"].cpu())

    def skip_next(self, num_skipped: int) -> None:
        """Draw the next order with the restored states, and skip its first items."""
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
        """Yield the items of an order, which many samplers draw when the first one is requested.

        DataLoader may call ``__iter__`` twice and take items only of the second order: this one is recorded.
        """
        num_skipped = self._num_skipped
        self._num_skipped = None
        now = RandomState.now(self._generator)
        if num_skipped is None or self._drawn_with is None:
            self._drawn_with = _DrawnWith(at_iter, now)
        if num_skipped is not None:
            self._drawn_with.at_first.restore(self._generator)
            first = list(itertools.islice(items, num_skipped, num_skipped + 1))
            if num_skipped > 0:  # else the first batch draws from the state that the order left
                now.restore()
            yield from first
        yield from items

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _set_sampler(loader: Any, sampler: Any) -> None:
    # DataLoader forbids setting it, because an iterator keeps the old one, with persistent workers for ever: set it in
    # the iterator, too.
    object.__setattr__(loader, "sampler" if loader.batch_sampler is None else "batch_sampler", sampler)
    if loader._iterator is not None:
        loader._iterator._index_sampler = sampler
