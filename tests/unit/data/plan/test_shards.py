"""How many shards there are, and how many steps they make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.shards import ShardSteps, default_num_shards, shard_steps
from lightning_sm.errors import DataSettingsError


@st.composite
def shards(draw):
    """A number of ranks and the lengths of a fitting number of shards."""
    world_size = draw(st.integers(1, 5))
    num_shards = world_size * draw(st.integers(1, 4))
    return world_size, draw(st.lists(st.integers(0, 6), min_size=num_shards, max_size=num_shards))


@pytest.mark.parametrize(("num_shards", "world_size", "nearest"), [(16, 3, 18), (0, 4, 4), (-2, 2, 2), (1, 2, 2)])
def test_uneven_shards_are_refused_with_advice(num_shards, world_size, nearest):
    """The message has both numbers and one that works."""
    with pytest.raises(
        DataSettingsError, match=f"num_shards={num_shards} .* world_size={world_size} .* such as {nearest}"
    ):
        ShardSteps(num_shards, 0, world_size)


def test_default_shards_fit_every_world():
    """The default divides evenly, small clusters of usual shapes share it, and each of many ranks has several."""
    numbers = [default_num_shards(world_size) for world_size in (1, 2, 3, 8, 12, 16, 64, 256)]
    assert numbers == [16, 16, 48, 16, 48, 16, 512, 2048]
    for world_size, hosts, workers in ((8, 2, 8), (32, 8, 31), (64, 16, 31), (256, 16, 31)):
        assert default_num_shards(world_size) >= hosts * workers


@given(shards())
def test_steps_over_shards_are_those_of_the_shortest_rank(case):
    """All ranks stop together, and the count of what is left out adds up."""
    world_size, lengths = case
    per_rank = [sum(lengths[rank::world_size]) for rank in range(world_size)]
    steps, num_dropped = shard_steps(lengths, world_size)
    assert steps == min(per_rank)
    assert num_dropped == sum(per_rank) - steps * world_size


def test_steps_over_uneven_shards_are_refused():
    """Counts of shards that do not divide evenly over the ranks are an error."""
    with pytest.raises(DataSettingsError, match=r"num_shards=3 .* does not divide evenly over world_size=2"):
        shard_steps([1, 2, 3], 2)
