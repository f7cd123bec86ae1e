"""The table of schedules."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lightning_sm.training.strategies.pipeline.schedules import SCHEDULES, chunks_of


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_has_the_schedule(name):
    """Under the stated name; those with one stage on a rank are the ones that take a single stage."""
    kind = get_schedule_class(SCHEDULES[name].torch_name)
    assert issubclass(kind, PipelineScheduleSingle) == (SCHEDULES[name].chunks == 1)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("m", range(1, 13))
def test_every_number_of_microbatches_can_run(name, p, m):
    """By the schedule or by its fallback, which places stages alike."""
    schedule = SCHEDULES[name]
    while not schedule.fits(m, p, chunks_of(name, None)):
        fallback = SCHEDULES[schedule.fallback]
        assert fallback.is_v_shaped == schedule.is_v_shaped
        assert fallback.chunks in (None, schedule.chunks)
        schedule = fallback


@pytest.mark.parametrize(
    ("name", "stated", "chunks"), [("1f1b", None, 1), ("interleaved", None, 2), ("interleaved", 3, 3), ("zbv", 2, 2)]
)
def test_stages_on_a_rank(name, stated, chunks):
    """As stated, else as many as the schedule needs, else two."""
    assert chunks_of(name, stated) == chunks
