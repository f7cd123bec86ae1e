"""A replica that consists of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_sm.training.strategies.pipeline.backward import StepPasses
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.stage import Stage


class OneRank(Replica):
    """A replica of one rank, which exchanges nothing."""

    def __init__(self) -> None:
        self.position, self.is_first, self.is_last = 0, True, True

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise the block's error."""
        yield


def passes_of(network: nn.Module, after: Callable[[], None] = lambda: None) -> StepPasses:
    """The passes of a step through a network on one rank."""
    return StepPasses(Stage([network], ["network"], is_first=True), OneRank(), after)
