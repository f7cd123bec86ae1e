"""Where a run stands in the data that it reads itself: DataLoaders of the user, without data hosts.

Lightning restores how many batches of an epoch are done, but begins the loaders anew: a resumed epoch would train on
its first batches twice, and never on its last ones.
"""

from __future__ import annotations

import itertools
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_sm._lightning import Callback, LightningModule, Trainer

logger = logging.getLogger(__name__)

_CHECKPOINT_KEY = "lightning_sm.random_states"


class LocalPosition(Callback):
    """Go on in the middle of an epoch with the batch, and the random numbers, that would have come next.

    Every checkpoint holds random states of each rank: those that the orders of its loaders were drawn with, and that at
    the step. The orders and what the training process draws (dropout, augmentation without workers) are those of a run
    that was not interrupted; what workers of a DataLoader draw is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._orders: list[_Order] = []
        self._step_state: _State | None = None
        self._loaded: dict[str, Any] | None = None
        self._loads_here = True

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the random states; checkpoints of other programs have none."""
        self._loaded = checkpoint.get(_CHECKPOINT_KEY)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the random states of all ranks, each of which calls this."""
        if self._step_state is None:
            return
        if not (self._loads_here or trainer.validating):
            self._step_state = _State.now()
        own = {"orders": [order.saved() for order in self._orders], "step": self._step_state.saved()}
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint[_CHECKPOINT_KEY] = {"ranks": states}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Put the loaders of a resumed run where it stands."""
        loaded, self._loaded = self._loaded, None
        states = {} if loaded is None else loaded["ranks"][trainer.global_rank % len(loaded["ranks"])]
        fit_loop, loaders = trainer.fit_loop, _local_loaders(trainer)
        self._orders = [_Order.of(loader) for loader in loaders]
        for order, saved in zip(self._orders, states.get("orders", ()), strict=False):
            order.restore(saved)
        self._loads_here = any(
            isinstance(loader, DataLoader) and loader.num_workers == 0 for loader in _all_loaders(trainer)
        )
        # At the end of an epoch, Lightning took it for the one before and would load again, for the order of epoch 0.
        fit_loop._last_train_dl_reload_epoch = trainer.current_epoch
        done = int(fit_loop.epoch_loop.batch_progress.current.processed)
        if fit_loop.restarted_mid_epoch and done < trainer.num_training_batches:
            _go_on(trainer, loaders, done)
        if states:
            _State.of(states["step"]).restore()
        if not (fit_loop.restarted_mid_epoch or fit_loop.restarted_on_epoch_end):
            # A new epoch begins, with what was drawn before any hook.
            is_resumed = fit_loop.epoch_progress.current.processed > 0
            _begin_anew(trainer, [loader for loader in loaders if is_resumed or not _Order.of(loader).follows_epoch])
        self._step_state = _State.now()

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Follow the orders of loaders that come with the epoch (``reload_dataloaders_every_n_epochs``)."""
        self._orders = [_Order.of(loader) for loader in _local_loaders(trainer)]

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the random state after a step, if something draws from it before it can be saved.

        That is the next batch, if it is made in this process, or a validation, which is repeated if it is interrupted
        (and which draws before any of its hooks is called).
        """
        if self._loads_here or trainer.is_last_batch or (batch_idx + 1) % (trainer.val_check_batch or 1) == 0:
            self._step_state = _State.now()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the random state after a validation, which a resumed run does not repeat."""
        if not trainer.sanity_checking:
            self._step_state = _State.now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the random state after an epoch."""
        self._step_state = _State.now()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the loaders as they were: Lightning makes a new one from the parts of one that is given to predict."""
        for loader in _local_loaders(trainer):
            _Order.of(loader).remove(loader)


class _State:
    """All random numbers of this process, and of a generator.

    Often taken and rarely saved: nothing is converted before that.
    """

    def __init__(
        self,
        torch_state: torch.Tensor,
        numpy_state: Any,
        python_state: Any,
        cuda: torch.Tensor | None,
        generator: torch.Tensor | None,
    ) -> None:
        self._torch, self._numpy, self._python = torch_state, numpy_state, python_state
        self._cuda, self._generator = cuda, generator

    @classmethod
    def now(cls, generator: torch.Generator | None = None) -> _State:
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            torch.get_rng_state(),
            np.random.get_state(),  # the one that users' code draws from
            random.getstate(),
            torch.cuda.get_rng_state() if has_cuda else None,
            None if generator is None else generator.get_state(),
        )

    def saved(self) -> dict[str, Any]:
        """What ``torch.load(weights_only=True)`` accepts."""
        name, keys, *rest = self._numpy
        version, numbers, gauss = self._python
        return {
            "torch": self._torch,
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
            "python": [version, torch.tensor(numbers), gauss],
            "cuda": self._cuda,
            "generator": self._generator,
        }

    @classmethod
    def of(cls, saved: dict[str, Any]) -> _State:
        name, keys, *rest = saved["numpy"]
        version, numbers, gauss = saved["python"]
        numpy_state = (name, keys.cpu().numpy().astype(np.uint32), *rest)
        python_state = (version, tuple(numbers.tolist()), gauss)
        cuda, generator = (None if state is None else state.cpu() for state in (saved["cuda"], saved["generator"]))
        return cls(saved["torch"].cpu(), numpy_state, python_state, cuda, generator)

    def restore(self, generator: torch.Generator | None = None) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)  # as above
        random.setstate(self._python)
        if self._cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self._cuda)
        if self._generator is not None and generator is not None:
            generator.set_state(self._generator)


def _all_loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def _local_loaders(trainer: Any) -> list[DataLoader[Any]]:
    """The training loaders that can be told where to go on, and do not know it themselves."""
    every = _all_loaders(trainer)
    local = [
        loader
        for loader in every
        if isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
    ]
    # Beside a stream of unknown length, of which a batch is fetched before any hook, together with one of the others.
    is_fetched = len(local) < len(every) and trainer.fit_loop._data_fetcher.length is None
    return [] if is_fetched else local


def _go_on(trainer: Any, loaders: list[DataLoader[Any]], done: int) -> None:
    """Begin the pass over the training loaders again, without its first batches."""
    is_cycle = trainer.fit_loop._combined_loader._mode == "max_size_cycle"
    for loader in loaders:
        _Order.of(loader).go_on(_done_in_pass(loader, done) if is_cycle else done)
    _begin_anew(trainer, loaders)
    for loader in _all_loaders(trainer):
        if done and loader not in loaders and not hasattr(loader, "load_state_dict"):
            logger.warning(
                "The training goes on after batch %d, but %s begins at its beginning: it cannot be told where to go "
                "on. torchdata's StatefulDataLoader can, and so can data hosts.",
                done,
                type(getattr(loader, "dataset", loader)).__name__,
            )
    # Lightning's warning that the loaders cannot be told where to go on; they were, or it has been said.
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")


def _done_in_pass(loader: DataLoader[Any], done: int) -> int:
    """Count the batches since Lightning began a loader again that is shorter than another one."""
    try:
        length = len(loader)
    except TypeError:  # a batch sampler without a length
        return done
    return (done - 1) % length + 1 if done and length else done


def _begin_anew(trainer: Any, loaders: list[DataLoader[Any]]) -> None:
    """Begin passes again: the first ones began before any hook, and before Lightning told samplers the epoch.

    Nothing else is begun again: a stream may be read only once, and a loader may have just been put into its state.
    """
    fit_loop, combined = trainer.fit_loop, trainer.fit_loop._combined_loader
    for loader in loaders:
        _Order.of(loader).tell_epoch(fit_loop.epoch_progress.current.processed)
    if loaders and len(loaders) == len(combined.flattened):
        iter(fit_loop._data_fetcher)  # which fetches a batch, if the length is unknown
        return
    for loader in loaders:
        combined._iterator.iterators[combined.flattened.index(loader)] = iter(loader)


class _Order:
    """The sampler of a loader, which notes what its order is drawn with, and can leave out the first items."""

    def __init__(self, sampler: Any, inner: list[Any]) -> None:
        self._sampler = sampler
        self._inner = inner
        generators = [getattr(each, "generator", None) for each in inner]
        self._generator = next((own for own in generators if isinstance(own, torch.Generator)), None)
        self._drawn_with: _State | None = None
        self._num_left_out: int | None = None

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> _Order:
        """The one in a loader, which is put there if there is none."""
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if isinstance(sampler, cls):
            return sampler
        # Both is where Lightning looks for ``set_epoch``.
        order = cls(sampler, [loader.sampler, getattr(loader.batch_sampler, "sampler", None)])
        _put(loader, order)
        return order

    def remove(self, loader: DataLoader[Any]) -> None:
        _put(loader, self._sampler)

    @property
    def follows_epoch(self) -> bool:
        """Whether the order comes from the number of the epoch, not from random numbers of the process."""
        return any(hasattr(sampler, "set_epoch") for sampler in self._inner)

    def tell_epoch(self, epoch: int) -> None:
        for sampler in self._inner:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def saved(self) -> dict[str, Any]:
        return {
            "drawn_with": None if self._drawn_with is None else self._drawn_with.saved(),
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take what another run saved: its generator, for the next pass, and what its last pass was drawn with."""
        self._drawn_with = None if saved["drawn_with"] is None else _State.of(saved["drawn_with"])
        if self._generator is not None and saved["generator"] is not None:
            self._generator.set_state(saved["generator"].cpu())

    def go_on(self, num_left_out: int) -> None:
        """Let the next pass be the rest of the one that was restored."""
        self._num_left_out = num_left_out

    def __iter__(self) -> Iterator[Any]:
        # A generator: the order is drawn with the first item.
        num_left_out, self._num_left_out = self._num_left_out, None
        now = _State.now(self._generator)
        items = iter(self._sampler)
        if num_left_out is None or self._drawn_with is None:
            self._drawn_with = now
        if num_left_out is not None:
            self._drawn_with.restore(self._generator)
            first = list(itertools.islice(items, num_left_out, num_left_out + 1))
            if num_left_out > 0:  # else the first batch is made with what comes behind the order
                now.restore()
            yield from first
        yield from items

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _put(loader: Any, sampler: Any) -> None:
    # DataLoader forbids to set it, as an iterator holds the old one; that of persistent workers for ever.
    object.__setattr__(loader, "sampler" if loader.batch_sampler is None else "batch_sampler", sampler)
    if loader._iterator is not None:
        loader._iterator._index_sampler = sampler
