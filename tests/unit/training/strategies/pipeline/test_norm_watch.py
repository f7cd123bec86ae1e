"""Hooks that compute norms of a rank's gradients are warned of."""

from __future__ import annotations

import logging

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities import grad_norm
from torch import nn

from lightning_sm._lightning import rank_zero_only
from lightning_sm.training.strategies.pipeline.norm_watch import NormWatch


@pytest.fixture(autouse=True)
def _rank_zero(monkeypatch):
    # Rank 0 alone warns; the process of the tests may be another rank's by now.
    monkeypatch.setattr(rank_zero_only, "rank", 0)


class Model(LightningModule):
    """A LightningModule with gradients, whose hook does what is given."""

    def __init__(self, act) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.act = act
        self.layer(torch.ones(3)).sum().backward()

    def on_before_optimizer_step(self, optimizer) -> None:
        """Do it."""
        self.act(self)


def run(model: Model, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Run the hook twice; returns the warnings."""
    NormWatch().wrap_hooks(model)
    with caplog.at_level(logging.WARNING):
        model.on_before_optimizer_step(None)
        model.on_before_optimizer_step(None)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "act",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda model: grad_norm(model, 2),
        lambda model: torch.stack([p.grad.detach().norm() for p in model.parameters()]).norm(),
        lambda model: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    ],
)
def test_a_norm_of_gradients_is_warned_of_once(act, caplog):
    """Whichever function computes it."""
    (message,) = run(Model(act), caplog)
    assert "Model.on_before_optimizer_step computes a norm of gradients" in message


@pytest.mark.parametrize(
    "act",
    [
        lambda model: [p.norm() for p in model.parameters()],
        lambda model: [p.grad.clamp_(-1, 1) for p in model.parameters()],
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    ],
)
def test_other_hooks_are_not(act, caplog):
    """Norms of weights, and what treats each gradient by itself, are those of one process."""
    assert run(Model(act), caplog) == []
