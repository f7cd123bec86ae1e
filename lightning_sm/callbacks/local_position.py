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

    Every checkpoint holds the random state of each rank: at the beginning of the epoch, from which a loader's order
    follows, and at the step. The order and what the training process draws (dropout, augmentation without workers) are
    those of a run that was not interrupted; what workers of a DataLoader draw is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoch_state: _State | None = None
        self._step_state: _State | None = None
        self._loaded: dict[str, Any] | None = None
        self._loads_here = True

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the random states; checkpoints of other programs have none."""
        self._loaded = checkpoint.get(_CHECKPOINT_KEY)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the random states of all ranks, each of which calls this."""
        if self._epoch_state is None or self._step_state is None:
            return
        if not (self._loads_here or trainer.validating):
            self._step_state = _State.now()
        own = {"epoch": self._epoch_state.saved(), "step": self._step_state.saved()}
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint[_CHECKPOINT_KEY] = {"ranks": states}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Put the loaders of a resumed run where it stands, and note where a new one begins."""
        loaded, self._loaded = self._loaded, None
        loaders = _local_loaders(trainer)
        self._loads_here = any(loader.num_workers == 0 for loader in loaders)
        done = int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)
        is_within_epoch = trainer.fit_loop.restarted_mid_epoch and 0 < done < trainer.num_training_batches
        states = None if loaded is None else loaded["ranks"][trainer.global_rank % len(loaded["ranks"])]
        if is_within_epoch and loaders:
            if states is not None:
                _State.of(states["epoch"]).restore()
            self._epoch_state = _State.now()
            _begin_anew(trainer, loaders, done)
            # Lightning's warning that the loaders cannot be told where to go on; they were.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        elif loaded is None and any(map(_draws_order, loaders)):
            self._epoch_state = _State.now()  # the loaders have drawn from another one, which nobody knows
            _begin_anew(trainer, loaders, 0)
        if states is not None:
            _State.of(states["step"]).restore()
        self._epoch_state = self._epoch_state or _State.now()
        self._step_state = _State.now()

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the random state from which the order of the epoch follows."""
        if trainer.fit_loop.epoch_progress.current.processed > 0 or self._epoch_state is None:
            self._epoch_state = _State.now()

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


class _State:
    """All random numbers of this process. Often taken and rarely saved: nothing is converted before that."""

    def __init__(
        self, torch_state: torch.Tensor, numpy_state: Any, python_state: Any, cuda: torch.Tensor | None
    ) -> None:
        self._torch, self._numpy, self._python, self._cuda = torch_state, numpy_state, python_state, cuda

    @classmethod
    def now(cls) -> _State:
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            torch.get_rng_state(),
            np.random.get_state(),  # the one that users' code draws from
            random.getstate(),
            torch.cuda.get_rng_state() if has_cuda else None,
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
        }

    @classmethod
    def of(cls, saved: dict[str, Any]) -> _State:
        name, keys, *rest = saved["numpy"]
        version, numbers, gauss = saved["python"]
        numpy_state = (name, keys.cpu().numpy().astype(np.uint32), *rest)
        cuda = saved["cuda"]
        python_state = (version, tuple(numbers.tolist()), gauss)
        return cls(saved["torch"].cpu(), numpy_state, python_state, None if cuda is None else cuda.cpu())

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)  # as above
        random.setstate(self._python)
        if self._cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self._cuda)


def _local_loaders(trainer: Trainer) -> list[DataLoader[Any]]:
    """The training loaders that do not know themselves where they stand."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [loader for loader in loaders if isinstance(loader, DataLoader) and not hasattr(loader, "load_state_dict")]


def _draws_order(loader: DataLoader[Any]) -> bool:
    """Whether the order of a loader comes from the random numbers of the process, not from the epoch."""
    return not hasattr(loader.sampler, "set_epoch") and getattr(loader.sampler, "generator", None) is None


def _begin_anew(trainer: Any, loaders: list[DataLoader[Any]], num_batches: int) -> None:
    """Begin the pass over the training loaders again, without its first batches."""
    shortened = []
    for loader in loaders:
        if isinstance(loader.dataset, IterableDataset):
            if num_batches:
                logger.warning(
                    "The training goes on after batch %d, but %s begins at its beginning: an iterable dataset cannot "
                    "be told where to go on. torchdata's StatefulDataLoader can, and so do data hosts.",
                    num_batches,
                    type(loader.dataset).__name__,
                )
            continue
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        sampler = _Shortened(getattr(loader, name), num_batches % max(1, len(loader)))
        # DataLoader forbids to set it, as its iterators hold the old one: they are made anew below.
        object.__setattr__(loader, name, sampler)
        shortened.append(sampler)
    iter(trainer.fit_loop._data_fetcher)
    for sampler in shortened:
        sampler.prepare()


class _Shortened:
    """A sampler that leaves out its first items until ``prepare``; it passes everything else on."""

    def __init__(self, sampler: Any, num_left_out: int) -> None:
        self._sampler = sampler
        self._num_left_out = num_left_out
        self._latest = _Ahead(iter(()))

    def __iter__(self) -> Iterator[Any]:
        self._latest = _Ahead(itertools.islice(iter(self._sampler), self._num_left_out, None))
        return self._latest

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def prepare(self) -> None:
        """Let the order be drawn now: at the first item, the random numbers are those of the resumed step."""
        self._latest.prepare()
        self._num_left_out = 0


class _Ahead:
    """An iterator that can be told to fetch its first item."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._items)

    def prepare(self) -> None:
        self._items = itertools.chain(list(itertools.islice(self._items, 1)), self._items)
