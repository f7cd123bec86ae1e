"""The user's training_step with a replacement for the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.layers import Network
from lightning_sm.training.strategies.pipeline.random_state import random_state
from lightning_sm.training.strategies.pipeline.steps import UserSteps


class Model(LightningModule):
    """A LightningModule with the given step."""

    def __init__(self, step: Callable[[Model, Any], Any] | None = None) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.metrics = MetricCollection([MulticlassAccuracy(3)])
        self.logged: list[str] = []
        self.step = step
        self.trainer = SimpleNamespace(loggers=[], should_stop=False)

    def log(self, name: str, *_: Any, **__: Any) -> None:
        """Record what is logged."""
        self.logged.append(name)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        """The given step, or by default an ordinary one."""
        if self.step is not None:
            return self.step(self, batch)
        x, y = batch
        logits = self.network(x.flatten(1))
        self.accuracy(logits, y)
        self.metrics(logits, y)
        self.log("loss", 0.0)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits.detach()}


class Ranks:
    """A replica in one process that raises one rank's errors."""

    def __init__(self, is_last: bool = True) -> None:
        self.is_last, self.last = is_last, 1

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise the block's error."""
        yield

    def broadcast(self, value: Any, position: int) -> Any:
        """Return a step's effects."""
        if self.is_last:
            return value
        calls = [("log", ("of last", 0.0), {})]
        return {"loss": torch.ones(())}, calls, {}, random_state(), False


def steps_of(model: Model, is_last: bool = True, are_everywhere: bool = False) -> UserSteps:
    """The steps of a model whose network returns "evaluated" outside them."""
    everywhere = lambda *_: "evaluated"  # noqa: E731
    ranks: Any = Ranks(is_last)
    group: Any = "group"
    return UserSteps(model, Network(model, "network"), ranks, everywhere, group, are_everywhere=are_everywhere)


def run(model: Model, forward: Callable[..., Any], is_last: bool = True, are_everywhere: bool = False) -> Any:
    """Run a training step."""
    steps = steps_of(model, is_last, are_everywhere)

    def checked(inputs: tuple[Any, ...]) -> Any:
        steps.check_inputs(inputs, 6)
        return forward(inputs)

    return steps.run("training_step", lambda: model.training_step(BATCH, 0), checked)


BATCH = (torch.randn(6, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]))


def test_a_rank_without_outputs_leaves_the_step_at_the_call():
    """A rank without outputs leaves the step at the network call, logs what the last rank did and updates no metric."""
    model = Model()
    seen: list[Any] = []
    assert run(model, seen.append, is_last=False) == {"loss": torch.ones(())}
    ((inputs,),) = seen
    assert torch.equal(inputs, BATCH[0].flatten(1))
    assert (model.logged, model.accuracy.update_called) == (["of last"], False)
    assert model.network(inputs) == "evaluated"


@pytest.mark.parametrize("are_everywhere", [False, True])
def test_the_step_logs_and_counts_the_whole_batch_once(are_everywhere: bool):
    """The step runs once with the given output, without gradients, and logs and updates metrics."""
    model = Model()
    output = functional.one_hot(BATCH[1], 3).float()
    result = run(model, lambda _: output, is_last=not are_everywhere, are_everywhere=are_everywhere)
    assert model.logged == ["loss"]
    assert (model.accuracy.compute(), model.accuracy._update_count) == (1, 1)
    assert not result["loss"].requires_grad
    assert model.accuracy.process_group == "group"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda model, batch: None, "does not call self.network"),
        (lambda model, batch: model.network(batch[0].flatten()), r"with \(\(24,\)\), but the batch has 6 rows"),
        (lambda model, batch: model.network(input=batch[0]), r"self.network\(input=...\).*remove the names"),
        (lambda model, batch: model.network(3), r"with \(int\)"),
        (lambda model, batch: model.network(), r"with \(\)"),
        (lambda model, batch: model.network(batch[0].clone().requires_grad_()), "must be detached"),
        (lambda model, batch: [model.network(batch[0]) for _ in range(2)], "calls the network several times"),
    ],
)
def test_a_call_that_cannot_be_cut_is_refused(step, message):
    """The first rank refuses a step unless it calls the network with one row per sample."""
    with pytest.raises(StrategyError, match=message):
        run(Model(step), lambda _: None)


def test_the_network_is_back_after_an_error():
    """After an error in the user's step, log, metrics and the network are restored."""

    def step(model, batch):
        raise ZeroDivisionError

    model = Model(step)
    accuracy = model.accuracy
    with pytest.raises(ZeroDivisionError):
        run(model, lambda _: None)
    model.log("after")
    assert model.logged == ["after"]
    assert model.accuracy is accuracy
    assert model.network(BATCH[0]) == "evaluated"
