"""A training resumes in mid-epoch with the next batch, with data hosts and without."""

import itertools
import random

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, seed_everything
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_sm import DataServiceSettings, LocalPosition, RemoteDataModule
from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.remote_trainer import DataHostLoaders
from lightning_sm.errors import ResumeError
from lightning_sm.training.callbacks.mid_epoch import MidEpoch
from tests.integration import interrupted_fits
from tests.integration.data.datasets import Data
from tests.integration.data.numbers import quiet_trainer

# torch warns if a loader has more workers than there are cores.
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

NUM_SAMPLES, BATCH_SIZE = 47, 4
NUM_STEPS = 12


def sample(index, notes):
    """Return a sample with noise, and record in a file that it was read, on whichever host."""
    with open(notes, "ab", buffering=0) as file:
        file.write(b"%d\n" % index)
    return torch.tensor([index, random.random(), np.random.rand(), torch.rand(1).item()], dtype=torch.float64)


class Rows(Dataset):
    """Samples by index."""

    def __init__(self, notes, length=NUM_SAMPLES):
        self.notes, self.length = notes, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return sample(index, self.notes)


class Stream(IterableDataset):
    """A stream that workers share unevenly: the second worker has a third of the samples."""

    def __init__(self, notes):
        self.notes = notes

    def __iter__(self):
        info = get_worker_info()
        for index in range(NUM_SAMPLES):
            if info is None or (index % 3 == 0) == (info.id == 1):
                yield sample(index, self.notes)


LOADERS = {
    "shuffled": lambda notes: DataLoader(Rows(notes), BATCH_SIZE, shuffle=True, num_workers=2),
    "no workers of its own": lambda notes: DataLoader(Rows(notes), BATCH_SIZE, shuffle=True),
    "own generator": lambda notes: DataLoader(
        Rows(notes), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "persistent workers": lambda notes: DataLoader(
        Rows(notes), BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "stream": lambda notes: DataLoader(Stream(notes), BATCH_SIZE, num_workers=2),
    "beside a stream": lambda notes: [
        DataLoader(Rows(notes), 2 * BATCH_SIZE, shuffle=True),
        DataLoader(Stream(notes), BATCH_SIZE, num_workers=2),
    ],
}


class Recorder(LightningModule):
    """Keeps its batches, with noise of the training process, and the samples read by the end of its first epoch."""

    def __init__(self, notes, asks_for_steps=False):
        super().__init__()
        self.asks_for_steps = asks_for_steps
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.notes, self.seen, self.read = notes, {}, None

    def training_step(self, batch, batch_index):
        parts = batch if isinstance(batch, list) else [batch]
        values = [part.tolist() for part in parts]
        self.seen[self.current_epoch, batch_index] = values, torch.rand(1).item()
        return self.weight * 1.0

    def on_train_epoch_end(self):
        if self.read is None:
            self.read = reads(self.notes)

    def configure_optimizers(self):
        assert not self.asks_for_steps or self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveAt(Callback):
    """Saves a checkpoint after each of some steps."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def reads(notes):
    """Return the samples that were read since the notes were removed."""
    return [int(line) for line in notes.read_bytes().split()] if notes.exists() else []


def fit(folder, make, hosts=(), *callbacks, ckpt=None, save_at=(), asks_for_steps=False, max_epochs=2, **trainer):
    """Train, with the loaders on data hosts if there are any, and return the model."""
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    seed_everything(3, verbose=False)
    model = Recorder(notes, asks_for_steps)
    data = Data(lambda: make(notes))
    if hosts:
        data = RemoteDataModule(data, [host.address for host in hosts])
    settings = {"callbacks": [LocalPosition(), SaveAt(folder, save_at), *callbacks], "devices": 1, **trainer}
    trainer = quiet_trainer(folder, max_epochs=max_epochs, **settings)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return model


def after(seen, step):
    """Return what was seen after a number of steps."""
    return dict(list(seen.items())[step:])


def ids(seen):
    """Return the samples without their noise."""
    return {key: [[int(row[0]) for row in part] for part in values] for key, (values, _) in seen.items()}


@pytest.mark.parametrize("loader", LOADERS)
def test_the_rest_of_a_run_is_that_of_an_uninterrupted_one(pool, tmp_path, loader):
    """A run resumes on other data hosts, in any epoch, twice in one, and at its end, and rereads no finished sample."""
    make = LOADERS[loader]
    whole = fit(tmp_path, make, pool.hosts, save_at=(5, NUM_STEPS, NUM_STEPS + 7)).seen
    first = fit(tmp_path, make, pool.hosts[:1], ckpt=tmp_path / "5.ckpt", save_at=(9,))
    assert first.seen == after(whole, 5)
    if "stream" not in loader:
        done = {index for values in ids(dict(list(whole.items())[:5])).values() for index in values[0]}
        assert not done.intersection(first.read)
        assert len(first.read) == NUM_SAMPLES - len(done)
    for step in (9, NUM_STEPS, NUM_STEPS + 7):
        assert fit(tmp_path, make, pool.hosts[1:], ckpt=tmp_path / f"{step}.ckpt").seen == after(whole, step)


def test_a_scheduler_may_ask_for_the_number_of_steps(pool, tmp_path):
    """Asking for the number of steps makes Lightning open the loaders before it restores its progress."""
    make = LOADERS["shuffled"]
    whole = fit(tmp_path, make, pool.hosts, asks_for_steps=True, save_at=(5, NUM_STEPS)).seen
    for step in (5, NUM_STEPS):
        resumed = fit(tmp_path, make, pool.hosts, asks_for_steps=True, ckpt=tmp_path / f"{step}.ckpt")
        assert resumed.seen == after(whole, step)


@pytest.mark.parametrize("begins", ["with data hosts", "without"])
def test_data_hosts_may_come_and_go(pool, tmp_path, begins):
    """A run resumes with the same samples in the same order when data hosts are added or removed."""
    make = LOADERS["shuffled"]
    turns = [pool.hosts, (), pool.hosts] if begins == "with data hosts" else [(), pool.hosts, ()]
    whole = ids(fit(tmp_path, make, turns[0], save_at=(5,)).seen)
    second = fit(tmp_path, make, turns[1], ckpt=tmp_path / "5.ckpt", save_at=(9,))
    assert ids(second.seen) == after(whole, 5)
    assert ids(fit(tmp_path, make, turns[2], ckpt=tmp_path / "9.ckpt").seen) == after(whole, 9)


class Curriculum(Rows):
    """Samples that depend on an epoch, which a callback sets."""

    epoch = 0

    def __getitem__(self, index):
        return super().__getitem__(index) + 100 * self.epoch


class SetEpoch(Callback):
    """Sets the epoch of the dataset."""

    def on_train_epoch_start(self, trainer, model):
        trainer.train_dataloader.dataset.epoch = trainer.current_epoch


@pytest.mark.parametrize("are_remote", [True, False])
def test_the_epoch_that_a_callback_sets_reaches_a_resumed_epoch(pool, tmp_path, are_remote):
    """Workers get the dataset after ``on_train_epoch_start``, as in an uninterrupted run."""
    make = lambda notes: DataLoader(Curriculum(notes), BATCH_SIZE, shuffle=True, num_workers=2)  # noqa: E731
    hosts, step = pool.hosts if are_remote else (), NUM_STEPS + 7
    whole = fit(tmp_path, make, hosts, MidEpoch(), SetEpoch(), save_at=(step,), max_epochs=3)
    resumed = fit(tmp_path, make, hosts, MidEpoch(), SetEpoch(), ckpt=tmp_path / f"{step}.ckpt", max_epochs=3)
    assert ids(resumed.seen) == after(ids(whole.seen), step)
    assert min(index for (epoch, _), (part,) in ids(whole.seen).items() for index in part if epoch == 1) >= 100
    drawn = [{key: number for key, (_, number) in one.seen.items()} for one in (whole, resumed)]
    assert drawn[1] == after(drawn[0], step)


def test_a_stream_without_data_hosts_begins_again(pool, tmp_path, caplog):
    """Without data hosts, a stream restarts from its first batch, and the log reports it."""
    whole = fit(tmp_path, LOADERS["stream"], pool.hosts, save_at=(5,), max_epochs=1)
    again = fit(tmp_path, LOADERS["stream"], ckpt=tmp_path / "5.ckpt", max_epochs=1)
    assert ids(again.seen)[0, 5] == ids(whole.seen)[0, 0]
    assert "after batch 5 of the epoch, but Stream restarts from the first batch" in caplog.text


def test_a_loader_beside_a_stream_goes_on_without_data_hosts(tmp_path, caplog):
    """The loader beside a stream resumes, although Lightning fetches a batch from both before any hook."""
    make = LOADERS["beside a stream"]
    whole = ids(fit(tmp_path, make, save_at=(5,), max_epochs=1).seen)
    again = ids(fit(tmp_path, make, ckpt=tmp_path / "5.ckpt", max_epochs=1).seen)
    assert again[0, 5] == [whole[0, 5][0], whole[0, 0][1]]
    assert "Stream restarts" in caplog.text
    assert "Rows restarts" not in caplog.text


def test_a_stream_needs_the_workers_that_have_read_it(pool, tmp_path):
    """A stream resumed with another number of workers raises an error."""
    fit(tmp_path, LOADERS["stream"], pool.hosts, save_at=(5,), max_epochs=1)
    other = lambda notes: DataLoader(Stream(notes), BATCH_SIZE, num_workers=1)  # noqa: E731
    with pytest.raises(ResumeError, match=r"on 1 rank with num_workers=2 .* this run has 1 rank with num_workers=1"):
        fit(tmp_path, other, pool.hosts, ckpt=tmp_path / "5.ckpt")


class Writes(Callback):
    """Writes what its rank, a forked process, has seen to a file."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, model):
        torch.save(model.seen, self.folder / f"rank-{trainer.global_rank}")


def on_ranks(number, folder, make, hosts=(), **settings):
    """Train an epoch on ranks that are forked from this process, and return what each has seen."""
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    fit(folder, make, hosts, Writes(folder), max_epochs=1, devices=number, strategy=strategy, **settings)
    return [torch.load(folder / f"rank-{rank}") for rank in range(number)]


def together(ranks):
    """Return the samples of each step, of all ranks together."""
    seen = [ids(rank) for rank in ranks]
    return {key: [index for rank in seen for index in rank[key][0]] for key in seen[0]}


@pytest.mark.parametrize("loader", ["shuffled", "stream"])
def test_each_rank_goes_on_with_its_own_random_numbers(pool, tmp_path, loader):
    """Random numbers differ between ranks, except in a stream, as with local workers."""
    make = LOADERS[loader]
    whole = on_ranks(2, tmp_path, make, pool.hosts, save_at=(3,))
    assert on_ranks(2, tmp_path, make, pool.hosts[1:], ckpt=tmp_path / "3.ckpt") == [after(one, 3) for one in whole]
    assert (whole[0] == whole[1]) == (loader == "stream")


def test_an_epoch_goes_on_with_other_ranks(pool, tmp_path):
    """Each sample is trained on once, or again if the batches of a step do not fit."""
    make = lambda notes: DataLoader(Rows(notes, 48), BATCH_SIZE, shuffle=True)  # noqa: E731
    two = together(on_ranks(2, tmp_path, make, save_at=(2,)))
    one = together(on_ranks(1, tmp_path, make, pool.hosts, ckpt=tmp_path / "2.ckpt", save_at=(6, 7)))
    assert list(one) == [(0, number) for number in range(4, 12)]
    three = together(on_ranks(3, tmp_path, make, pool.hosts, ckpt=tmp_path / "7.ckpt"))
    assert list(three) == [(0, 3)]
    steps = [*two.values()][:2] + [*one.values()][:5] + [*three.values()]
    assert sorted(itertools.chain(*steps)) == list(range(48))
    # Resume after 32 samples: three ranks train on 12 samples a step, so they repeat the last 8.
    repeated = together(on_ranks(3, tmp_path, make, ckpt=tmp_path / "6.ckpt"))
    assert sorted(repeated[0, 2]) == sorted(itertools.chain(*[*one.values()][2:5]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_ranks": 2}, "on 2 ranks with RandomSampler, but this run has 1 rank with RandomSampler"),
        ({"is_split": True, "sampler": "DistributedSampler"}, "1 rank with DistributedSampler, but .* RandomSampler"),
    ],
)
def test_an_order_of_other_ranks_is_an_error(tmp_path, changes, text):
    """In mid-epoch, another order is an error unless a DistributedSampler made it; between epochs, it is accepted."""
    make = LOADERS["no workers of its own"]
    fit(tmp_path, make, save_at=(5, NUM_STEPS), max_epochs=1)
    for step in (5, NUM_STEPS):
        checkpoint = torch.load(path := tmp_path / f"{step}.ckpt", weights_only=True)
        checkpoint["lightning_sm.random_states"]["shares"][0].update(changes)
        torch.save(checkpoint, path)
    with pytest.raises(ResumeError, match=text):
        fit(tmp_path, make, ckpt=tmp_path / "5.ckpt")
    assert len(fit(tmp_path, make, ckpt=tmp_path / f"{NUM_STEPS}.ckpt").seen) == NUM_STEPS


class Noise(Dataset):
    """The points of a model with noise."""

    def __init__(self):
        self.points = interrupted_fits.points()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        x, y = self.points[index]
        return x + torch.rand(1), y


class NoisyStream(IterableDataset):
    """The same points as a stream, with a second worker that has fewer of them."""

    def __iter__(self):
        rows, number = Noise(), get_worker_info().id
        return (rows[index] for index in range(len(rows)) if (index % 3 == 0) == (number == 1))


class Indexed(interrupted_fits.Model):
    """A model whose batches have noise from data hosts."""

    def train_dataloader(self):
        return DataLoader(Noise(), interrupted_fits.BATCH_SIZE, shuffle=True, num_workers=2)


class Streamed(interrupted_fits.Model):
    """The same model with a stream."""

    def train_dataloader(self):
        return DataLoader(NoisyStream(), interrupted_fits.BATCH_SIZE, num_workers=2)


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize("cls", [Indexed, Streamed])
def test_an_interrupted_run_resumes(pool, tmp_path, cls):
    """A run interrupted at any moment resumes without losing a batch that was fetched."""

    def on_hosts():
        connection = ServiceConnection([host.address for host in pool.hosts], DataServiceSettings(), LOCAL_JOB)
        return [DataHostLoaders(connection)]

    interrupted_fits.fit(tmp_path / "reference", reference := cls(), *on_hosts())
    for moment in ("a later step", "the first step of an epoch", "within a validation"):
        model, folder = cls(), tmp_path / moment
        interrupt = interrupted_fits.Interrupt(*interrupted_fits.MOMENTS[moment])
        assert interrupted_fits.is_interrupted(folder, model, interrupt, *on_hosts())
        resumed = interrupted_fits.resumed(folder, model, *on_hosts())
        assert interrupted_fits.whole(resumed.events) == reference.events
