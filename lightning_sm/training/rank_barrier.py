"""A barrier for work that may take longer than the timeout of collective calls."""

from __future__ import annotations

import itertools
import time
from typing import Any

from torch import distributed

_POLL_S = 0.2
# Numbers the barriers, which all ranks reach in the same order.
_numbers = itertools.count(1)


def wait_for_all_ranks() -> None:
    """Wait until all ranks have called this function; without a process group, return at once.

    The ranks count arrivals in the process group's store. A collective barrier would fail after the strategy's
    timeout, 30 minutes by default, and NCCL would kill the process. If a rank is lost, the launcher kills the others.
    """
    number = next(_numbers)
    if not distributed.is_initialized():
        return
    store: Any = distributed.distributed_c10d._get_default_store()
    done, left = f"lightning_sm/{number}/done", f"lightning_sm/{number}/left"
    store.add(done, 1)
    _wait_for_count(store, done)
    store.add(left, 1)
    if distributed.get_rank() == 0:  # rank 0 hosts the store, and may exit as soon as this function returns
        _wait_for_count(store, left)


def _wait_for_count(store: Any, key: str) -> None:
    while store.add(key, 0) < distributed.get_world_size():
        time.sleep(_POLL_S)  # poll, because the store does not signal a changed count
