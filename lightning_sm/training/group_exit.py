"""Functions that destroy the process groups before the interpreter shuts down."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lightning_sm._lightning import destroy_dist_connection
from lightning_sm._linux import wait_until_asleep

# torch's name for Gloo's compute threads (ProcessGroupGloo.cpp).
_THREADS = "pt_gloo_runloop"
# Maximum time to wait for these threads to sleep. Once a thread runs, it drops its tensor within microseconds.
_ASLEEP_S = 5.0
_gloo_groups: dict[tuple[int, ...], Any] = {}


def gloo_group(ranks: Sequence[int]) -> Any:
    """Return a Gloo group of the given ranks, which lives as long as the group of all ranks.

    The first call is a collective call on all ranks. Groups are cached because, with torch 2.6, a process that drops a
    group after an exchange may wait forever for the group's threads. Callers must not keep the group: their reference
    would outlive ``leave_at_exit``.

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
    except KeyError:  # destroyed together with the group of all ranks
        return False
    return True


def leave_at_exit() -> None:
    """Destroy any process groups of this process at exit, before the interpreter shuts down.

    A Gloo thread that drops its last tensor during shutdown aborts the process, so a finished training job would be
    reported as failed (PyTorch pull request 179291; seen in 1 of 8 runs on two hosts, and in 1 of 72 with ddp_spawn).
    Lightning destroys NCCL's groups (``_init_dist_connection``), but not Gloo's.
    """
    for handler in (_await_threads, _leave):  # called in reverse order
        atexit.unregister(handler)
        atexit.register(handler)


def stay_at_exit() -> None:
    """Cancel the destruction of process groups at exit, because this process fails.

    Destroying a group waits for its other ranks. After a failure, these ranks have exited, or wait for the failed
    rank in a collective call. The exit still waits for Gloo's threads: a process that aborts loses its exit code.
    """
    atexit.unregister(_leave)
    atexit.unregister(destroy_dist_connection)  # Lightning's handler, for NCCL


def _leave() -> None:
    if hasattr(sys, "last_value"):  # the process exits with an uncaught exception
        return
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Even after a group is destroyed, its Gloo threads run until the last reference to the group is gone.
    _gloo_groups.clear()


def _await_threads() -> None:
    # Other objects may hold references to a group: the pipeline strategy, FSDP2, metrics, and cycles.
    wait_until_asleep(_THREADS, _ASLEEP_S)
