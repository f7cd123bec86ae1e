"""Schedules are named as in torch, and layers that depend on microbatches cause a warning."""

import logging
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn.utils.parametrizations import spectral_norm

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.schedules import ScheduleName, ScheduleRunner
from lightning_sm.training.strategies.pipeline.stage import Stage


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_torch_has_the_schedule(name):
    """Torch has each schedule, with one stage per rank."""
    assert issubclass(get_schedule_class(name), PipelineScheduleSingle)


class Loss:
    """A loss that sums the outputs."""

    def try_out(self, output):
        """Accept any output."""

    def __call__(self, output, index):
        return output.sum()


@pytest.fixture
def replica():
    """The replica of a pipeline with one stage."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Replica(dist.group.WORLD, dist.group.WORLD, [0], torch.device("cpu"))
    dist.destroy_process_group()


def _slowly_converging():
    """Make a layer whose power iteration cannot converge at construction, as it may with random weights."""
    layer = nn.Linear(4, 4)
    layer.weight.data = torch.diag(torch.tensor([1.0, 0.99, 0.98, 0.97]))
    return layer


@pytest.mark.parametrize(
    ("make", "microbatches", "named"),
    [
        (lambda: nn.BatchNorm1d(4), 2, "(BatchNorm1d)"),
        (lambda: spectral_norm(_slowly_converging()), 2, "(_SpectralNorm)"),
        (lambda: nn.BatchNorm1d(4), 1, None),
        (lambda: nn.LayerNorm(4), 2, None),
    ],
    ids=["BatchNorm", "spectral_norm", "one microbatch", "LayerNorm"],
)
def test_layers_that_change_buffers_are_warned_of(replica, caplog, make, microbatches, named):
    """Layers that change buffers in each microbatch cause one warning, in the first step."""
    stage = Stage([nn.Linear(4, 4), make()], ["first", "second"], is_first=True)
    runner = ScheduleRunner(stage, replica, "1f1b", Loss())
    with caplog.at_level(logging.WARNING, logger="lightning_sm"):
        for rows in (4, 4, 8):
            runner.step((torch.randn(rows, 4),), microbatches)
    assert [named in message for message in caplog.messages] == ([] if named is None else [True])
