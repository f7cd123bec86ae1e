"""Values of ``self.log`` over ranks with different numbers of samples: as on one rank that has them all."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.trainer.connectors.logger_connector import result

from lightning_sm.data.plan.samples import BatchPlan, SamplePlan, Tail
from lightning_sm.data.trainer.last_step import LastStep
from lightning_sm.data.trainer.logged_values import ExactResultMetric

REDUCTIONS = {"mean": "mean", "sum": "sum", "max": "max", "min": "min", "builtin sum": sum, "torch.max": torch.max}
WHEN = [{"on_step": True, "on_epoch": False}, {"on_step": False, "on_epoch": True}, {"on_step": True, "on_epoch": True}]


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    monkeypatch.setattr(result, "_ResultMetric", ExactResultMetric)
    yield
    ExactResultMetric.weight = 1.0


class Ranks:
    """Ranks that take turns: in a first round each notes what it reduces, in a second one it gets the results.

    What a rank reduces must not depend on the results, as is so with logged values. Results are those of Lightning's
    strategies: of integers, the mean is an integer, and values change in place.
    """

    def __init__(self, world_size):
        self.world_size = world_size
        self._given = [[] for _ in range(world_size)]
        self._is_first_round = True

    def run(self, of_rank):
        """What ``of_rank(rank, reduce)`` returns for each rank in the second round."""
        for self._is_first_round in (True, False):
            results = [of_rank(rank, self._reduce(rank)) for rank in range(self.world_size)]
        return results

    def _reduce(self, rank):
        numbers = itertools.count()

        def reduce(tensor, group=None, reduce_op=None):
            if self._is_first_round:
                self._given[rank].append((reduce_op, tensor.clone()))
                return tensor
            given = [each[next_number] for next_number in [next(numbers)] for each in self._given]
            assert {op for op, _ in given} == {reduce_op}
            all_of_them = torch.stack([value for _, value in given])
            how = {"mean": lambda: all_of_them.sum(0) / self.world_size, "sum": lambda: all_of_them.sum(0)}
            how |= {"max": lambda: all_of_them.max(0)[0], "min": lambda: all_of_them.min(0)[0]}
            return tensor.copy_(how[reduce_op]())

        return reduce


def logged(plan, tail, reduce, values, kinds, **settings):
    """What a loop logs in each step and at the end: of each reduction, the value of the samples of the batch."""
    results, last_step = result._ResultCollection(training=True), LastStep("auto")
    of_steps = []
    for step in range(plan.num_steps):
        batch = values[plan.batch(step)]
        last_step.take(tail.weight if step == plan.num_steps - 1 else 1.0, is_manual=False)
        results.batch, results.batch_size = batch, None
        last_step.on_train_batch_start()
        for name in kinds:
            value = getattr(
                batch, REDUCTIONS[name] if isinstance(REDUCTIONS[name], str) else REDUCTIONS[name].__name__
            )()
            results.log(
                "training_step",
                name,
                value,
                reduce_fx=REDUCTIONS[name],
                sync_dist=True,
                sync_dist_fn=reduce,
                **settings,
            )
        of_steps.append(results.metrics(on_step=True)["log"])
    last_step.on_train_epoch_end()
    metrics = {"steps": of_steps, "epoch": results.metrics(on_step=False)["log"]}
    return apply_to_collection(metrics, torch.Tensor, float)


def assert_equal(ranks, alone):
    """Each rank has what one rank has, to a millionth."""
    for one in ranks:
        assert one["epoch"] == pytest.approx(alone["epoch"], rel=1e-6, abs=1e-6)
        for own, expected in zip(one["steps"], alone["steps"], strict=True):
            assert own == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(size=st.integers(1, 60), batch_size=st.integers(1, 5), world_size=st.integers(1, 6), when=st.sampled_from(WHEN))
def test_ranks_log_what_one_rank_logs(size, batch_size, world_size, when):
    """For each reduction, in each step and at the end of the epoch: one rank has the batches of all ranks as one."""
    values = torch.linspace(1.0, 2.0, size) ** 2
    whole = SamplePlan(range(size), batch_size * world_size, False, 0, 1)
    alone = logged(whole, Tail(), lambda value, **_: value, values, REDUCTIONS, **when)

    def of_rank(rank, reduce):
        plan = SamplePlan(range(size), batch_size, False, rank, world_size)
        tail = Tail.of(size, batch_size, drop_last=False, rank=rank, world_size=world_size)
        return logged(plan, tail, reduce, values, REDUCTIONS, **when)

    assert_equal(Ranks(world_size).run(of_rank), alone)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=20), world_size=st.integers(1, 6))
def test_batches_of_a_batch_sampler_count_by_their_sizes(sizes, world_size):
    """At the end of the epoch each batch counts once, although ranks without one repeat one in the last step."""
    offsets = np.cumsum([0, *sizes])
    order = np.arange(offsets[-1])
    values = torch.linspace(1.0, 2.0, len(order)) ** 2

    def of_rank(rank, reduce, ranks=world_size):
        tail = Tail.of(len(sizes), None, drop_last=False, rank=rank, world_size=ranks)
        return logged(BatchPlan(order, offsets, rank, ranks), tail, reduce, values, REDUCTIONS, on_epoch=True)

    alone = of_rank(0, lambda value, **_: value, ranks=1)
    for one in Ranks(world_size).run(of_rank):
        assert one["epoch"] == pytest.approx(alone["epoch"], rel=1e-6)


@pytest.mark.parametrize(("size", "world_size", "of_lightning"), [(13, 2, 13 / 12), (23, 3, 23 / 21)])
def test_an_accuracy_of_one_is_logged_as_one(size, world_size, of_lightning, monkeypatch):
    """Lightning takes the mean of the batch sizes as an integer, so that it logs more than 1."""

    def of_rank(rank, reduce):
        plan = SamplePlan(range(size), 4, False, rank, world_size)
        tail = Tail.of(size, 4, drop_last=False, rank=rank, world_size=world_size)
        return logged(plan, tail, reduce, torch.ones(size), ["mean"], on_epoch=True)["epoch"]["mean"]

    assert Ranks(world_size).run(of_rank) == [1.0] * world_size
    monkeypatch.undo()
    assert Ranks(world_size).run(of_rank) == [pytest.approx(of_lightning)] * world_size


@pytest.mark.parametrize(
    "settings",
    [{"sync_dist": False}, {"sync_dist": True, "rank_zero_only": True}, {"sync_dist": True, "sync_dist_group": 1}],
)
def test_values_of_a_rank_or_of_a_group_stay_as_they_are(settings):
    """A weight is the share of one of all ranks; without them, a repeated batch counts as any other."""
    arguments = {"on_step": True, "sync_dist_fn": lambda value, **_: value, **settings}
    for weight in (0.0, 1.5):
        ExactResultMetric.weight = weight
        results = result._ResultCollection(training=True)
        for value, size in ((1.0, 4), (3.0, 2)):
            results.log("training_step", "loss", torch.tensor(value), batch_size=size, **arguments)
        assert float(results.metrics(on_step=True)["log"]["loss_step"]) == 3.0
        assert float(results.metrics(on_step=False)["log"]["loss_epoch"]) == pytest.approx(10 / 6)


def test_a_repeated_sample_counts_nothing_even_if_its_value_is_infinite():
    """Zero times infinity would be no number."""
    ExactResultMetric.weight = 0.0
    results = result._ResultCollection(training=True)
    arguments = {"reduce_fx": "sum", "sync_dist": True, "sync_dist_fn": lambda value, **_: value}
    results.log("training_step", "loss", torch.tensor(float("inf")), on_step=True, **arguments)
    assert {float(value) for value in results.metrics(on_step=False)["log"].values()} == {0.0}


def test_values_of_half_precision_keep_their_type_in_the_weighted_step():
    """They are accumulated with single precision, as in all other steps."""
    ExactResultMetric.weight = 1.5
    results = result._ResultCollection(training=True)
    for value in (torch.tensor(1.0, dtype=torch.float16), torch.tensor(2)):
        arguments = {"on_step": True, "batch_size": 2, "sync_dist": True, "sync_dist_fn": lambda value, **_: value}
        results.log("training_step", f"{value.dtype}", value, **arguments)
    assert {value.dtype for value in results.metrics(on_step=False)["log"].values()} == {torch.float32}
    assert [float(value) for value in results.metrics(on_step=False)["log"].values()] == [1.0, 2.0]
    assert [float(value) for value in results.metrics(on_step=True)["log"].values()] == [1.5, 3.0]
