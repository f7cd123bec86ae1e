"""Wait for all ranks where one of them may need longer than any collective call may take."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

from torch import distributed

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_SAY_EVERY_S = 60.0
# The largest models need less; a rank that is lost ends the job in other ways.
_LIMIT_S = 12 * 60 * 60.0
# The same on all ranks, which meet in the same order.
_numbers = itertools.count(1)


def wait_for_all_ranks(purpose: str) -> None:
    """Return when all ranks have called this function; without a process group, at once.

    It asks the store of the process group. A barrier would fail after the strategy's timeout, 30 minutes by default,
    and with NCCL end the process.

    Args:
        purpose: What the ranks do before, for the log, such as "export the model".
    """
    number = next(_numbers)
    if not distributed.is_initialized():
        return
    store: Any = distributed.distributed_c10d._get_default_store()
    done, left = f"lightning_sm/{number}/done", f"lightning_sm/{number}/left"
    store.add(done, 1)
    _wait_for_count(store, done, purpose)
    store.add(left, 1)
    if distributed.get_rank() == 0:  # the store lives in its process, which may end now
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
        time.sleep(_POLL_S)  # a store tells nobody that a count has changed
