"""Which samples take the place of those that cannot be read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.order import ShuffledOrder
from lightning_sm.data.plan.replacement import replacement, with_replacements
from lightning_sm.data.plan.samples import SamplePlan


@st.composite
def passes(draw):
    """A rank's pass, and which samples are bad in it: fewer than the rank has."""
    world_size = draw(st.integers(1, 3))
    batch_size = draw(st.integers(1, 5))
    num_samples = draw(st.integers(world_size, 30))
    order = ShuffledOrder(num_samples, seed=draw(st.integers(0, 9)), epoch=0)
    plan = SamplePlan(order, batch_size, False, draw(st.integers(0, world_size - 1)), world_size)
    own = {index for step in range(plan.num_steps) for index in plan.batch(step).tolist()}
    bad = draw(st.sets(st.sampled_from(sorted(own)), max_size=len(own) - 1))
    return plan, bad


def read(plan, step, bad, known):
    """Build a batch as a feeder does, which learns of bad samples one by one; what the batch has, and who is known."""
    by, known = {}, set(known)
    while True:
        indices = with_replacements(plan.batch(step), by).tolist()
        item = next((item for item, index in enumerate(indices) if index in bad), None)
        if item is None:
            return indices, known
        known.add(indices[item])
        by[item] = replacement(plan, step, item, known)


@given(passes(), st.data())
def test_a_batch_does_not_depend_on_what_was_known(drawn, data):
    """It has as many samples as before, the good ones in their places, whichever bad ones were known."""
    plan, bad = drawn
    for step in range(plan.num_steps):
        before = plan.batch(step).tolist()
        known = data.draw(st.sets(st.sampled_from(sorted(bad)))) if bad else set()
        indices, _ = read(plan, step, bad, known)
        assert indices == read(plan, step, bad, ())[0]
        assert not bad & set(indices)
        assert [one for one in before if one not in bad] == [
            one for one, other in zip(indices, before, strict=True) if other not in bad
        ]
        if set(before) - bad:
            assert set(indices) <= set(before)


def test_the_next_of_the_batch_is_first():
    """Behind the last sample comes the first; only then come the rank's next batches, and those before."""
    plan = SamplePlan(range(8), 3, False, 0, 1)
    assert replacement(plan, 1, 0, {3}) == 4
    assert replacement(plan, 1, 2, {5}) == 3
    assert replacement(plan, 1, 2, {3, 4, 5}) == 6
    assert replacement(plan, 1, 2, set(range(3, 8))) == 0
    assert replacement(plan, 1, 2, set(range(8))) is None
