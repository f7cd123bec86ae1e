"""The user's samplers go on from epoch to epoch, may never end, and cannot hang a data host."""

import itertools
import os
import time
from collections import deque

import psutil
import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, TensorDataset

from lightning_sm import DataHost, DataServiceSettings, RemoteDataModule
from lightning_sm.errors import DataSettingsError, DataTimeoutError
from tests.integration.data.cluster import Host, remote, running
from tests.integration.data.numbers import quiet_trainer

pytestmark = pytest.mark.processes

LENGTH = 40


class Taking(Sampler):
    """Takes the next ten of all samples, from an attribute that is no number."""

    def __init__(self, place):
        self.place = place

    def __iter__(self):
        for _ in range(10):
            if isinstance(self.place, deque):
                self.place.rotate(-1)
                yield self.place[-1]
            else:
                yield next(self.place)

    def __len__(self):
        return 10


class Endless(Sampler):
    """Shuffles for ever, as detectron2's sampler does."""

    def __init__(self):
        self.rng = torch.Generator().manual_seed(0)

    def __iter__(self):
        while True:
            yield from torch.randperm(LENGTH, generator=self.rng).tolist()


class Batches(Sampler):
    """Batches of four, for ever, that begin where the last pass has ended."""

    def __init__(self):
        self.numbers = itertools.cycle(range(LENGTH))

    def __iter__(self):
        while True:
            yield [next(self.numbers) for _ in range(4)]


class Stuck(Sampler):
    """Waits for something that never comes, once it has noted in which process."""

    def __init__(self, note):
        self.note = note

    def __iter__(self):
        yield 0
        self.note.write_text(str(os.getpid()))
        self.wait_for_a_lock()

    def wait_for_a_lock(self):
        while True:
            time.sleep(1)


class Data(LightningDataModule):
    """Numbers, with the loaders of a test."""

    def __init__(self, make, make_val=list):
        super().__init__()
        self.make, self.make_val = make, make_val

    def train_dataloader(self):
        return self.make()

    def val_dataloader(self):
        return self.make_val()


class Model(LightningModule):
    """Notes what it is given."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained, self.validated = [], []

    def on_train_epoch_start(self):
        self.trained.append([])

    def training_step(self, batch, batch_idx):
        self.trained[-1] += batch.tolist()
        return self.layer(batch[:, None].float()).sum()

    def validation_step(self, batch, batch_idx):
        self.validated += batch.tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


def fit(folder, data, hosts=(), **options):
    """Train, without data hosts if there are none; the model."""
    model = Model()
    module = RemoteDataModule(data, [host.address for host in hosts]) if hosts else data
    quiet_trainer(folder, **options).fit(model, datamodule=module)
    return model


@pytest.mark.parametrize(
    "make", [lambda: deque(range(LENGTH)), lambda: itertools.cycle(range(LENGTH))], ids=["a deque", "an iterator"]
)
def test_a_sampler_goes_on_where_its_last_pass_ended(pool, tmp_path, make):
    """As locally, on two hosts, wherever the sampler keeps its place."""
    data = Data(lambda: DataLoader(range(LENGTH), 5, sampler=Taking(make())))
    assert fit(tmp_path, data, pool.hosts[:2], max_epochs=4).trained == fit(tmp_path, data, max_epochs=4).trained


def test_a_pass_begins_with_the_state_of_its_epoch(pool):
    """Whatever was requested before: a pass again, one by hand, an earlier epoch, or one after a restart."""
    (host,) = pool.serve(lambda: DataLoader(range(LENGTH), 5, sampler=Taking(itertools.cycle(range(LENGTH)))))[:1]
    with remote([host]) as module:
        loader = module.train_dataloader()
        for epoch in (0, 2, 2, 1, 3):
            loader.set_epoch(epoch)
            assert next(iter(loader)).tolist() == list(range(10 * epoch, 10 * epoch + 5))


@pytest.mark.proof
def test_a_sampler_whose_process_is_killed_goes_on():
    """The next process runs the passes of the earlier epochs again."""
    host = Host("a", lambda: DataLoader(range(LENGTH), 5, sampler=Taking(deque(range(LENGTH)))), workers=1)
    with running(host), remote([host]) as module:
        loader = module.train_dataloader()
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert next(iter(loader)).tolist() == list(range(10 * epoch, 10 * epoch + 5))
            for process in host.workers:  # and the one of the sampler
                process.kill()


@pytest.mark.proof
def test_a_restarted_host_agrees_on_the_state(tmp_path):
    """It runs the passes that it has missed."""
    host = Host("a", lambda: DataLoader(range(LENGTH), 5, sampler=Taking(deque(range(LENGTH)))), workers=1)
    try:
        with remote([host.start()]) as module:
            loader = module.train_dataloader()
            for epoch in range(4):
                if epoch == 2:
                    host.kill()
                    host.start()
                loader.set_epoch(epoch)
                assert next(iter(loader)).tolist() == list(range(10 * epoch, 10 * epoch + 5))
    finally:
        host.close()


@pytest.mark.parametrize("options", [{"limit_train_batches": 5, "max_epochs": 2}, {"max_steps": 7, "max_epochs": 2}])
def test_an_endless_sampler_ends_with_the_trainers_limit(pool, tmp_path, options):
    """It is run no further than the Trainer reads, and gives batches of the same sizes as locally."""
    data = Data(lambda: DataLoader(range(LENGTH), 4, sampler=Endless()), lambda: DataLoader(range(4), 4))
    ours, stock = (fit(tmp_path, data, hosts, **options) for hosts in (pool.hosts[:2], ()))
    assert [len(epoch) for epoch in ours.trained] == [len(epoch) for epoch in stock.trained]
    assert ours.validated == stock.validated
    for epoch in ours.trained:
        assert len(set(epoch)) == min(len(epoch), LENGTH)


def test_an_endless_batch_sampler_goes_on_where_it_was_cut(pool, tmp_path):
    """In training and in validation, as a local one without workers."""

    def make():
        return DataLoader(range(LENGTH), batch_sampler=Batches())

    options = {"limit_train_batches": 3, "limit_val_batches": 2, "max_epochs": 3}
    ours, stock = (fit(tmp_path, Data(make, make), hosts, **options) for hosts in (pool.hosts[:2], ()))
    assert ours.trained == [list(range(12 * epoch, 12 * epoch + 12)) for epoch in range(3)]
    assert [epoch[0] % 4 for epoch in ours.trained] == [epoch[0] % 4 for epoch in stock.trained]
    assert ours.validated == [index % LENGTH for index in range(24)]


def test_an_endless_sampler_without_a_limit_is_an_error(pool, tmp_path):
    """Within seconds, before it takes the host's memory."""
    data = Data(lambda: DataLoader(range(LENGTH), 4, sampler=Endless()))
    with pytest.raises(DataSettingsError, match=r"has yielded 16777216 items .* set limit_train_batches"):
        fit(tmp_path, data, pool.hosts[:1], max_epochs=1)


@pytest.mark.proof
def test_a_sampler_that_hangs_is_an_error_that_says_where(tmp_path):
    """Before the trainer gives up waiting; its process is gone."""
    note = tmp_path / "pid"
    # The shares of this time that the sampler, its process and the trainer get end seconds apart, as these may start
    # seconds late on a busy machine.
    settings = DataServiceSettings(batch_timeout_s=20.0)
    with DataHost(workers=1, settings=settings) as host:
        module = RemoteDataModule(
            Data(lambda: DataLoader(range(LENGTH), 4, sampler=Stuck(note))), [host.address], settings=settings
        )
        module.setup("fit")
        with pytest.raises(DataTimeoutError, match=r"(?s)did not end within 14 s.*in wait_for_a_lock"):
            list(module.train_dataloader())
        assert not psutil.pid_exists(int(note.read_text()))
        module.teardown("fit")


class Normalized(LightningDataModule):
    """The usual split of a dataset of MNIST's size, which setup() normalizes with torch."""

    def setup(self, stage):
        x = torch.randint(0, 256, (60_000, 49)).float()
        self.dataset = TensorDataset((x - x.mean()) / x.std())
        self.part = torch.randperm(60_000).tolist()[:48_000]

    def train_dataloader(self):
        return DataLoader(self.dataset, 4000, sampler=SubsetRandomSampler(self.part))


@pytest.mark.proof
def test_a_setup_that_has_used_all_cores_does_not_hang_the_sampler(monkeypatch):
    """OpenMP's threads, which torch has started in setup(), do not exist in a fork."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    settings = DataServiceSettings(startup_timeout_s=60.0, batch_timeout_s=60.0)
    with DataHost(workers=1, settings=settings) as host:
        module = RemoteDataModule(Normalized(), [host.address], settings=settings)
        module.setup("fit")
        assert sum(len(batch[0]) for batch in module.train_dataloader()) == 48_000
        module.teardown("fit")
