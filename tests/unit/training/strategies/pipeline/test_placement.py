"""Which rank holds which stages of which replica."""

from __future__ import annotations

import pytest

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.placement import num_stages, replicas_of


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
    """For 8 ranks, cluster and spread give the same groups as SageMaker's model parallel library v1."""
    assert replicas_of(8, pipeline_size, order) == replicas


@pytest.mark.parametrize("order", ["cluster", "spread"])
@pytest.mark.parametrize(("pipeline_size", "data_size"), [(2, 1), (2, 3), (4, 2), (3, 3)])
def test_every_rank_has_one_place(order, pipeline_size, data_size):
    """Each replica has one rank per stage, and each rank belongs to one replica."""
    world_size = pipeline_size * data_size
    replicas = replicas_of(world_size, pipeline_size, order)
    assert [len(ranks) for ranks in replicas] == [pipeline_size] * data_size
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(world_size))


@pytest.mark.parametrize(
    ("world_size", "per_host", "stated", "size"),
    [
        (8, 4, ("auto", "auto"), 4),
        (4, 1, ("auto", "auto"), 4),
        (8, 4, (2, "auto"), 2),
        (8, 4, ("auto", 4), 2),
        (8, 4, (8, 1), 8),
    ],
)
def test_sizes_that_are_not_stated_are_found(world_size, per_host, stated, size):
    """By default, a pipeline spans a host's processes, or all hosts if each has one process."""
    assert num_stages(world_size, per_host, *stated) == size


@pytest.mark.parametrize(
    "stated", [(3, "auto"), (2, 3), ("auto", 3), (0, "auto"), (16, "auto"), (1, "auto"), ("auto", 8)]
)
def test_sizes_that_do_not_make_up_the_world_are_refused(stated):
    """The error shows both sizes, the number of processes and valid pipeline sizes, and suggests ddp."""
    with pytest.raises(StrategyError) as caught:
        num_stages(8, 4, *stated)
    message = str(caught.value)
    assert f"pipeline_parallel_size={stated[0]} and data_parallel_size={stated[1]}" in message
    assert "(num_nodes x devices) is 8" in message
    assert "[2, 4, 8]" in message
    assert "at least 2 processes for each replica" in message
    assert "strategy=ddp" in message


def test_one_process_is_no_pipeline():
    """One process is too few for a pipeline, and the error suggests ddp."""
    with pytest.raises(StrategyError, match=r"at least 2 processes.*strategy=ddp"):
        num_stages(1, 1, "auto", "auto")
