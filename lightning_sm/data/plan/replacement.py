"""The samples that take the place of those that cannot be read. Pure rules over a pass's plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from lightning_sm.data.plan.order import IndexArray
from lightning_sm.data.plan.samples import BatchPlan, SamplePlan


def replacement(plan: SamplePlan | BatchPlan, step: int, item: int, bad: Collection[int]) -> int | None:
    """Return the index of the sample that replaces one of a batch; None: the rank has no other in the pass.

    It is the next one of the batch that can be read; behind the batch's last sample comes its first. Only if none can
    be read, it is one of the rank's next batches. So the choice depends on which samples are bad, and on nothing
    else: neither on hosts and workers, nor on what was read before.

    Args:
        plan: The rank's batches.
        step: Step of the batch.
        item: Number of the sample in the batch.
        bad: Indices that cannot be read.
    """
    return next((index for index in _following(plan, step, item) if index not in bad), None)


def with_replacements(indices: IndexArray, by: Mapping[int, int]) -> IndexArray:
    """Return the indices of a batch after replacements.

    Args:
        indices: Those of the plan.
        by: The index that replaces a sample, by the sample's number in the batch.
    """
    changed = indices.copy()
    for item, index in by.items():
        changed[item] = index
    return changed


def _following(plan: SamplePlan | BatchPlan, step: int, item: int) -> Iterator[int]:
    own = plan.batch(step).tolist()
    yield from own[item + 1 :]
    yield from own[:item]
    for more in range(1, plan.num_steps):
        yield from plan.batch((step + more) % plan.num_steps).tolist()
