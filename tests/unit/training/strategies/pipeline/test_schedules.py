"""The schedules of torch by the names that they have here."""

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lightning_sm.training.strategies.pipeline.schedules import SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_has_the_schedule(name):
    """With one stage on each rank."""
    assert issubclass(get_schedule_class(SCHEDULES[name]), PipelineScheduleSingle)
