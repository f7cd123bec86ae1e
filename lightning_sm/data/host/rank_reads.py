"""Detects hooks that split the data by rank, on a data host, where they run once for all ranks."""

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

# What asks torch for its rank, and is not the user's code: the samplers of torch, which trainers give their own rank.
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_sm")


class RanksRead:
    """The ranks and sizes that code has read, and where: it splits the data by rank with both together."""

    def __init__(self) -> None:
        self._ranks: dict[str, str] = {}
        self._sizes: dict[str, str] = {}

    def note(self, name: str, value: Any, frame: FrameType) -> None:
        """Note that an attribute of the Trainer was read.

        Args:
            name: The attribute.
            value: Its value; a world of one leaves nothing to split.
            frame: The code that read it.
        """
        if name in _RANKS:
            self._ranks.setdefault(f"self.trainer.{name}", _place(frame))
        elif name in _SIZES and value is not None and value > 1:
            self._sizes.setdefault(f"self.trainer.{name}={value}", _place(frame))

    @contextmanager
    def noting_torch(self) -> Iterator[None]:
        """Note the user's calls of ``torch.distributed.get_rank()`` and ``get_world_size()``, too."""
        if not torch.distributed.is_available():
            yield
            return
        own = torch.distributed.get_rank, torch.distributed.get_world_size
        torch.distributed.get_rank = self._noted(own[0], self._ranks, "torch.distributed.get_rank()", least=0)
        torch.distributed.get_world_size = self._noted(
            own[1], self._sizes, "torch.distributed.get_world_size()", least=2
        )
        try:
            yield
        finally:
            torch.distributed.get_rank, torch.distributed.get_world_size = own

    def _noted(self, own: Callable[..., int], places: dict[str, str], name: str, *, least: int) -> Callable[..., int]:
        def noted(*args: Any, **kwargs: Any) -> int:
            value = own(*args, **kwargs)
            reader = sys._getframe(1)
            if value >= least and reader.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
                places.setdefault(name, _place(reader))
            return value

        return noted

    def check(self, hook: str) -> None:
        """Check that the code leaves the split over the ranks to samplers.

        Args:
            hook: The code.

        Raises:
            DataSettingsError: It has read both a rank and a size.
        """
        if not self._ranks or not self._sizes:
            return
        rank, rank_place = next(iter(self._ranks.items()))
        size, size_place = next(iter(self._sizes.items()))
        raise DataSettingsError(
            f"{hook} reads {rank} ({rank_place}) and {size} ({size_place}), as if to split the data by rank. But with "
            "data_service.hooks=data it runs on a data host, once for all ranks: the parts of all ranks but 0 would be "
            "lost. Let it return loaders over all of the data, which Lightning splits, or with a DistributedSampler. "
            "Or set data_service.hooks=trainers, if the trainers have the data."
        )


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
