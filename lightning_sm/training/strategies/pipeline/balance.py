"""The cuts between the layers of a network that make it stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from lightning_sm.errors import StrategyError


def balanced(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut layers into stages such that the most expensive stage costs as little as possible.

    Args:
        costs: Cost of each layer, in any unit.
        num_stages: Number of stages, at most one per layer. Each gets at least one layer.

    Returns:
        The layers of each stage.
    """
    before = [0.0, *accumulate(costs)]

    @cache
    def best(end: int, stages: int) -> tuple[float, list[int]]:
        """Return the cost of the most expensive of some stages for the first layers, and where they end."""
        if stages == 1:
            return before[end], [end]
        found = []
        for begin in range(stages - 1, end):
            others, ends = best(begin, stages - 1)
            found.append((max(others, before[end] - before[begin]), [*ends, end]))
        return min(found)

    _, ends = best(len(costs), num_stages)
    return [range(begin, end) for begin, end in pairwise([0, *ends])]


def explicit_split(begins: Sequence[int | str], names: Sequence[str], num_stages: int) -> list[range]:
    """Cut layers where the user says.

    Args:
        begins: The layer with which each stage but the first begins: its index or its name.
        names: The names of all layers.
        num_stages: Number of stages.

    Returns:
        The layers of each stage.

    Raises:
        StrategyError: The list does not fit the layers or the number of stages.
    """
    # Strings of digits: the names of an nn.Sequential's layers are their indices.
    indices = [names.index(begin) if begin in names else begin for begin in begins]
    bounds = [0, *(index for index in indices if isinstance(index, int)), len(names)]
    stages = [range(begin, end) for begin, end in pairwise(bounds)]
    if len(begins) != num_stages - 1 or len(stages) != num_stages or not all(stages):
        raise StrategyError(
            f"split={list(begins)} does not cut the network into {num_stages} stages. Name {num_stages - 1} of its "
            f"layers, in the model's order, each once, and not the first: {', '.join(names)}."
        )
    return stages
