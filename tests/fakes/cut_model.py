"""A pass through the stages of a model that is cut, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from lightning_sm.training.strategies.pipeline.layers import Network
from lightning_sm.training.strategies.pipeline.stage import as_tuple


def through(network: Network, cuts: list[int], arguments: Mapping[str, Any]) -> Any:
    """What the call returns after a pass through the stages."""
    bounds = [0, *cuts, len(network.layers)]
    stages = [network.stage(range(*pair)) for pair in itertools.pairwise(bounds)]
    call = network.calls.bind((), arguments)
    network.calls.form = call.form
    values: tuple[Any, ...] = call.tensors
    for stage in stages:
        values = as_tuple(stage(*values))
    return network.calls.result(values[0], call)
