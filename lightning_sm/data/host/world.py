"""The distributed world that user code sees on a data host: first a single process, then one of the trainer ranks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

_VARIABLES = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "NODE_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
}


def show_world_of_one() -> None:
    """Make ``torch.distributed`` and torchrun's variables show a world of one process, here and in its forks.

    A process group that the user's script has created is kept.
    """
    os.environ.update(_VARIABLES)
    # Creating a process group replaces sys.excepthook for good. Restore it, or errors would be marked as rank 0's.
    excepthook = sys.excepthook
    if not torch.distributed.is_initialized():
        _init_group()
    sys.excepthook = excepthook


def _init_group(rank: int = 0, world_size: int = 1) -> bool:
    """Create a process group without threads, and return whether this version of torch supports that.

    Gloo's groups start three threads, which is unsafe because this process forks. Torch's "fake" group for tests starts
    none, and in a world of one its collectives do what Gloo's do (checked with torch 2.14). The module is private: if a
    later version of torch lacks it, only DataModules that need a group fail, with torch's error.
    """
    with suppress(ImportError):
        from torch.testing._internal.distributed import fake_pg  # registers the backend  # noqa: F401, PLC0415

        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # documented, but not in its __all__
        torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        return True
    return False


class RankWorld:
    """The rank and world size that a data host's process shows to user code.

    Collectives use torch's "fake" group, which exchanges nothing.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], Any] = {}
        self._shown: tuple[int, int] | None = None

    def show(self, rank: int, world_size: int) -> None:
        """Show a rank in ``torch.distributed`` and in torchrun's variables."""
        if self._shown == (rank, world_size):
            return
        self._shown = rank, world_size
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        if self._shown not in self._groups:
            # A group's rank is fixed, and creating a group takes 0.2 ms, so create one per rank, and switch groups.
            distributed_c10d._world.default_pg = None
            self._groups[self._shown] = _init_group(rank, world_size) and distributed_c10d._world.default_pg
        distributed_c10d._world.default_pg = self._groups[self._shown] or None
