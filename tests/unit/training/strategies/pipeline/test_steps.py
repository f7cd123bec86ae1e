"""The user's training_step with another network in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.steps import UserSteps


class Model(LightningModule):
    """A LightningModule whose step is given."""

    def __init__(self, step: Callable[[Model, Any], Any] | None = None) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.metrics = MetricCollection([MulticlassAccuracy(3)])
        self.logged: list[str] = []
        self.step = step

    def log(self, name: str, *_: Any, **__: Any) -> None:
        """Note what is logged."""
        self.logged.append(name)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        """The given step, else an ordinary one."""
        if self.step is not None:
            return self.step(self, batch)
        x, y = batch
        logits = self.network(x.flatten(1))
        self.accuracy(logits, y)
        self.metrics(logits, y)
        self.log("loss", 0.0)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits.detach()}


def steps_of(model: Model) -> UserSteps:
    """The steps of a model; outside of them, its network returns "evaluated"."""
    return UserSteps(model, model.network, "network", lambda *_: "evaluated", "group")  # type: ignore[arg-type]


BATCH = (torch.randn(6, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]))


def test_capture_gives_the_inputs_and_leaves_no_trace():
    """The code before the network runs; nothing is logged and no metric is updated."""
    model = Model()
    (inputs,) = steps_of(model).capture((BATCH, 0), 6)
    assert torch.equal(inputs, BATCH[0].flatten(1))
    assert (model.logged, model.accuracy.update_called) == ([], False)
    assert model.network(inputs) == "evaluated"


def test_the_loss_of_a_microbatch_has_a_graph_and_leaves_no_trace():
    """The rest of the step gives the loss, whose gradient reaches the output; nothing is logged or counted."""
    model = Model()
    output = torch.randn(6, 3, requires_grad=True)
    loss = steps_of(model).loss((BATCH, 0), output)
    loss.backward()
    assert torch.equal(loss, functional.cross_entropy(output, BATCH[1]))
    assert output.grad is not None
    assert (model.logged, model.accuracy.update_called, model.metrics["MulticlassAccuracy"].update_called) == (
        [],
        False,
        False,
    )


def test_the_replay_logs_and_counts_the_whole_batch_once():
    """The step runs with the given output, without gradients, and with its log and metrics."""
    model = Model()
    steps = steps_of(model)
    output = functional.one_hot(BATCH[1], 3).float()
    steps.loss((BATCH, 0), output.clone().requires_grad_())
    result = steps.replay((BATCH, 0), output)
    assert model.logged == ["loss"]
    assert (model.accuracy.compute(), model.accuracy._update_count) == (1, 1)
    assert not result["loss"].requires_grad
    assert model.accuracy.process_group == "group"


def test_what_a_step_keeps_is_that_of_the_replay():
    """Numbers, containers, new attributes and buffers change once; the containers and buffers stay the same objects."""

    def step(model, batch):
        model.rows += len(batch[0])
        model.seen.append(len(batch[0]))
        model.center.add_(1)
        model.last = "step"
        return (model.network(batch[0]) * model.center).sum()

    model = Model(step)
    model.rows, model.seen = 0, []
    model.register_buffer("center", torch.zeros(3))
    seen, center = model.seen, model.center
    steps = steps_of(model)
    output = torch.randn(6, 3, requires_grad=True)
    steps.capture((BATCH, 0), 6)
    steps.loss((BATCH, 0), output).backward()
    assert (model.rows, seen, center.tolist(), hasattr(model, "last")) == (0, [], [0, 0, 0], False)
    steps.replay((BATCH, 0), output.detach())
    assert (model.rows, seen, center.tolist(), model.last) == (6, [6], [1, 1, 1], "step")
    assert model.seen is seen
    assert model.center is center


def test_inputs_of_other_shapes_than_before_are_an_error():
    """The ranks have agreed on the shapes for batches of this shape."""
    steps = steps_of(Model())
    known = (torch.empty(2, 4, device="meta"),)
    assert steps.changed_inputs((torch.zeros(2, 4),), known) is None
    for other in (torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.long)):
        assert "earlier batch of the same shapes" in str(steps.changed_inputs((other,), known))


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), lambda: np.random.beta(1, 1), random.random], ids=["torch", "numpy", "random"]
)
def test_random_numbers_before_the_network_are_refused(draw):
    """Ranks would draw different ones: the error names the hook that runs once."""

    def step(model, batch):
        return model.network(batch[0].flatten(1) * float(draw()))

    with pytest.raises(StrategyError, match=r"draws random numbers before.*on_after_batch_transfer"):
        steps_of(Model(step)).capture((BATCH, 0), 6)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda model, batch: None, "does not call self.network"),
        (lambda model, batch: model.network(batch[0].flatten()), r"with \(\(24,\)\), but the batch has 6 rows"),
        (lambda model, batch: model.network(input=batch[0]), r"self.network\(input=...\).*remove the names"),
        (lambda model, batch: model.network(3), r"with \(int\)"),
    ],
)
def test_a_call_that_cannot_be_cut_is_refused(step, message):
    """The first rank refuses a step that does not call the network with one row for each sample."""
    with pytest.raises(StrategyError, match=message):
        steps_of(Model(step)).capture((BATCH, 0), 6)


def _twice(model, batch):
    return (model.network(batch[0]) + model.network(batch[0])).sum()


def _decay(model, batch):
    return model.network(batch[0]).sum() + model.network[0].weight.norm()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_twice, "calls the network several times"),
        (_decay, r"uses the parameters network\.0\.weight outside"),
        (lambda model, batch: None, "returned NoneType without a loss"),
        (lambda model, batch: {"logits": model.network(batch[0])}, "returned dict without a loss"),
        (lambda model, batch: model.network(batch[0]).detach().sum(), "does not depend on the output"),
    ],
)
def test_a_loss_that_cannot_be_pipelined_is_refused(step, message):
    """The last rank refuses a loss that is not that of one call of the network."""
    with pytest.raises(StrategyError, match=message):
        steps_of(Model(step)).loss((BATCH, 0), torch.randn(6, 3, requires_grad=True))


def test_the_network_is_back_after_an_error():
    """An error in the user's step leaves log, metrics and the network as they were."""

    def step(model, batch):
        raise ZeroDivisionError

    model = Model(step)
    accuracy = model.accuracy
    with pytest.raises(ZeroDivisionError):
        steps_of(model).capture((BATCH, 0), 6)
    model.log("after")
    assert model.logged == ["after"]
    assert model.accuracy is accuracy
    assert model.network(BATCH[0]) == "evaluated"


def test_the_inputs_for_an_example_are_found():
    """Layers are measured on what forward passes on to the network."""
    model = Model()
    model.forward = lambda x: model.network(x.flatten(1))
    (inputs,) = UserSteps.network_inputs(model, model.network, BATCH[0])
    assert inputs.shape == (6, 4)
    assert model.network(inputs).shape == (6, 3)
