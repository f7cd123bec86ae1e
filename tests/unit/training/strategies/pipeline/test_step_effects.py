"""A step's effects on the rank that runs it, repeated on the other ranks."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryPrecision, BinaryRecall

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.step_effects import StepEffects

PREDICTED = torch.tensor([0.9, 0.2, 0.8, 0.7])
LABELS = torch.tensor([1, 1, 0, 1])


class Model(pl.LightningModule):
    """A module with metrics and buffers that records what is logged.

    Args:
        step: The body of training_step.
    """

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.network = nn.BatchNorm1d(3)
        self.around = nn.Module()
        self.around.register_buffer("mean", torch.zeros(2))
        self.mean, self.rows_seen = MeanMetric(), CatMetric()
        self.scores = MetricCollection([BinaryPrecision(), BinaryRecall()])
        self.extremes = MinMaxMetric(MeanMetric())
        self.trainer = SimpleNamespace(loggers=[object()], calls=[], should_stop=False)

    def log(self, *arguments, **keywords):
        """Record the call."""
        self.trainer.calls.append((arguments, keywords))

    def print(self, *arguments, **keywords):
        """Record the call."""
        self.trainer.calls.append((arguments, keywords))


class Ranks:
    """The ranks of a replica, one after the other in one process.

    Args:
        is_last: True for the last rank, which sends.
        sent: Values that were sent and not yet received.
    """

    last = 1

    def __init__(self, is_last, sent):
        self.is_last = is_last
        self.sent = sent

    def broadcast(self, value, position):
        """Send the last rank's value or receive it."""
        assert position == self.last
        if not self.is_last:
            return self.sent.pop(0)
        self.sent.append(copy.deepcopy(value))
        return value


def effects_of(model, is_last=True, sent=None):
    """The effects of steps on one rank."""
    return StepEffects(model, model.network, Ranks(is_last, [] if sent is None else sent))


def run(step, steps=1):
    """Run steps on one module and repeat their effects on another; return both modules and the shared result."""
    first, second, sent = Model(step), Model(step), []
    ran, others = effects_of(first, True, sent), effects_of(second, False, sent)
    for _ in range(steps):
        with ran.recorded("training_step"):
            returned = step(first)
        assert ran.share(returned) is returned
        result = others.share(None)
    return first, second, result


def everything(model):
    """Change a buffer, the network and a metric of each kind."""
    model.around.mean.add_(1)
    model.network(torch.ones(2, 3))
    model.mean.update(PREDICTED)
    model.rows_seen.update(PREDICTED)
    model.scores.update(PREDICTED, LABELS)
    model.extremes.update(PREDICTED)


@pytest.mark.parametrize("steps", [1, 3])
def test_metrics_and_buffers_are_those_of_the_rank_that_ran_the_step(steps):
    """Metrics compute over all ranks; buffers are copied in place, and the network's buffers do not change."""
    first, second, _ = run(everything, steps)
    assert torch.equal(second.around.mean, torch.full((2,), float(steps)))
    assert first.mean.compute() == second.mean.compute() == PREDICTED.mean()
    assert torch.equal(first.rows_seen.compute(), PREDICTED.repeat(steps))
    assert torch.equal(second.rows_seen.compute(), PREDICTED.repeat(steps))
    assert first.scores.compute() == second.scores.compute()
    assert first.extremes.compute() == second.extremes.compute()
    assert second.mean._update_count == 0
    assert second.network.num_batches_tracked == 0


def test_calls_of_log_and_print_are_made_on_all_ranks_in_order():
    """Metrics are sent by name with their last batch's value, and printed values as the text on the last rank."""

    def step(model):
        model.log("loss", torch.tensor(2.0), prog_bar=True)
        model.print("batch", 7)
        model.log("first", model.mean)
        model.mean(PREDICTED)
        model.log("mean", model.mean, on_step=True)
        return torch.tensor(2.0)

    first, second, result = run(step)
    assert result == 2
    for model in (first, second):
        assert model.trainer.calls == [
            (("loss", torch.tensor(2.0)), {"prog_bar": True}),
            (("batch", "7"), {}),
            (("first", model.mean), {}),
            (("mean", model.mean), {"on_step": True}),
        ]
        assert model.mean._forward_cache == PREDICTED.mean()


def test_log_and_loggers_are_back_after_an_error():
    """After an error, the module's log and print and the Trainer's loggers are restored."""
    model = Model(None)
    loggers = model.trainer.loggers
    with pytest.raises(ZeroDivisionError), effects_of(model).recorded("training_step"):
        _ = 1 / 0
    assert model.trainer.loggers is loggers
    assert not {"log", "print"} & vars(model).keys()


def test_within_a_step_nothing_is_logged():
    """No rank logs within a step: the last rank's calls are made on all ranks after it."""
    model = Model(None)
    with effects_of(model, is_last=False).recorded("training_step"):
        model.log("x", 1.0)
    assert model.trainer.calls == []


def test_a_logger_of_a_step_is_an_error():
    """Using a logger in a step, which would write nothing, is an error that points to self.log and outputs: all."""
    with pytest.raises(StrategyError, match=r"training_step uses self.logger.log_image.*self.log.*outputs: all"):
        run(lambda model: model.trainer.loggers[0].log_image("x"))


def test_of_what_a_step_returns_numbers_arrive():
    """Only numbers are sent from what a step returns, as the rest may be as large as the outputs."""
    returned = [None, 3, torch.ones(1), {"loss": torch.ones(()), "logits": torch.ones(2)}, torch.ones(2), object()]
    results = [run(lambda model, value=value: value)[2] for value in returned]
    assert results == [None, 3, torch.ones(1), {"loss": torch.ones(())}, None, None]


def test_within_a_step_metrics_compute_on_their_rank():
    """Metrics compute locally within a step, because the other ranks have already left it."""
    sent = []
    model = Model(None)
    with effects_of(model, True, sent).recorded("validation_step"):
        model.mean.update(PREDICTED)
        assert model.mean.compute() == PREDICTED.mean()
    assert sent == []


@pytest.mark.parametrize("unsent", [{"value": lambda: 1.0}, {"value": 1.0, "reduce_fx": lambda values: values}])
def test_what_cannot_be_sent_is_an_error_of_the_step(unsent):
    """A logged value that cannot be pickled raises an error within the step."""
    model = Model(None)
    with (
        effects_of(model).recorded("training_step"),
        pytest.raises((AttributeError, pickle.PicklingError), match="lambda"),
    ):
        model.log("x", **unsent)


def test_a_metric_that_the_module_does_not_have_is_logged_as_it_is():
    """A metric of another module is logged unchanged, so that Lightning raises its usual error."""
    other = MeanMetric()
    first, _, _ = run(lambda model: model.log("x", other))
    assert first.trainer.calls == [(("x", other), {})]
