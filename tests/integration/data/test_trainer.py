"""A Trainer on data hosts sees what the user's loaders promise, whatever its settings."""

import gc
import logging
from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import Callback

from tests.integration.data.numbers import BATCH_SIZE, NUM_TEST, SECOND, Recorder

pytestmark = pytest.mark.processes


class ByHand(Recorder):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.note("train", batch)


def widening(*row):
    """A row that only widens what the others show."""
    return pytest.param(*row, marks=pytest.mark.proof)


@pytest.mark.parametrize(
    ("train", "num_steps", "num_samples"),
    [
        ("shuffled", 6, 23),
        ("weighted", 5, 20),
        widening("sequential", 6, 23),
        widening("drop_last", 5, 20),
        widening("split", 6, 23),
    ],
)
def test_every_epoch_has_its_samples(cluster, train, num_steps, num_samples):
    """Each sample once per epoch, in the order that the loader asks for, and another one in each; also to validate."""
    model, trainer = cluster.fit(train, "small shuffled" if train == "weighted" else "small")
    epochs = [model.indices("train", epoch) for epoch in (0, 1)]
    assert trainer.num_training_batches == num_steps
    assert [len(model.batches("train", epoch)) for epoch in (0, 1)] == [num_steps] * 2
    assert [len(epoch) for epoch in epochs] == [num_samples] * 2
    if train != "weighted":
        assert all(len(set(epoch)) == num_samples for epoch in epochs)
    is_sequential = train == "sequential"
    assert (epochs[0] == list(range(num_samples))) == is_sequential
    assert (epochs[0] == epochs[1]) == is_sequential
    assert len(set(model.hashes)) == len(model.hashes)
    if train != "weighted":
        assert model.batches("val 0", 0) == [[0, 1, 2, 3], [4, 5, 6]]
    else:
        first, second = (model.indices("val 0", epoch) for epoch in (0, 1))
        assert sorted(first) == sorted(second) == list(range(7))
        assert first != second


def test_loaders_in_a_list_are_validated_one_after_the_other(cluster):
    """With the dataloader_idx of each."""
    model, _ = cluster.fit("sequential", "two small", max_epochs=1)
    assert model.batches("val 0") == [[0, 1, 2, 3], [4, 5, 6]]
    assert model.batches("val 1") == [[1000, 1001], [1002]]


@pytest.mark.parametrize(
    ("train", "num_steps"),
    [("max_size_cycle", 6), widening("dict", 6), widening("max_size", 6), widening("min_size", 3)],
)
def test_loaders_of_different_lengths_train_together(cluster, train, num_steps):
    """As CombinedLoader says: the short one restarts, is missing, or ends the epoch."""
    model, _ = cluster.fit(train, max_epochs=2)
    for epoch in (0, 1):
        batches = model.batches("train", epoch)
        assert len(batches) == num_steps
        long = [index for batch in batches for index in batch["a"]]
        assert len(set(long)) == len(long) == min(23, 4 * num_steps)
        short = [index for batch in batches for index in batch["b"] or ["none"]]
        first, second = short[:9], short[9:]
        assert sorted(first) == list(range(SECOND, SECOND + 9))
        if train == "max_size":
            assert second == ["none"] * 3
        elif train != "min_size":
            assert sorted(second) == sorted(first)
            assert first != second


def test_a_loader_that_restarts_in_a_validation_has_another_order(cluster):
    """And other random numbers, as in training; the validation of an epoch repeats that of its sanity check."""
    model, _ = cluster.fit("sequential", "max_size_cycle", max_epochs=1, num_sanity_val_steps=-1)
    sanity, validation = model.batches("sanity"), model.batches("val 0")
    assert sanity == validation
    short = [index for batch in validation for index in batch["b"]]
    assert sorted(short[:9]) == sorted(short[9:]) == list(range(SECOND, SECOND + 9))
    assert short[:9] != short[9:]


@pytest.mark.parametrize(
    ("limit", "num_train", "num_test"),
    [(0.5, 3, 1), widening(2, 2, 2), widening(1, 1, 1), widening(1.0, 6, 2)],
    ids=str,
)
def test_limits_cut_epochs(cluster, limit, num_train, num_test):
    """limit_*_batches as number and as fraction, of training, validation, test and prediction."""
    limits = {f"limit_{stage}_batches": limit for stage in ("train", "val", "test", "predict")}
    model, trainer = cluster.fit("sequential", max_epochs=1, **limits)
    module = cluster.module()
    for run in (trainer.test, trainer.predict, trainer.validate):
        run(model, datamodule=module)
    assert model.indices("train") == list(range(23))[: num_train * BATCH_SIZE]
    for stage, times in (("val 0", 2), ("test", 1), ("predict", 1)):
        assert model.indices(stage) == list(range(7))[: num_test * BATCH_SIZE] * times


@pytest.mark.parametrize("val", ["max_size", widening("max_size_cycle")])
def test_a_fraction_limits_what_loaders_have_together(cluster, val):
    """CombinedLoader: half of the longest loader's batches, and beside them all that the short one has."""
    model, _ = cluster.fit("sequential", val, max_epochs=1, limit_val_batches=0.5)
    batches = model.batches("val 0")
    assert len(batches) == 3
    assert sorted(index for batch in batches for index in batch["b"]) == list(range(SECOND, SECOND + 9))


@pytest.mark.proof
def test_predictions_come_in_order(cluster):
    """Trainer.predict returns a prediction for every sample."""
    cluster.choose()
    predictions = cluster.trainer().predict(Recorder(), datamodule=cluster.module())
    assert torch.cat(predictions).tolist() == list(range(NUM_TEST))


@pytest.mark.parametrize("train", ["shuffled", widening("weighted")])
def test_overfitting_repeats_the_same_batches(cluster, train):
    """overfit_batches: no shuffling, and each epoch has the samples of the one before."""
    model, _ = cluster.fit(train, max_epochs=3, overfit_batches=2)
    epochs = [model.batches("train", epoch) for epoch in range(3)]
    assert len(epochs[0]) == 2
    assert epochs[0] == epochs[1] == epochs[2]
    if train == "shuffled":
        assert epochs[0] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_validation_takes_nothing_away_from_the_training(cluster):
    """The sanity check is a short validation; within an epoch (val_check_interval), training resumes where it was.

    accumulate_grad_batches takes steps of several batches, the last of a shorter one.
    """
    settings = {"num_sanity_val_steps": 1, "val_check_interval": 2, "accumulate_grad_batches": 4}
    model, trainer = cluster.fit("sequential", max_epochs=1, **settings)
    assert model.batches("sanity") == [[0, 1, 2, 3]]
    assert [stage for stage, _, _ in model.seen[1:]] == [*["train"] * 2, *["val 0"] * 2] * 3
    assert model.indices("train") == list(range(23))
    assert model.indices("val 0") == list(range(7)) * 3
    assert trainer.global_step == 2


def test_max_steps_end_in_the_middle(cluster, caplog):
    """The third epoch is cut short, and has its line in the log."""
    caplog.set_level(logging.INFO, "lightning_sm")
    model, trainer = cluster.fit("sequential", max_epochs=-1, max_steps=13)
    assert trainer.global_step == 13
    assert model.indices("train", 2) == [0, 1, 2, 3]
    lines = [message.partition("=")[2] for message in caplog.messages if "data_wait=" in message]
    assert [line.partition(" ")[0] for line in lines] == ["1/?", "2/?", "3/?"]


@pytest.mark.proof
def test_fast_dev_run(cluster):
    """One batch of each."""
    model, _ = cluster.fit("sequential", fast_dev_run=True)
    assert [stage for stage, _, _ in model.seen] == ["train", "val 0"]


class Rings(Callback):
    """Notes how many rings of slots there are at the end of each epoch."""

    def __init__(self):
        self.numbers = []

    def on_train_epoch_end(self, trainer, *_):
        gc.collect()
        self.numbers.append(Path("/proc/self/maps").read_text().count("memfd:lightning_sm"))


def test_reloaded_loaders_are_made_on_the_data_hosts(cluster):
    """reload_dataloaders_every_n_epochs: they see the epoch; a fresh loader has another order, in the same slots."""
    rings = Rings()
    model, _ = cluster.fit(max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=[rings])
    calls = cluster.noted([host.pid for host in cluster.hosts])
    assert sorted(call for call in calls if "train" in call) == sorted(
        [f"train_dataloader {epoch}" for epoch in range(3)] * 2
    )
    epochs = [model.indices("train", epoch) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(rings.numbers) == 3
    assert len(set(rings.numbers)) == 1


@pytest.mark.proof
def test_the_sampler_of_the_user_is_left_alone(cluster):
    """use_distributed_sampler=False."""
    model, _ = cluster.fit("shuffled", max_epochs=1, use_distributed_sampler=False)
    assert sorted(model.indices("train")) == list(range(23))


def test_a_training_step_may_fetch_its_batches_itself(cluster):
    """With a dataloader_iter, no batch is left out."""
    model, _ = cluster.fit("sequential", model=ByHand())
    assert model.indices("train", 0) == model.indices("train", 1) == list(range(23))
