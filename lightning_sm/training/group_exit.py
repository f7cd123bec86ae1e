"""The end of the process groups, before the interpreter shuts down."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lightning_sm._lightning import destroy_dist_connection
from lightning_sm._linux import wait_until_asleep

# The threads of Gloo that compute; torch's name (ProcessGroupGloo.cpp).
_THREADS = "pt_gloo_runloop"
# To drop a tensor takes microseconds, if the machine lets the thread run.
_ASLEEP_S = 5.0
_gloo_groups: dict[tuple[int, ...], Any] = {}


def gloo_group(ranks: Sequence[int]) -> Any:
    """Return a group of ranks that exchange by Gloo, which lives as long as the group of all ranks.

    The first call is one of all ranks together. With torch 2.6, a process that drops such a group after an exchange may
    wait for its threads for ever. Callers must not keep it: what is held elsewhere outlives ``leave_at_exit``.

    Args:
        ranks: The global ranks, in ascending order.
    """
    group = _gloo_groups.get(tuple(ranks))
    if group is None or not _exists(group):
        group = _gloo_groups[tuple(ranks)] = torch.distributed.new_group(list(ranks), backend="gloo")
    return group


def _exists(group: Any) -> bool:
    try:
        torch.distributed.get_process_group_ranks(group)
    except KeyError:  # it was destroyed, with the group of all ranks
        return False
    return True


def leave_at_exit() -> None:
    """Destroy this process's process groups at exit, if it has some by then, before the interpreter shuts down.

    A Gloo thread that drops its last tensor during the shutdown aborts the process (PyTorch pull request 179291; seen
    in 1 of 8 runs of two hosts, and in 1 of 72 with ddp_spawn), and a finished training would count as failed.
    Lightning itself destroys NCCL's groups (``_init_dist_connection``), but not Gloo's.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def stay_at_exit() -> None:
    """Destroy no process group at exit: this process fails, or ``leave_at_exit`` is undone.

    Destroying a group waits for its other ranks: those wait in a collective call for the one that has failed, or are
    gone.
    """
    atexit.unregister(_leave)
    atexit.unregister(destroy_dist_connection)  # Lightning's, for NCCL


def _leave() -> None:
    if hasattr(sys, "last_value"):  # an exception has ended the process
        return
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Threads of Gloo run until the last reference is gone, even after that.
    _gloo_groups.clear()
    # Others hold groups, too: the strategy of a pipeline, FSDP2, metrics, and whatever is in a cycle of references.
    wait_until_asleep(_THREADS, _ASLEEP_S)
