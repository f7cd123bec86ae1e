"""The cuts between the layers of a network that make it stages."""

from __future__ import annotations

from collections.abc import Sequence
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
    num_layers = len(costs)
    # best[n]: the cost of the most expensive of k stages that hold the first n layers; each round adds a stage.
    best = before[:]
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        following = [float("inf")] * (num_layers + 1)
        chosen = [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            for begin in range(stage, end):
                cost = max(best[begin], before[end] - before[begin])
                if cost < following[end]:
                    following[end] = cost
                    chosen[end] = begin
        best = following
        cuts.append(chosen)
    stages: list[range] = []
    end = num_layers
    for chosen in reversed(cuts):
        stages.append(range(chosen[end], end))
        end = chosen[end]
    stages.append(range(end))
    return stages[::-1]


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
    what = f"split={list(begins)}"
    if len(begins) != num_stages - 1:
        raise StrategyError(
            f"{what} begins {len(begins) + 1} stages, but the pipeline has {num_stages} (ranks x stages on each). "
            f"Name {num_stages - 1} of the layers: {', '.join(names)}."
        )
    indices = []
    for begin in begins:
        # Strings of digits: the names of an nn.Sequential's layers are their indices.
        if isinstance(begin, str) and begin in names:
            indices.append(names.index(begin))
        elif isinstance(begin, int) and 0 < begin < len(names):
            indices.append(begin)
        else:
            raise StrategyError(
                f"{what}: {begin!r} is not one of the layers {', '.join(names)} (0 to {len(names) - 1})."
            )
    bounds = [0, *indices, len(names)]
    stages = [range(begin, end) for begin, end in pairwise(bounds)]
    if not all(stages):
        raise StrategyError(
            f"{what}: name layers in the model's order, each once, and not the first: {', '.join(names)}."
        )
    return stages
