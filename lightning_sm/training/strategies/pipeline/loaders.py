"""Loaders of ranks that get their batches from the first rank of their replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class FollowingLoader:
    """A stand-in for a loader, which gives the Trainer's loops a placeholder, None, for each of its batches.

    ``PipelineParallelStrategy.batch_to_device`` replaces the placeholders by the batches of the first rank, so that
    this rank fetches none. Other callers get the loader's own batches.

    Args:
        loader: The loader, which has a length.
        trainer: The Trainer.
    """

    def __init__(self, loader: Any, trainer: Any) -> None:
        self._loader = loader
        self._trainer = trainer

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _FollowingPass(self._loader, self._trainer)

    def __getattr__(self, name: str) -> Any:
        # Dataset, sampler, and state: Lightning and callbacks treat all ranks alike.
        if name in {"_loader", "_trainer"}:  # not yet set in a copy
            raise AttributeError(name)
        return getattr(self._loader, name)


class _FollowingPass(Iterator[Any]):
    def __init__(self, loader: Any, trainer: Any) -> None:
        self._loader = loader
        self._trainer = trainer
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            is_trainers = _is_of_trainer(self, self._trainer)
            self._batches = iter([None] * len(self._loader)) if is_trainers else iter(self._loader)
        return next(self._batches)


def _is_of_trainer(iterator: Iterator[Any], trainer: Any) -> bool:
    """Return whether one of the Trainer's loops iterates, rather than the user, over a loader that both have."""
    fit_loop = trainer.fit_loop
    loops = (fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return any(_iterates(loop._combined_loader, iterator) for loop in loops)


def _iterates(combined: Any, iterator: Iterator[Any]) -> bool:
    mode = getattr(combined, "_iterator", None)
    iterators = () if mode is None else mode.iterators
    return any(one is iterator or _iterates(one, iterator) for one in iterators)
