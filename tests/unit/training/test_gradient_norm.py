"""The norm of a model's gradients under any strategy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import FSDPStrategy, SingleDeviceStrategy
from torch import nn

from lightning_sm import gradient_norm
from lightning_sm.errors import StrategyError


def module_with(strategy) -> LightningModule:
    """A module with gradients and a strategy."""
    module = LightningModule()
    module.layer = nn.Linear(3, 2)
    module.layer(torch.ones(3)).sum().backward()
    module._trainer = SimpleNamespace(strategy=strategy)
    module._fabric = None
    return module


def test_the_norm_in_one_process_is_that_of_all_gradients():
    """Eight gradients of 1 have the expected 1-, 2- and infinity-norm."""
    module = module_with(SingleDeviceStrategy())
    assert [float(gradient_norm(module, p)) for p in (1.0, 2.0, float("inf"))] == pytest.approx([8, 8**0.5, 1])


def test_shards_out_of_reach_are_refused():
    """Sharded gradients are refused, as a shard's norm would look like the whole; the error names the alternative."""
    with pytest.raises(StrategyError, match=r"FSDPStrategy shards gradients.*clip_grad_norm_"):
        gradient_norm(module_with(FSDPStrategy.__new__(FSDPStrategy)))
