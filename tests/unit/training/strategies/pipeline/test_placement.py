"""Which rank holds which stages of which replica."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.placement import Placement, grid


@pytest.mark.parametrize(
    ("order", "pipeline_size", "replicas"),
    [
        ("cluster", 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("spread", 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("cluster", 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("spread", 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_replicas_are_placed_as_by_smp(order, pipeline_size, replicas):
    """For 8 ranks, cluster and spread give the groups of SageMaker's model parallel library v1."""
    placement = Placement(pipeline_size, 8 // pipeline_size, order)
    assert [placement.ranks(replica) for replica in range(placement.data_size)] == replicas


@pytest.mark.parametrize("order", ["cluster", "spread"])
@pytest.mark.parametrize(("pipeline_size", "data_size"), [(2, 1), (2, 3), (4, 2), (3, 3)])
def test_every_rank_has_one_place(order, pipeline_size, data_size):
    """Replica and stage of a rank are where the list of ranks and the device mesh have it."""
    placement = Placement(pipeline_size, data_size, order)
    shape, names = placement.mesh
    for rank in range(pipeline_size * data_size):
        replica = placement.replica(rank)
        stage = placement.ranks(replica).index(rank)
        # A device mesh numbers ranks with its last dimension running fastest.
        coordinates = dict(zip(names, map(int, np.unravel_index(rank, shape)), strict=True))
        assert coordinates == {"data_parallel": replica, "pipeline_parallel": stage}


@pytest.mark.parametrize(
    ("world_size", "per_host", "stated", "sizes"),
    [
        (8, 4, ("auto", "auto"), (4, 2)),
        (4, 1, ("auto", "auto"), (4, 1)),
        (8, 4, (2, "auto"), (2, 4)),
        (8, 4, ("auto", 4), (2, 4)),
        (8, 4, (8, 1), (8, 1)),
    ],
)
def test_sizes_that_are_not_stated_are_found(world_size, per_host, stated, sizes):
    """A pipeline goes over a host's processes, and over all hosts with one process each, unless sizes are stated."""
    assert grid(world_size, per_host, *stated) == sizes


@pytest.mark.parametrize("stated", [(3, "auto"), (2, 3), ("auto", 3), (0, "auto"), (16, "auto")])
def test_sizes_that_do_not_make_up_the_world_are_refused(stated):
    """The error names both stated sizes, the number of processes, and what the pipeline size may be."""
    with pytest.raises(StrategyError) as caught:
        grid(8, 4, *stated)
    message = str(caught.value)
    assert f"pipeline_parallel_size={stated[0]} and data_parallel_size={stated[1]}" in message
    assert "(num_nodes x devices) is 8" in message
    assert "[2, 4, 8]" in message


@pytest.mark.parametrize(("world_size", "stated"), [(1, ("auto", "auto")), (4, (1, "auto")), (4, ("auto", 4))])
def test_a_pipeline_of_one_is_refused(world_size, stated):
    """One process for each replica is no pipeline: the error names ddp."""
    with pytest.raises(StrategyError, match=r"at least 2 processes.*strategy=ddp"):
        grid(world_size, 1, *stated)
