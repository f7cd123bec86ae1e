"""The schedules have the names that they have in torch."""

from typing import get_args

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lightning_sm.training.strategies.pipeline.schedules import ScheduleName


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_torch_has_the_schedule(name):
    """With one stage on each rank."""
    assert issubclass(get_schedule_class(name), PipelineScheduleSingle)
