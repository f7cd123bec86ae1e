"""What a pipeline refuses about the loss of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.loss import check_loss, loss_of
from tests.unit.training.strategies.pipeline.one_rank import passes_of

WHERE = "Model.training_step"


class Model(LightningModule):
    """A LightningModule with the weights of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 3))
        self.again = self.network


def check(loss: Callable[[Model, Tensor, Any], Tensor]) -> None:
    """Check a loss of the model, its output and the passes of the step."""
    model = Model()
    passes = passes_of(model.network)
    output = passes.attach(passes.forward([torch.randn(6, 4)], 2))
    check_loss(loss(model, output, passes), WHERE, model, passes)


@pytest.mark.parametrize("result", [None, {"logits": torch.ones(2)}, 1.0])
def test_a_step_without_a_loss_is_refused(result: Any):
    """Every step needs a loss."""
    with pytest.raises(StrategyError, match=rf"returned {type(result).__name__} without a loss"):
        loss_of(result, WHERE)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, output, passes: output.square().mean(),
        lambda model, output, passes: functional.cross_entropy(output @ output.T, torch.arange(6)),
        lambda model, output, passes: (output * torch.randn_like(output, requires_grad=True)).sum().view(1),
        lambda model, output, passes: output.div_(2).sum() + model.network[0].weight.detach().norm(),
    ],
    ids=["mean", "contrastive", "user's leaf", "in place"],
)
def test_any_loss_of_the_output_is_accepted(loss: Any):
    """It may compare rows, have tensors of its own that need gradients, and change the output in place."""
    check(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, output, passes: output.detach().sum(),
        lambda model, output, passes: torch.ones((), requires_grad=True),
        lambda model, output, passes: torch.ones(()),
        lambda model, output, passes: passes_of(nn.Linear(4, 3)).attach(torch.ones(2, requires_grad=True)).sum(),
    ],
    ids=["detached", "leaf", "constant", "other step"],
)
def test_a_loss_that_does_not_depend_on_the_output_is_refused(loss: Any):
    """Its backward pass would not reach the stages, and other ranks would wait for gradients."""
    with pytest.raises(StrategyError, match="does not depend on the network's output"):
        check(loss)


@pytest.mark.parametrize(
    ("loss", "used"),
    [
        (
            lambda model, output, passes: output.sum() + model.network[0].weight.norm(),
            r"the parameters network\.0\.weight",
        ),
        (lambda model, output, passes: output.sum() + model.again[0].bias.sum(), r"the parameters network\.0\.bias"),
        (
            lambda model, output, passes: output.sum() + model.network(torch.ones(4)).sum(),
            "the parameters .*weight, .*bias",
        ),
        (
            lambda model, output, passes: output.sum() + passes.inputs[0][0].requires_grad_().sum(),
            "values that a layer has kept",
        ),
    ],
    ids=["weight decay", "alias", "auxiliary loss", "kept input"],
)
def test_a_loss_that_uses_a_stage_in_other_ways_is_refused(loss: Any, used: str):
    """The message names the parameters: a rank has only those of its stage."""
    with pytest.raises(StrategyError, match=rf"uses {used} directly, not only the network's output"):
        check(loss)


def test_a_loss_of_several_numbers_is_refused():
    """Only the last rank has it, so torch's error would leave the other ranks waiting."""
    with pytest.raises(StrategyError, match=r"a loss of shape \(6,\)"):
        check(lambda model, output, passes: output.sum(1))
