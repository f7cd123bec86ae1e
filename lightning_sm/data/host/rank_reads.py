"""Detects hooks that split the data by rank, although they run on a data host, once for all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed

from lightning_sm.errors import DataSettingsError

_RANKS = ("global_rank", "local_rank", "node_rank")
_SIZES = ("world_size", "num_devices", "num_nodes")

# Libraries whose reads of the rank do not count: torch's samplers read it, but trainers correct the samplers' rank.
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_sm")


class RanksRead:
    """The ranks and world sizes that code has read, and where. Code that splits the data by rank reads both."""

    def __init__(self) -> None:
        self._ranks: dict[str, str] = {}
        self._sizes: dict[str, str] = {}

    def note(self, name: str, value: Any, frame: FrameType) -> None:
        """Record that an attribute of the Trainer was read.

        Args:
            name: The attribute.
            value: Its value. A size of 1 is ignored, because it leaves nothing to split.
            frame: Frame of the code that read it.
        """
        if name in _RANKS:
            self._ranks.setdefault(f"self.trainer.{name}", _place(frame))
        elif name in _SIZES and value is not None and value > 1:
            self._sizes.setdefault(f"self.trainer.{name}={value}", _place(frame))

    @contextmanager
    def noting_torch(self) -> Iterator[None]:
        """Also record the user's calls to ``torch.distributed.get_rank()`` and ``get_world_size()``."""
        real = torch.distributed.get_rank, torch.distributed.get_world_size
        torch.distributed.get_rank = self._noted(real[0], self._ranks, "torch.distributed.get_rank()", least=0)
        torch.distributed.get_world_size = self._noted(
            real[1], self._sizes, "torch.distributed.get_world_size()", least=2
        )
        try:
            yield
        finally:
            torch.distributed.get_rank, torch.distributed.get_world_size = real

    def _noted(self, real: Callable[..., int], places: dict[str, str], name: str, *, least: int) -> Callable[..., int]:
        def noted(*args: Any, **kwargs: Any) -> int:
            value = real(*args, **kwargs)
            reader = sys._getframe(1)
            if value >= least and reader.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
                places.setdefault(name, _place(reader))
            return value

        return noted

    def check(self, hook: str) -> None:
        """Check that a hook does not split the data by rank itself, but leaves this to the samplers.

        Args:
            hook: The hook call, for the error.

        Raises:
            DataSettingsError: The hook has read both a rank and a world size.
        """
        if not self._ranks or not self._sizes:
            return
        rank, rank_place = next(iter(self._ranks.items()))
        size, size_place = next(iter(self._sizes.items()))
        raise DataSettingsError(
            f"{hook} reads {rank} ({rank_place}) and {size} ({size_place}), as if to split the data by rank. But with "
            "data_service.hooks=data it runs on a data host, once for all ranks: the data of all ranks but 0 would be "
            "lost. Return loaders over all of the data, which Lightning splits, or loaders with a DistributedSampler. "
            "Or set data_service.hooks=trainers, if the trainers have the data."
        )


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
