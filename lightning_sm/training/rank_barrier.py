"""A barrier for all ranks, for work that may take longer than the timeout of collective calls."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

from torch import distributed

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_SAY_EVERY_S = 60.0
# The largest models take less; a lost rank ends the job in other ways.
_LIMIT_S = 12 * 60 * 60.0
# Numbers the barriers: all ranks reach them in the same order.
_numbers = itertools.count(1)


def wait_for_all_ranks(purpose: str) -> None:
    """Wait until all ranks have called this function; without a process group, return at once.

    The ranks count each other in the store of the process group. A collective barrier would fail after the strategy's
    timeout, 30 minutes by default, and with NCCL kill the process.

    Args:
        purpose: What the ranks do first, for the log, such as "export the model".
    """
    number = next(_numbers)
    if not distributed.is_initialized():
        return
    store: Any = distributed.distributed_c10d._get_default_store()
    done, left = f"lightning_sm/{number}/done", f"lightning_sm/{number}/left"
    store.add(done, 1)
    _wait_for_count(store, done, purpose)
    store.add(left, 1)
    if distributed.get_rank() == 0:  # its process holds the store, and may exit when this returns
        _wait_for_count(store, left, "leave")


def _wait_for_count(store: Any, key: str, purpose: str) -> None:
    num_ranks = distributed.get_world_size()
    began_at = said_at = time.monotonic()
    while (num_missing := num_ranks - store.add(key, 0)) > 0:
        now = time.monotonic()
        if now - began_at > _LIMIT_S:
            logger.warning("%d of %d ranks did not %s in %.0f s.", num_missing, num_ranks, purpose, now - began_at)
            return
        if now - said_at > _SAY_EVERY_S and distributed.get_rank() == 0:
            said_at = now
            logger.info("Waiting for %d of %d ranks to %s.", num_missing, num_ranks, purpose)
        time.sleep(_POLL_S)  # a store does not notify anyone of a changed count
