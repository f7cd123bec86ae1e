"""Loaders of ranks that get their batches from the first rank of their replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class FollowingLoader:
    """A stand-in for a loader, which gives a placeholder, None, for each of its batches.

    ``PipelineParallelStrategy.batch_to_device`` replaces the placeholders by the batches of the first rank, so that
    this rank fetches none.

    Args:
        loader: The loader, which has a length.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[None]:
        return iter([None] * len(self._loader))

    def __getattr__(self, name: str) -> Any:
        # Dataset, sampler, and state: Lightning and callbacks treat all ranks alike.
        if name == "_loader":  # not yet set in a copy
            raise AttributeError(name)
        return getattr(self._loader, name)
