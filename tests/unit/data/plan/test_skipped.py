"""Which batches of an epoch belong to the steps that are left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.skipped import skipped_batches

RANGES = st.lists(st.integers(0, 40), max_size=6, unique=True).map(
    lambda ends: [range(first, stop) for first, stop in zip(*[iter(sorted(ends))] * 2, strict=False)]
)


@given(steps=RANGES, per_step=st.integers(1, 4), num_batches=st.integers(1, 30), before=st.integers(0, 20))
def test_an_epoch_leaves_out_the_batches_of_these_steps(steps, per_step, num_batches, before):
    """Whatever the steps before it: each batch belongs to one step, and the last step may have fewer of them."""
    done, batch = [], 0
    while batch < num_batches:
        step = before + batch // per_step
        left_out = skipped_batches(steps, step=step, batch=batch, per_step=per_step, num_batches=num_batches)
        if left_out is not None and left_out.start == batch:
            batch = left_out.stop
        else:
            assert left_out is None or left_out.start > batch
            done.append(batch)
            batch += 1
    assert done == [
        batch for batch in range(num_batches) if not any(before + batch // per_step in one for one in steps)
    ]


def test_a_step_in_progress_is_completed():
    """Two of its four batches have been trained on: the next step is left out."""
    arguments = {"step": 7, "batch": 2, "per_step": 4, "num_batches": 20}
    assert skipped_batches([range(7, 9)], **arguments) == range(4, 8)
    assert skipped_batches([range(7, 8)], **arguments) is None
