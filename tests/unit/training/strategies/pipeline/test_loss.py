"""A step's loss from the losses of its microbatches, and the check of their weights."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.layers import Network
from lightning_sm.training.strategies.pipeline.loss import StepLoss, is_checked
from lightning_sm.training.strategies.pipeline.steps import UserSteps

ROWS, TOKENS, CLASSES = 8, 3, 5
IGNORED = -100


class Model(LightningModule):
    """A LightningModule with the given loss."""

    trainer: Any = SimpleNamespace(should_stop=False)

    def __init__(self, loss: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, CLASSES))
        self.loss = loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        """The given loss of the network's output and the labels."""
        return self.loss(self.network(batch[0]), batch[1])


class Weighted(Model):
    """The same model with weights."""

    def pipeline_weight(self, batch: tuple[Tensor, Tensor]) -> Any:
        """The number of labels that are not padding."""
        return (batch[1] != IGNORED).sum()


def mean(output: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens except padding."""
    return functional.cross_entropy(output.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def labels_of(lengths: list[int]) -> Tensor:
    """Labels for rows with these numbers of tokens."""
    labels = torch.randint(0, CLASSES, (len(lengths), TOKENS))
    labels[torch.arange(TOKENS) >= torch.tensor(lengths)[:, None]] = IGNORED
    return labels


def steps_of(model: Model) -> UserSteps:
    """The steps of a model without other ranks, within a step."""
    replica: Any = SimpleNamespace(is_last=True)
    group: Any = None
    steps = UserSteps(model, Network(model, "network"), replica, lambda *_: None, group, are_everywhere=True)
    with steps.replayed():
        pass
    return steps


def run(model: Model, output: Any, labels: Tensor, kind: str = "mean", microbatches: int = 4, step: int = 0) -> Any:
    """Run the losses of a step's microbatches as a schedule does, and return the StepLoss."""
    steps = steps_of(model)
    loss = StepLoss(model, steps, kind)  # type: ignore[arg-type]
    rows = len(labels)
    loss.begin(((torch.zeros(rows, 4), labels), 0), rows, microbatches, step=step)
    size = rows // microbatches
    for index in range(microbatches):
        its = slice(index * size, (index + 1) * size)
        part = tuple(value[its] for value in output) if isinstance(output, tuple) else output[its]
        loss(part, torch.tensor(index)).backward()
    return loss


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", [[3, 1, 2, 3, 0, 0, 1, 2], [1, 0, 0, 0, 0, 0, 0, 0], [3] * 8])
def test_weighted_losses_have_the_gradients_of_the_batch(microbatches: int, lengths: list[int]):
    """Weighted losses give the batch's gradients for any number of tokens per microbatch, including 0."""
    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    labels = labels_of(lengths)
    loss = run(Weighted(mean), output, labels, microbatches=microbatches)
    (expected,) = torch.autograd.grad(mean(output, labels), output)
    torch.testing.assert_close(output.grad, expected, rtol=0, atol=1e-7)
    assert (loss.error, loss.check(1.0)) == (None, None)


def test_a_mean_that_is_no_number_has_no_gradients_where_its_weight_is_0():
    """Microbatches of weight 0 give no gradients, even if a user's formula divides by 0 and returns NaN."""

    def masked(output: Tensor, labels: Tensor) -> Tensor:
        mask = (labels != IGNORED).float()
        return (output.square().mean(-1) * mask).sum() / mask.sum()

    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    labels = labels_of([2, 1, 0, 0, 1, 3, 2, 2])
    loss = run(Weighted(masked), output, labels, step=1)
    (expected,) = torch.autograd.grad(masked(output, labels), output)
    torch.testing.assert_close(output.grad, expected, rtol=0, atol=1e-7)
    assert (loss.error, loss.check(1.0)) == (None, None)


def rewarded(output: Tensor, labels: Tensor) -> Tensor:
    """A loss with values on both sides of 0."""
    return (output[..., 0] * (labels.float() - 2)).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("loss", [mean, rewarded])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 30.0])
def test_the_check_agrees_with_a_mean_over_rows(loss, dtype, scale):
    """The check passes in any precision, even if losses cancel out or confident models' gradients are mere rounding."""
    torch.manual_seed(0)
    output = (torch.randn(ROWS, TOKENS, CLASSES) * scale).to(dtype).requires_grad_()
    labels = output.detach().argmax(-1) if scale > 1 else torch.randint(0, CLASSES, (ROWS, TOKENS))
    for step in range(5):
        assert run(Model(loss), output, labels, step=step).check(1.0) is None


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_padding_that_is_not_declared_is_found(scale: float):
    """The check finds padding even if all tokens have the same loss, as in a new model: gradients differ."""
    output = (torch.randn(ROWS, TOKENS, CLASSES) * scale).requires_grad_()
    message = run(Model(mean), output, labels_of([3, 3, 1, 1, 3, 3, 3, 3])).check(1.0)
    assert "weighted by rows. For rows 0 to 3 of a batch" in message
    assert "def pipeline_weight(self, batch)" in message


def test_weights_that_are_wrong_are_found():
    """The check finds wrong weights and names the method."""
    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    model = Weighted(lambda output, labels: output.square().mean())
    message = run(model, output, labels_of([3, 3, 1, 1, 3, 3, 3, 3])).check(1.0)
    assert "weighted by pipeline_weight(batch)" in message


def test_a_sum_is_compared_with_the_sum():
    """The check asks for loss: sum if losses add up, and passes with it."""
    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    labels = labels_of([3] * ROWS)
    model = Model(lambda output, labels: mean(output, labels) * len(labels))
    assert "If it adds up the rows, set the strategy's option loss: sum." in run(model, output, labels).check(1.0)
    del model.network.forward  # which the cut has replaced
    assert run(model, output, labels, kind="sum").check(1.0) is None


def test_padding_beyond_the_first_pair_is_found():
    """Each step compares another pair of microbatches, so padding in any of them is found."""
    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    labels = labels_of([3, 3, 3, 3, 3, 3, 1, 1])
    found = [run(Model(mean), output, labels, step=step).check(1.0) is not None for step in range(6)]
    assert found == [False, False, True, False, False, True]


def test_later_checks_compare_all_pairs_in_turn():
    """Later checks, every 100 steps, go through all pairs even if 100 is a multiple of their number."""
    output = torch.randn(10, TOKENS, CLASSES, requires_grad=True)
    labels = labels_of([*[3] * 8, 1, 1])
    found = [run(Model(mean), output, labels, microbatches=5, step=step).check(1.0) for step in (100, 200, 300, 400)]
    assert [message is not None for message in found] == [False, False, True, False]


def test_outputs_of_several_tensors_are_compared():
    """Outputs of several tensors are compared, including ones without gradients, such as masks used by the loss."""

    def masked(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return (output[0].square().mean(-1) * output[1]).sum() / output[1].sum()

    output = (torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True), torch.ones(ROWS, TOKENS, dtype=torch.long))
    assert run(Model(masked), output, labels_of([3] * ROWS)).check(1.0) is None
    output[1][0] = 0
    assert "gradients differ by" in run(Model(masked), output, labels_of([3] * ROWS)).check(1.0)


GENERATOR = torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    "factor",
    [
        lambda output: torch.rand(output.shape),
        lambda output: torch.rand(len(output), 1, 1, generator=GENERATOR),
        lambda output: torch.empty_like(output).exponential_(),
        lambda output: torch.randint(2, output.shape),
        lambda output: functional.dropout(torch.ones_like(output) + 0 * output),
        lambda output: torch.rand(()),
        lambda output: random.random() + np.random.rand(),
    ],
    ids=["rows", "own generator", "in place", "integers", "dropout", "one number", "not torch"],
)
def test_a_loss_with_random_numbers_is_compared(factor: Callable[[Tensor], Any]):
    """A batch and its microbatches get the same random numbers, and the user's random state is unchanged."""
    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    loss = run(Model(lambda output, labels: (output * factor(output)).mean()), output, labels_of([3] * ROWS))
    before = torch.get_rng_state(), random.getstate()
    assert loss.check(1.0) is None
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    loss = run(Model(lambda output, labels: (output * factor(output)).sum()), output, labels_of([3] * ROWS))
    assert "gradients differ by" in loss.check(1.0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda output: torch.from_numpy(np.random.rand(*output.shape)).float(),
        lambda output: torch.rand(3 + len(output), *output.shape[1:])[3:],
        lambda output: torch.stack([torch.rand(output.shape[1:]) for _ in output]),
    ],
    ids=["not torch", "other shape", "other number"],
)
def test_a_loss_that_draws_differently_for_a_batch_is_not_compared(draw: Any, caplog: pytest.LogCaptureFixture):
    """Such a loss is skipped with a single warning."""
    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    loss = run(Model(lambda output, labels: (output * draw(output)).sum()), output, labels_of([3] * ROWS))
    with caplog.at_level(logging.WARNING):
        assert loss.check(1.0) is None
        assert loss.check(1.0) is None
    assert caplog.text.count("draws other random numbers for a batch than for its microbatches") == 1


def test_a_diverged_model_is_not_the_checks_concern():
    """The check ignores a NaN loss, which the user sees as in one process."""
    output = torch.full((ROWS, TOKENS, CLASSES), math.nan, requires_grad=True)
    assert run(Model(mean), output, labels_of([3] * ROWS)).check(math.nan) is None


def test_a_microbatch_whose_loss_alone_is_no_number_is_found():
    """The check also compares the whole batch, so it finds a single microbatch with a NaN loss in any step."""
    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    loss = run(Model(mean), output, labels_of([3, 3, 3, 3, 3, 3, 0, 0]))
    assert "rows 0 to 7 of a batch it is 1.5, but nan from 4 microbatches of these rows" in loss.check(1.5)
    assert loss.check(math.nan) is None


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_refused(weight: float):
    """Invalid weights are refused before the schedule runs, and the error shows the values."""

    class Odd(Model):
        def pipeline_weight(self, batch: Any) -> Any:
            """The given weight."""
            return weight

    with pytest.raises(StrategyError, match=rf"Odd\.pipeline_weight\(batch\) returned \[{float(weight)}, "):
        run(Odd(mean), torch.randn(ROWS, TOKENS, CLASSES), labels_of([3] * ROWS))


def test_an_error_of_the_users_loss_is_kept_until_the_end():
    """An error in the user's loss is kept until the schedule ends, as other ranks would wait if it stopped halfway."""

    def broken(output: Tensor, labels: Tensor) -> Tensor:
        if len(labels) < ROWS:
            raise ZeroDivisionError("mine")
        return output.sum()

    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    error = run(Model(broken), output, labels_of([3] * ROWS)).error
    assert isinstance(error, ZeroDivisionError)


def test_weights_of_a_sum_are_refused():
    """loss: sum and pipeline_weight contradict each other and are refused together."""
    with pytest.raises(StrategyError, match=r"loss=sum.*Weighted has a method pipeline_weight.*Remove one"):
        StepLoss(Weighted(mean), None, "sum")  # type: ignore[arg-type]


def test_the_first_steps_and_one_in_a_hundred_are_checked():
    """The check runs in the first ten steps and every 100 steps, as padding may first occur late."""
    assert [step for step in range(301) if is_checked(step)] == [*range(10), 100, 200, 300]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ["network", "again"])
def test_a_loss_that_uses_weights_itself_is_found(name: str, microbatches: int):
    """A loss that uses parameters is an error that names them: a rank has only its stage's. Aliases are found, too."""

    def decayed(output: Tensor, labels: Tensor) -> Tensor:
        return mean(output, labels) + getattr(model, name)[0].weight.norm()

    output = torch.randn(ROWS, TOKENS, CLASSES, requires_grad=True)
    model = Model(decayed)
    model.again = model.network
    message = run(model, output, labels_of([3] * ROWS), microbatches=microbatches).check(1.0)
    assert "uses the parameters network.0.weight outside" in message


def test_an_auxiliary_loss_that_a_layer_keeps_is_found_before_the_schedule():
    """It depends on the layer's parameters, through a graph that the schedule's backward pass would free."""

    def auxiliary(output: Tensor, labels: Tensor) -> Tensor:
        return mean(output, labels) + model.network[0](torch.ones(4)).sum()

    model = Model(auxiliary)
    loss = StepLoss(model, steps_of(model), "mean")
    loss.begin(((torch.zeros(ROWS, 4), labels_of([3] * ROWS)), 0), ROWS, 4, step=0)
    with pytest.raises(StrategyError, match=r"uses the parameters network\.0\.weight, .*auxiliary losses, in a tuple"):
        loss.try_out(torch.randn(2, TOKENS, CLASSES))


def test_a_loss_without_gradients_is_refused():
    """A loss without gradients raises torch's error, as in one process."""
    model = Model(lambda output, labels: output.detach().sum())
    loss = StepLoss(model, steps_of(model), "mean")
    loss.begin(((torch.zeros(ROWS, 4), torch.zeros(ROWS)), 0), ROWS, 4, step=0)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.try_out(torch.randn(2, CLASSES, requires_grad=True))
