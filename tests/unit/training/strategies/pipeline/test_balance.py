"""How a network's layers are cut into stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.balance import balanced, explicit_split


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_cheaper_stage(costs, data):
    """No other way to cut has a cheaper most expensive stage."""
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = balanced(costs, num_stages)
    assert [i for stage in stages for i in stage] == list(range(len(costs)))
    assert len(stages) == num_stages
    assert all(stages)

    def worst(cuts):
        bounds = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(bounds))

    best = min(worst(cuts) for cuts in combinations(range(1, len(costs)), num_stages - 1))
    assert max(sum(costs[i] for i in stage) for stage in stages) == best


def test_layers_are_cut_where_the_user_says():
    """A stage begins at each layer that the user gives by name or index."""
    names = ["conv1", "layer1", "layer2", "fc"]
    assert explicit_split(["layer2"], names, 2) == [range(2), range(2, 4)]
    assert explicit_split([1, "fc"], names, 3) == [range(1), range(1, 3), range(3, 4)]
    assert explicit_split(["2"], ["0", "1", "2"], 2) == [range(2), range(2, 3)]


@pytest.mark.parametrize(
    "begins",
    [["layer1"], ["layer1", "layer9"], [1, 4], [0, 1], [-1, 2], ["fc", "layer1"], ["fc", "fc"], ["conv1", "fc"]],
)
def test_a_split_that_does_not_fit_is_refused(begins):
    """The error shows the split, how many layers it must name, and the network's layers."""
    with pytest.raises(StrategyError) as caught:
        explicit_split(begins, ["conv1", "layer1", "layer2", "fc"], 3)
    assert f"split={begins} does not cut the network into 3 stages. Name 2 of its layers" in str(caught.value)
    assert "conv1, layer1, layer2, fc" in str(caught.value)
