"""The loop in which microbatches pass from stage to stage, in forward and in backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from lightning_sm.training.strategies.pipeline.exchange import Replica, wait_for


def relay(
    replica: Replica, given: Sequence[Any], run: Callable[[int, Any], Any], *, is_backward: bool = False
) -> list[Any]:
    """Run this rank's part of each microbatch: take values from the rank before it, and send others to the rank after.

    Call it within ``replica.together()``. After an error, ranks send None, so that no rank waits for values.

    Args:
        replica: The ranks of this replica.
        given: For each microbatch, the values for the rank that begins; the other ranks use only the length.
        run: Called with the number of a microbatch and the values that arrived. Returns the values to send.
        is_backward: Whether values go from the last rank to the first.

    Returns:
        On the rank where values arrive at last, the results of ``run``, fewer after an error. On other ranks, nothing.

    Raises:
        Exception: The error of ``run`` on this rank, after all microbatches.
    """
    begins, ends, ahead = replica.is_first, replica.is_last, 1
    if is_backward:
        begins, ends, ahead = ends, begins, -1
    results: list[Any] = []
    sending: list[dist.Work | None] = []
    error: Exception | None = None
    for number, values in enumerate(given):
        arrived = values if begins else replica.receive(replica.position - ahead)
        result: Any = None
        if arrived is not None and error is None:
            try:
                result = run(number, arrived)
            except Exception as raised:  # noqa: BLE001  # raised below
                error = raised
        if not ends:
            # Wait only now, so that this rank has computed while the values of the previous microbatch were sent.
            wait_for(sending)
            sending = replica.start_sending(result, replica.position + ahead)
        elif result is not None:
            results.append(result)
    wait_for(sending)
    if error is not None:
        raise error
    return results
