"""The user's training_step with a replacement for the network."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
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
    steps = UserSteps(model, Network(model, "network"), ranks, everywhere, group, are_everywhere=are_everywhere)
    with steps.replayed():
        pass
    return steps


def run(model: Model, forward: Callable[..., Any], is_last: bool = True, are_everywhere: bool = False) -> Any:
    """Run a training step."""
    steps = steps_of(model, is_last, are_everywhere)

    def checked(inputs: tuple[Any, ...]) -> Any:
        steps.check_inputs(inputs, 6)
        return forward(inputs)

    return steps.run("training_step", lambda: model.training_step(BATCH, 0), checked)


def run_with_replays(model: Model, output: Tensor, replay: Callable[[UserSteps], Any]) -> Any:
    """Run a training step, with replays while it calls the network."""
    steps = steps_of(model)

    def forward(inputs: tuple[Any, ...]) -> Tensor:
        steps.check_inputs(inputs, 6)
        replay(steps)
        return output

    def training_step() -> Any:
        with steps.replayed():
            return model.training_step(BATCH, 0)

    return steps.run("training_step", training_step, forward)


GENERATOR = torch.Generator().manual_seed(1)
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


def test_the_loss_of_a_microbatch_has_a_graph_and_leaves_no_trace():
    """The step gives a microbatch's loss, whose gradient reaches the output; nothing is logged or counted."""
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


def test_what_a_step_keeps_is_that_of_the_whole_batch():
    """A step changes numbers, containers, attributes and buffers once; containers and buffers are the same objects."""

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
    steps.loss((BATCH, 0), output).backward()
    assert (model.rows, seen, center.tolist(), hasattr(model, "last")) == (0, [], [0, 0, 0], False)
    del model.network.forward  # which the cut has replaced
    run(model, lambda _: output.detach())
    assert (model.rows, seen, center.tolist(), model.last) == (6, [6], [1, 1, 1], "step")
    assert model.seen is seen
    assert model.center is center


def test_a_replay_starts_from_the_module_as_it_was_before_the_step():
    """What a step changes before it calls the network, its replays during the call do not change once more."""

    def step(model, batch):
        model.rows += 1
        model.seen.append(1)
        model.center.add_(1)
        return (model.network(batch[0]) * model.center).sum() * model.rows * len(model.seen)

    model = Model(step)
    model.rows, model.seen = 0, []
    model.register_buffer("center", torch.zeros(3))
    steps = steps_of(model)
    output = torch.randn(6, 3)
    losses: list[Tensor] = []

    def forward(_: Any) -> Tensor:
        losses.extend(steps.loss((BATCH, 0), output) for _ in range(2))
        return output

    losses.append(steps.run("training_step", lambda: model.training_step(BATCH, 0), forward))
    assert losses == [output.sum()] * 3


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(len(x)),
        lambda x: torch.rand(2 * len(x)).view(len(x), 2).sum(1),
        lambda x: torch.rand(()),
        lambda x: torch.rand(1, generator=GENERATOR),
        lambda x: torch.randint(9, (len(x),), dtype=torch.int16),
        lambda x: np.random.beta(1, 1) + random.random(),
    ],
    ids=["rows", "several per row", "one number", "own generator", "integers", "not torch"],
)
def test_microbatches_have_the_random_numbers_of_their_rows(draw: Any):
    """What a step draws before it calls the network, its replays get; what they draw afterwards is their own."""
    later = []

    def step(model, batch):
        drawn = draw(batch[0])
        output = model.network(batch[0].flatten(1))
        later.append(torch.rand(()))
        return (output.sum(1) * drawn).sum()

    output = torch.ones(6, 3)
    losses: list[Tensor] = []

    def replay(steps: UserSteps) -> None:
        for rows in (slice(0, 2), slice(2, 6)):
            part = tuple(value[rows] for value in BATCH)
            losses.append(steps.loss((part, 0), output[rows], steps.draws(rows, 6)))

    whole = run_with_replays(Model(step), output, replay)
    torch.testing.assert_close(sum(losses), whole)
    assert len(set(map(float, later))) == 3


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda generator: torch.rand((), generator=generator)),
        (lambda: np.random.default_rng(1), lambda generator: generator.random()),
        (lambda: random.Random(1), lambda generator: generator.random()),
    ],
    ids=["torch", "numpy", "random"],
)
def test_replays_leave_the_users_generators_alone(make: Any, draw: Any):
    """Otherwise, the rank of the last stage would draw other numbers in the next step than the other ranks."""

    def step(model, batch):
        return draw(model.generator) * model.network(batch[0].flatten(1)).sum()

    model = Model(step)
    model.generator, twin = make(), make()
    output = torch.ones(6, 3)
    losses: list[Tensor] = []

    def replay(steps: UserSteps) -> None:
        losses.extend(steps.loss((BATCH, 0), output, steps.draws(slice(0, 6), 6)) for _ in range(2))

    whole = run_with_replays(model, output, replay)
    assert losses == [whole] * 2
    draw(twin)
    assert draw(model.generator) == draw(twin)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.from_numpy(np.random.rand(len(x))),
        lambda x: torch.randperm(len(x)),
        lambda x: torch.rand(len(x) + 1),
        lambda x: torch.stack([torch.rand(()) for _ in x]),
    ],
    ids=["not torch", "permutation", "other shape", "other number"],
)
def test_random_numbers_that_cannot_be_divided_are_refused(draw: Any):
    """The error names the hook that runs once."""

    def step(model, batch):
        draw(batch[0])
        return model.network(batch[0].flatten(1)).sum()

    def replay(steps: UserSteps) -> None:
        steps.loss((tuple(value[:2] for value in BATCH), 0), torch.ones(2, 3), steps.draws(slice(0, 2), 6))

    with pytest.raises(StrategyError, match=r"draws random numbers before.*on_after_batch_transfer"):
        run_with_replays(Model(step), torch.ones(6, 3), replay)


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
    """The first rank refuses a step unless it calls the network with one row per sample."""
    with pytest.raises(StrategyError, match=message):
        run(Model(step), lambda _: None)


def _twice(model, batch):
    return (model.network(batch[0]) + model.network(batch[0])).sum()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_twice, "calls the network several times"),
        (lambda model, batch: (model.network(batch[0]), None)[1], "returned NoneType without a loss"),
        (lambda model, batch: {"logits": model.network(batch[0])}, "returned dict without a loss"),
    ],
)
def test_a_loss_that_cannot_be_pipelined_is_refused(step, message):
    """The last rank refuses a step unless it returns the loss of one network call."""
    with pytest.raises(StrategyError, match=message):
        steps_of(Model(step)).loss((BATCH, 0), torch.randn(6, 3, requires_grad=True))


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
