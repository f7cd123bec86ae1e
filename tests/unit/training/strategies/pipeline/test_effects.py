"""What a training_step leaves behind, repeated on a rank that has not run it."""

import copy
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryPrecision, BinaryRecall

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.effects import EffectRecorder
from lightning_sm.training.strategies.pipeline.last_stage_value import LastStageValue

PREDICTED = torch.tensor([0.9, 0.2, 0.8, 0.7])
LABELS = torch.tensor([1, 1, 0, 1])


class Model(pl.LightningModule):
    """Everything that a step may change, and what it logs.

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
        self.rows, self.name, self.average = 0, None, torch.zeros(2)
        self.items, self.table, self.unique, self.recent = [1], {"a": [1], "b": 2}, {1}, deque([1], maxlen=2)
        self.same = self.items
        self.trainer = SimpleNamespace(loggers=[object()], calls=[])

    def log(self, *arguments, **keywords):
        """Keep the call."""
        self.trainer.calls.append((arguments, keywords))

    def print(self, *arguments, **keywords):
        """Keep the call, too."""
        self.trainer.calls.append((arguments, keywords))


def run(step, *, is_rank_zero=False, steps=1):
    """Run steps on one module, and repeat their effects on another; returns both, and the results there."""
    first = Model(step)
    second = Model(step)
    vars(second)["mine"] = {"rank": 1}
    vars(first)["mine"] = {"rank": 0}
    recorder, repeater = (EffectRecorder(model, model.network, is_rank_zero=is_rank_zero) for model in (first, second))
    for _ in range(steps):
        _, effects = recorder.record("training_step", lambda: step(first))
        result = repeater.repeat(copy.deepcopy(effects))
    return first, second, result


def everything(model):
    """Change one of each."""
    model.rows += 4
    model.name = "step"
    model.new = (1, torch.ones(1))
    model.average = 0.5 * model.average + 1
    model.items.append(torch.ones(2))
    model.table["a"].append(2)
    model.table["c"] = 3
    model.unique.add(2)
    model.recent.append(3)
    model.around.mean.add_(1)
    model.network.running_mean.add_(1)
    model.network(torch.ones(2, 3))
    model.mean.update(PREDICTED)
    model.rows_seen.update(PREDICTED)
    model.scores.update(PREDICTED, LABELS)
    return {"loss": torch.tensor(2.0), "logits": torch.ones(4, 9), "rows": 4, "norm": torch.ones(1)}


@pytest.mark.parametrize("steps", [1, 3])
def test_all_that_a_step_keeps_is_kept_by_the_other_rank(steps):
    """Numbers, texts, tensors, new attributes, containers of any depth, buffers around the network, and metrics."""
    first, second, result = run(everything, steps=steps)
    table, buffer, items = second.table, second.around.mean, second.items
    assert (second.rows, second.name, second.new) == (4 * steps, "step", (1, torch.ones(1)))
    assert torch.equal(second.average, first.average)
    assert items is second.same
    assert len(items) == 1 + steps
    assert table == first.table == {"a": [1, *[2] * steps], "b": 2, "c": 3}
    assert (second.unique, second.recent) == (first.unique, first.recent)
    assert torch.equal(buffer, torch.full((2,), float(steps)))
    assert second.mean.compute() == first.mean.compute() == PREDICTED.mean()
    assert torch.equal(second.rows_seen.compute(), PREDICTED.repeat(steps))
    assert second.scores.compute() == first.scores.compute()
    assert second.mean._update_count == steps
    assert sorted(result) == ["logits", "loss", "norm", "rows"]


def test_layers_and_what_differs_between_ranks_stay_as_they_are():
    """The network's buffers are those of other layers, and other keys of a dict are another rank's own."""

    def step(model):
        model.network(torch.ones(2, 3))
        model.mine["new"] = 1
        return torch.zeros(())

    first, second, _ = run(step)
    assert second.network.num_batches_tracked == 0
    assert second.mine == {"rank": 1, "new": 1}
    assert first.mine == {"rank": 0, "new": 1}


def test_buffers_and_containers_stay_the_same_objects():
    """Other attributes may refer to them."""

    def step(model):
        model.around.mean.add_(1)
        model.unique.add(2)
        return torch.zeros(())

    recording, model = Model(step), Model(step)
    kept = [model.around.mean, model.unique]
    _, effects = EffectRecorder(recording, recording.network, is_rank_zero=False).record(
        "training_step", lambda: step(recording)
    )
    EffectRecorder(model, model.network, is_rank_zero=False).repeat(effects)
    assert model.around.mean is kept[0]
    assert model.unique is kept[1]
    assert model.unique == {1, 2}


def test_calls_of_log_and_print_are_repeated_in_order():
    """A metric by its name, with the value of its last batch; texts as the recording rank shows them."""

    def step(model):
        model.log("loss", torch.tensor(2.0), prog_bar=True)
        model.print("batch", 7)
        model.log("first", model.mean)
        model.mean(PREDICTED)
        model.log("mean", model.mean, on_step=True)
        return torch.tensor(2.0)

    first, second, result = run(step)
    assert result == 2
    assert second.trainer.calls == [
        (("loss", torch.tensor(2.0)), {"prog_bar": True}),
        (("batch", "7"), {}),
        (("first", second.mean), {}),
        (("mean", second.mean), {"on_step": True}),
    ]
    assert second.mean._forward_cache == first.mean._forward_cache == PREDICTED.mean()
    assert "log" not in vars(first)
    assert len(first.trainer.calls) == 4


def test_the_recording_rank_has_its_loggers_again_after_an_error():
    """And its own self.log."""
    model = Model(None)
    loggers = model.trainer.loggers
    recorder = EffectRecorder(model, model.network, is_rank_zero=False)
    with pytest.raises(ZeroDivisionError):
        recorder.record("training_step", lambda: 1 / 0)
    assert model.trainer.loggers is loggers
    assert not {"log", "print"} & vars(model).keys()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda model: setattr(model, "opened", object()), ["Model.opened", "object"]),
        (lambda model: model.items.append(lambda: 1), ["Model.items", "cannot be sent"]),
        (lambda model: model.log("x", 1.0, reduce_fx=lambda x: x), ["self.log('x', ...)", "cannot be sent"]),
        (lambda model: model.print("x", file=sys.stderr), ["self.print", "cannot be sent"]),
        (lambda model: model.log("x", 1.0, sync_dist_group="group"), ["self.log('x', sync_dist_group=...)"]),
        (lambda model: model.trainer.loggers[0].log_image("x"), ["self.logger.log_image", "self.log"]),
    ],
)
def test_what_cannot_be_repeated_is_an_error(step, said):
    """It names what, and the option with which it works."""
    with pytest.raises(StrategyError) as error:
        run(lambda model: (step(model), torch.zeros(()))[1])
    assert [part for part in [*said, "outputs: all"] if part not in str(error.value)] == []


def test_loggers_may_be_used_where_rank_zero_runs_the_step():
    """With schedules in a V, the last stage is on the first rank."""
    used = []

    def step(model):
        used.extend(model.trainer.loggers)
        return torch.zeros(())

    first, _, _ = run(step, is_rank_zero=True)
    assert used == first.trainer.loggers


class _Evaluator:
    """An evaluator of the user's, with state in a list, in an array, and in a metric."""

    def __init__(self):
        self.scores, self.sums, self.mean = [], np.zeros(2), MeanMetric()


@pytest.mark.parametrize(
    "update",
    [
        lambda evaluator: evaluator.scores.append(1.0),
        lambda evaluator: evaluator.sums.__iadd__(1),
        lambda evaluator: evaluator.mean.update(PREDICTED),
        lambda evaluator: setattr(evaluator, "best", torch.ones(1)),
    ],
)
def test_a_change_within_another_object_is_told_once(update, caplog):
    """With the step, the attribute and its class: hooks of other ranks would find the object as it was."""
    model = Model(None)
    model.evaluator, model.other = _Evaluator(), _Evaluator()
    recorder = EffectRecorder(model, model.network, is_rank_zero=False)
    for _ in range(2):
        recorder.record("validation_step", lambda: update(model.evaluator))
    assert [record.getMessage().partition(" on the ranks")[0] for record in caplog.records] == [
        "validation_step changes the object Model.evaluator (_Evaluator)"
    ]
    assert "set outputs: all" in caplog.text


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda trainer: trainer.kept.append(torch.ones(2)), "kept"),
        (lambda trainer: trainer.average.fill_(1) is None, "average"),
        (lambda trainer: setattr(trainer, "best", 0.5), "best"),
        (lambda trainer: setattr(trainer, "evaluator", _Evaluator()), "evaluator"),
        (lambda trainer: setattr(trainer, "average", None), "average"),
    ],
)
def test_a_change_of_the_trainer_is_told_once(change, name, caplog):
    """Its attributes are not repeated on other ranks, unlike those of the module."""
    model = Model(None)
    model.trainer.kept, model.trainer.average = [], torch.zeros(2)
    recorder = EffectRecorder(model, model.network, is_rank_zero=False)
    recorder.record("validation_step", lambda: model.items.append(1))
    assert caplog.records == []
    for _ in range(2):
        recorder.record("validation_step", lambda: change(model.trainer))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"validation_step changes self.trainer.{name} on the ranks of the last stage")
    assert "in an attribute of Model" in record.getMessage()


def test_what_a_step_returns_arrives_without_large_tensors():
    """Numbers do, also of a validation, which may return anything or nothing; the rest has what stands for it."""
    returned = [None, 3, torch.ones(1), {"loss": torch.ones(()), "logits": torch.ones(2)}, torch.ones(2), object()]
    _, _, results = zip(*(run(lambda model, value=value: value) for value in returned), strict=True)
    assert results[:3] == (None, 3, torch.ones(1))
    assert results[3]["loss"] == torch.ones(())
    assert all(isinstance(one, LastStageValue) for one in (results[3]["logits"], *results[4:]))
    assert repr(results[3]["logits"]).startswith("<outputs['logits'] of training_step, a tensor of shape (2,), stays")
