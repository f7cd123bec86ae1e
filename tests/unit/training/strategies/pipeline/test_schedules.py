"""The table of schedules."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import config as dist_config
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lightning_sm.training.strategies.pipeline.placement import Placement
from lightning_sm.training.strategies.pipeline.schedules import (
    SCHEDULES,
    chunks_of,
    schedule_for,
    separate_directions,
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_has_the_schedule(name):
    """Under the stated name; those with one stage on a rank are the ones that take a single stage."""
    kind = get_schedule_class(SCHEDULES[name].torch_name)
    assert issubclass(kind, PipelineScheduleSingle) == (SCHEDULES[name].chunks == 1)


def torch_takes(schedule, m, p, v):
    """Whether torch makes a schedule for m microbatches over p ranks with v stages each; asked on rank 0."""
    own = [0, 2 * p - 1] if schedule.is_v_shaped else [lap * p for lap in range(v)]
    facts = {"num_stages": p * v, "group_size": p, "group_rank": 0, "device": torch.device("cpu")}
    stages = [MagicMock(stage_index=one, is_first=one == 0, is_last=one == p * v - 1, **facts) for one in own]
    kind = get_schedule_class(schedule.torch_name)
    try:
        kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, m, loss_fn=lambda *_: None)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_schedule_runs_every_number_of_microbatches_that_torch_lets_it(name, p):
    """Other numbers run with its fallback, which places stages alike, and not with an error in the first step."""
    schedule, v = SCHEDULES[name], chunks_of(name, None)
    for m in range(1, 13):
        placement = Placement(p, 1, chunks=v, is_v_shaped=schedule.is_v_shaped)
        runs = schedule_for(name, m, placement)
        assert (runs is schedule) == torch_takes(schedule, m, p, v), m
        assert torch_takes(runs, m, p, v), m
        assert runs.is_v_shaped == schedule.is_v_shaped
        assert runs.chunks in (None, schedule.chunks)


@pytest.mark.parametrize(
    ("name", "stated", "chunks"), [("1f1b", None, 1), ("interleaved", None, 2), ("interleaved", 3, 3), ("zbv", 2, 2)]
)
def test_stages_on_a_rank(name, stated, chunks):
    """As stated, else as many as the schedule needs, else two."""
    assert chunks_of(name, stated) == chunks


@pytest.mark.parametrize(("device", "is_separate"), [("cuda", True), ("cpu", False)])
def test_activations_and_gradients_have_communicators_of_their_own_on_cuda(monkeypatch, device, is_separate):
    """Gloo needs none, and torch cannot split its groups."""
    monkeypatch.setattr(dist_config, "pipeline_per_direction_p2p", False)
    separate_directions(torch.device(device))
    assert dist_config.pipeline_per_direction_p2p is is_separate
