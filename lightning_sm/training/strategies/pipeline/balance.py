"""Functions that cut the layers of a network into stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from lightning_sm.errors import StrategyError


def balanced(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut layers into stages so that the most expensive stage is as cheap as possible.

    Args:
        costs: Cost of each layer, in any unit.
        num_stages: Number of stages, at most one per layer. Each gets at least one layer.

    Returns:
        The layers of each stage.
    """
    before = [0.0, *accumulate(costs)]

    @cache
    def best(end: int, stages: int) -> tuple[float, list[int]]:
        """Return the best cut of the first ``end`` layers: the cost of its most expensive stage, and the stage ends."""
        if stages == 1:
            return before[end], [end]
        cuts = []
        for begin in range(stages - 1, end):
            others, ends = best(begin, stages - 1)
            cuts.append((max(others, before[end] - before[begin]), [*ends, end]))
        return min(cuts)

    _, ends = best(len(costs), num_stages)
    return [range(begin, end) for begin, end in pairwise([0, *ends])]


def explicit_split(begins: Sequence[int | str], names: Sequence[str], num_stages: int) -> list[range]:
    """Split the layers into stages at the layers that the user names.

    Args:
        begins: The index or name of the first layer in each stage, except for the first stage.
        names: The names of all layers.
        num_stages: Number of stages.

    Returns:
        The layers of each stage.

    Raises:
        StrategyError: The list does not fit the layers or the number of stages.
    """
    # Look names up first: layers of an nn.Sequential are named by strings of digits.
    indices = [names.index(begin) if begin in names else begin for begin in begins]
    bounds = [0, *(index for index in indices if isinstance(index, int)), len(names)]
    stages = [range(begin, end) for begin, end in pairwise(bounds)]
    if len(begins) != num_stages - 1 or len(stages) != num_stages or not all(stages):
        raise StrategyError(
            f"split={list(begins)} does not cut the network into {num_stages} stages. Name {num_stages - 1} of its "
            f"layers, in the model's order, each once, and not the first: {', '.join(names)}."
        )
    return stages
