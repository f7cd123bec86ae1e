"""The batches of an epoch whose optimizer steps a run leaves out. Pure rules over numbers."""

from __future__ import annotations

from collections.abc import Sequence


def skipped_batches(steps: Sequence[range], *, step: int, batch: int, per_step: int, num_batches: int) -> range | None:
    """Return the next batches of an epoch, from one on, that belong to steps which are left out; None: there are none.

    A step that has trained on some of its batches is completed.

    Args:
        steps: Those steps, as loggers count; in ascending order, with gaps between them.
        step: The step of ``batch``.
        batch: Number of a batch in the epoch, from 0: the next one of the run.
        per_step: Batches whose gradients a step accumulates; the last step of an epoch may have fewer.
        num_batches: Batches in the epoch.
    """
    first_step = step - batch // per_step  # of the epoch
    next_whole = -(-batch // per_step) * per_step
    for one in steps:
        first = max(next_whole, (one.start - first_step) * per_step)
        stop = min(num_batches, (one.stop - first_step) * per_step)
        if first < stop:
            return range(first, stop)
    return None
