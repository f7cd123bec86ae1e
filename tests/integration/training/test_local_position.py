"""Resuming with local loaders: no sample is lost or repeated, and the order matches an uninterrupted run."""

import itertools
import random

import numpy as np
import pytest
import torch
from pytorch_lightning import seed_everything
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_sm._lightning import ModelCheckpoint
from lightning_sm.training.checkpoints.find_newest import newest_checkpoint
from tests.integration.interrupted_fits import (
    BATCH_SIZE,
    MOMENTS,
    NUM_STEPS,
    NUM_TRAIN,
    Interrupt,
    Model,
    fit,
    is_interrupted,
    points,
    resumed,
    successor_of,
    whole,
)

pytestmark = pytest.mark.usefixtures("restored_signals")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Events that models record when trained without interruption, by class."""
    trained = {}

    def events(cls):
        if cls not in trained:
            fit(tmp_path_factory.mktemp("reference"), model := cls())
            trained[cls] = model.events
        return trained[cls]

    return events


class Shuffled(Model):
    """Random sample order, dropout, and noise that the loader draws."""

    workers = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((torch.nn.functional.dropout(x, 0.2), y), batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.line(batch[0]).mean())

    def train_dataloader(self):
        collate = noisy if self.workers == 0 else None
        return DataLoader(points(), batch_size=BATCH_SIZE, shuffle=True, num_workers=self.workers, collate_fn=collate)


class ShuffledInWorkers(Shuffled):
    """Random sample order and dropout, with workers and without noise."""

    workers = 1


class PersistentWorkers(Model):
    """Workers that persist across epochs."""

    def train_dataloader(self):
        return DataLoader(points(), BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True)


class OwnGenerator(Model):
    """An order that is drawn from the loader's own generator."""

    def train_dataloader(self):
        return DataLoader(points(), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(5))


class Distributed(Model):
    """Rank 0 of two, with an order that depends on the epoch."""

    workers = 0

    def train_dataloader(self):
        dataset = points()
        sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
        return DataLoader(dataset, BATCH_SIZE // 2, sampler=sampler, num_workers=self.workers)


class DistributedInWorkers(Distributed):
    """Rank 0 of two, with workers, whose order is drawn when a pass begins."""

    workers = 1


class TwoLoaders(Model):
    """Two shuffled loaders, the shorter of which restarts within an epoch; hooks draw random numbers."""

    def training_step(self, batch, batch_idx):
        (x, y), (other, _) = batch
        return super().training_step((x[: len(other)] + other[: len(x)], y[: len(other)]), batch_idx)

    def train_dataloader(self):
        return [DataLoader(points(), BATCH_SIZE, shuffle=True), DataLoader(points(), 3 * BATCH_SIZE, shuffle=True)]

    def on_train_epoch_start(self):
        torch.rand(1)


POSITIONED = [
    Shuffled,
    ShuffledInWorkers,
    PersistentWorkers,
    OwnGenerator,
    Distributed,
    DistributedInWorkers,
    TwoLoaders,
]


def noisy(samples):
    """Collate a batch, and add noise from torch, NumPy and random."""
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.randn(1) + np.random.rand() + random.random(), y


@pytest.mark.matrix
@pytest.mark.parametrize("cls", POSITIONED)
@pytest.mark.parametrize(
    "moment", ["a step's end", "a later step", "the last step of an epoch", "within a validation", "end of an epoch"]
)
def test_random_numbers_resume(tmp_path, uninterrupted, cls, moment):
    """Order, dropout and noise match the uninterrupted run: no sample is repeated or skipped."""
    model = cls()
    assert is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment]))
    assert whole(resumed(tmp_path / "run", model).events) == uninterrupted(cls)


class Eager(Sampler):
    """Draws its order and counts a pass when the pass begins; starting another pass undoes neither."""

    def __init__(self):
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        return iter([(index + self.num_passes) % NUM_TRAIN for index in torch.randperm(NUM_TRAIN).tolist()])

    def __len__(self):
        return NUM_TRAIN


class EagerOrder(Shuffled):
    """The order of an ``Eager`` sampler, with dropout."""

    def train_dataloader(self):
        return DataLoader(points(), BATCH_SIZE, sampler=Eager(), num_workers=self.workers)


class EagerOrderInWorkers(EagerOrder):
    """An ``Eager`` sampler with workers, for which torch begins two passes and reads one."""

    workers = 1


@pytest.mark.parametrize("cls", [*POSITIONED, EagerOrder, EagerOrderInWorkers])
def test_a_run_that_resumes_nothing_is_that_of_stock_lightning(tmp_path, cls):
    """Two fits have the samples, order and random numbers of stock Lightning: no pass begins without being read."""
    events = {}
    for position in (True, False):
        trainer = fit(tmp_path / str(position), model := cls(), position=position)
        events[position] = [*model.events, *fitted_again(trainer, model)]
    assert events[True] == events[False]


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("cls", POSITIONED)
def test_a_run_from_the_end_of_an_epoch_can_be_interrupted(tmp_path, uninterrupted, cls):
    """An epoch that begins with a resumed run has the order of an uninterrupted run, and can itself be resumed."""
    model, saved = trained_for_an_epoch(tmp_path, cls)
    assert whole(interrupted_after(tmp_path, model, saved)) == uninterrupted(cls)


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("cls", POSITIONED)
def test_epochs_of_one_step_have_their_orders(tmp_path, cls):
    """A run interrupted after it fetched the only batch of an epoch resumes with that batch."""
    settings = {"limit_train_batches": 1, "max_epochs": 6}
    fit(tmp_path / "reference", reference := cls(), **settings)
    model = cls()
    assert is_interrupted(tmp_path / "run", model, Interrupt("on_train_batch_start", 3), **settings)
    assert whole(resumed(tmp_path / "run", model, **settings).events) == reference.events


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("cls", POSITIONED)
def test_loaders_that_come_with_the_epoch(tmp_path, cls):
    """With loaders that are recreated for each epoch, a resumed epoch continues in the same order."""
    settings = {"reload_dataloaders_every_n_epochs": 1}
    model, saved = trained_for_an_epoch(tmp_path, cls, **settings)
    reference = successor_of(model)
    fit(tmp_path / "reference", reference, ckpt_path=saved, **settings)
    assert whole(interrupted_after(tmp_path, model, saved, **settings)) == reference.events


def trained_for_an_epoch(folder, cls, **settings):
    """Train for one epoch, and return the model and its checkpoint."""
    at_epoch_ends = ModelCheckpoint(folder / "ends", save_on_train_epoch_end=True)
    fit(folder / "first", model := cls(), at_epoch_ends, **{**settings, "max_epochs": 1})
    return model, at_epoch_ends.best_model_path


def interrupted_after(folder, model, saved, **settings):
    """Resume from a checkpoint, interrupt the run in two epochs, and return the recorded events."""
    for step in (2, NUM_STEPS + 1):
        model = successor_of(model)
        assert is_interrupted(
            folder / "run", model, Interrupt("on_train_batch_start", step), ckpt_path=saved, **settings
        )
        saved = newest_checkpoint(folder / "run").path
    fit(folder / "run", model := successor_of(model), ckpt_path=saved, **settings)
    return model.events


def test_a_loader_is_left_as_it_was(tmp_path):
    """A training loader can be used to predict, for which Lightning makes a new loader from its parts."""
    data, model = DataLoader(points(), BATCH_SIZE, shuffle=True), Model()
    model.train_dataloader = lambda: data
    model.predict_step = lambda batch, batch_idx: model.line(batch[0])
    trainer = fit(tmp_path, model)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert len(trainer.predict(model, data)) == NUM_STEPS


@pytest.mark.parametrize("loads", ["a fit that is at its end", "a test", "a fit that fails before it trains"])
def test_a_later_fit_does_not_go_on_with_what_another_run_has_loaded(tmp_path, loads):
    """A fit without a checkpoint uses the script's random numbers and values, whatever was loaded before."""
    keeps = ModelCheckpoint(tmp_path / "all", monitor="val_loss", mode="max", save_top_k=-1)
    undisturbed = fit(tmp_path / "undisturbed", model := Shuffled(), keeps, max_epochs=1)
    undisturbed.save_checkpoint(at_end := tmp_path / "end.ckpt")
    after_validation = keeps.best_model_path
    seed_everything(7, verbose=False)
    expected = fitted_again(undisturbed, model)

    trainer = fit(tmp_path / "again", model := Shuffled(), ckpt_path=at_end, max_epochs=1)
    if loads == "a test":
        trainer.test(model, model.val_dataloader(), ckpt_path=after_validation, verbose=False)
    elif loads == "a fit that fails before it trains":
        model.train_dataloader = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            trainer.fit(model, ckpt_path=after_validation)
        del model.train_dataloader
    seed_everything(7, verbose=False)
    assert fitted_again(trainer, model) == expected


@pytest.mark.parametrize("own", [False, True], ids=["of the process", "of a generator of the loader's own"])
def test_a_fit_that_is_at_its_end_leaves_the_random_numbers_of_its_end(tmp_path, own):
    """After a fit that resumes at its end, the next one has the same order as if the first had just trained."""
    events = []
    for ckpt_path in (None, tmp_path / "end.ckpt"):
        generator = torch.Generator().manual_seed(5) if own else None
        data, model = DataLoader(points(), BATCH_SIZE, shuffle=True, generator=generator), Model()
        model.train_dataloader = lambda data=data: data
        trainer = fit(tmp_path / str(ckpt_path is None), model, ckpt_path=ckpt_path, max_epochs=1)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        events.append(fitted_again(trainer, model))
    assert events[0] == events[1]


def fitted_again(trainer, model):
    """Train for one more epoch, and return the events that the model records."""
    model.events = []
    model.on_train_start = lambda: model.events.append(("has", sorted(trainer.callback_metrics)))
    trainer.fit_loop.max_epochs += 1
    trainer.fit(model)
    assert len(model.events) > NUM_STEPS
    return model.events


class Stateful(DataLoader):
    """A loader that saves its position, as torchdata's does."""

    num_given = num_left_out = 0

    def __iter__(self):
        self.num_given, self.num_left_out = self.num_left_out, 0
        batches = super().__iter__()
        for _ in range(self.num_given):
            next(batches)
        return map(self.counted, batches)

    def counted(self, batch):
        self.num_given += 1
        return batch

    def state_dict(self):
        return {"num_given": self.num_given}

    def load_state_dict(self, state):
        self.num_left_out = state["num_given"]


class KeepsPlace(Shuffled):
    """A loader that saves its position, with noise in its batches."""

    def train_dataloader(self):
        return Stateful(points(), batch_size=BATCH_SIZE, collate_fn=noisy)


class AsksForSteps(KeepsPlace):
    """A model that makes Lightning read from the loader before it restores its progress."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class KeepsPlaceInStream(Model):
    """A stream of unknown length, from which Lightning fetches a batch ahead."""

    def train_dataloader(self):
        return Stateful(Stream(points()), batch_size=BATCH_SIZE)


class KeepsPlaceBesideOther(TwoLoaders):
    """A loader that saves its position, beside a shuffled one that does not."""

    def train_dataloader(self):
        return [Stateful(points(), BATCH_SIZE), DataLoader(points(), BATCH_SIZE, shuffle=True)]


class Stream(IterableDataset):
    """An iterable dataset over the given samples."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@pytest.mark.matrix
@pytest.mark.parametrize("cls", [KeepsPlace, KeepsPlaceInStream, KeepsPlaceBesideOther, AsksForSteps])
@pytest.mark.parametrize("moment", ["a step's end", "a later step", "the first step of an epoch"])
def test_loaders_that_keep_their_place_resume(tmp_path, uninterrupted, cls, moment):
    """A batch that was fetched ahead when training stopped is not lost."""
    model = cls()
    assert is_interrupted(tmp_path / "run", model, Interrupt(*MOMENTS[moment]))
    assert whole(resumed(tmp_path / "run", model).events) == uninterrupted(cls)


@pytest.mark.parametrize("cls", [KeepsPlace, KeepsPlaceInStream, KeepsPlaceBesideOther])
def test_a_fit_that_is_at_its_end_needs_no_step_of_loaders_that_keep_their_place(tmp_path, cls):
    """A fit that resumes after its last step, such as an interrupted job's, trains no step, and a later fit does."""
    fit(tmp_path / "first", cls(), max_epochs=1).save_checkpoint(tmp_path / "end.ckpt")
    trainer = fit(tmp_path / "again", model := cls(), ckpt_path=tmp_path / "end.ckpt", max_epochs=1)
    assert trainer.global_step == NUM_STEPS
    assert len(fitted_again(trainer, model)) > NUM_STEPS


class ReadOnce(IterableDataset):
    """A source whose items can be read only once, such as a pipe."""

    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        return itertools.islice(self.items, NUM_TRAIN)


@pytest.mark.parametrize("with_other", [False, True], ids=["alone", "beside a shuffled loader"])
def test_a_stream_is_not_begun_twice(tmp_path, with_other):
    """Training on a source that can be read only once includes its first items."""
    seen, model = [], Model()
    items = itertools.cycle(points())
    stream = DataLoader(ReadOnce((*next(items), number) for number in itertools.count()), BATCH_SIZE)

    def training_step(batch, batch_idx):
        x, y, numbers = batch[0] if with_other else batch
        seen.extend(numbers.tolist())
        return Model.training_step(model, (x, y), batch_idx)

    model.training_step = training_step
    other = DataLoader(points(), BATCH_SIZE, shuffle=True)
    model.train_dataloader = lambda: [stream, other] if with_other else stream
    fit(tmp_path, model, max_epochs=1)
    assert seen == list(range(NUM_TRAIN))
