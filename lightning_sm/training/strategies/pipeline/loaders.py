"""The loader for ranks that get their batches from the first rank of their replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class FollowingLoader:
    """A loader's stand-in, which yields None in place of each batch, so that this rank fetches nothing.

    ``PipelineParallelStrategy.batch_to_device`` replaces each None with the batch of the first rank.

    Args:
        loader: A loader with a length.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[None]:
        return iter([None] * len(self._loader))

    def __getattr__(self, name: str) -> Any:
        # Delegate everything else: Lightning and callbacks read dataset, sampler and state on every rank.
        if name == "_loader":  # while being copied: avoid infinite recursion
            raise AttributeError(name)
        return getattr(self._loader, name)
