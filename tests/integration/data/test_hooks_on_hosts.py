"""``hooks: data``: data hosts run the hooks of the DataModule, and trainers get loaders without datasets."""

import os
import threading

import pytest
import torch
from pytorch_lightning import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, random_split

from lightning_sm import DataServiceSettings, RemoteDataModule
from lightning_sm.errors import DataHostMismatchError, DataServiceError, DataSettingsError
from tests.fakes.noting_model import NotingModel
from tests.integration.data.cluster import Host, running
from tests.integration.data.datasets import HOST_VARIABLE

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

HOOKS = DataServiceSettings(hooks="data")


class OpenFile:
    """An open file, as libraries have them, which cannot be pickled."""

    def __init__(self, path):
        self.descriptor = os.open(path, os.O_RDONLY)

    def __getitem__(self, index):
        return os.pread(self.descriptor, 1, index)[0]

    def __reduce__(self):
        raise TypeError("an open file cannot be pickled")

    def __del__(self):
        os.close(self.descriptor)


class Rows(Dataset):
    """Rows of an open file."""

    def __init__(self, path, datamodule):
        self.file, self.datamodule = OpenFile(path), datamodule

    def __len__(self):
        return 37

    def __getitem__(self, index):
        return torch.tensor([self.file[index], self.datamodule.trainer.current_epoch])


class Shuffled(Sampler):
    """A sampler with a generator, which trainers run."""

    def __init__(self, dataset):
        self.dataset, self.generator = dataset, torch.Generator().manual_seed(5)

    def __iter__(self):
        return iter(torch.randperm(len(self.dataset), generator=self.generator).tolist())

    def __len__(self):
        return len(self.dataset)


class Letters(IterableDataset):
    """A stream with random numbers."""

    def __init__(self, path):
        self.file = OpenFile(path)

    def __iter__(self):
        for offset in range(6):
            yield torch.tensor([self.file[offset], torch.rand(()).item()])


class Data(LightningDataModule):
    """A typical DataModule; its callers change ``step``."""

    def __init__(self, path):
        super().__init__()
        self.path, self.step, self.train_set, self.hooks = path, 1, None, []

    def prepare_data(self):
        self.path.write_bytes(bytes(range(37)))

    def setup(self, stage):
        self.hooks.append(f"setup {stage}")
        self.rows = Rows(self.path, self)
        self.train_set, self.val_set = random_split(self.rows, [30, 7])
        self.names, self.weights = {"a": [1]}, torch.rand(3)
        self.large = torch.zeros(100_000)

    def teardown(self, stage):
        self.hooks.append(f"teardown {stage}")

    def collate(self, samples):
        return self.step * torch.stack(samples)

    def train_dataloader(self):
        self.hooks.append("train")
        own = DataLoader(self.train_set, 4, sampler=Shuffled(self.train_set), collate_fn=self.collate)
        return {"rows": own, "letters": DataLoader(Letters(self.path), 2, num_workers=1)}

    def val_dataloader(self):
        return [DataLoader(self.val_set, 4), DataLoader(self.rows, 10)]


class Model(NotingModel):
    """Records its batches, and a random number after each."""

    def training_step(self, batch, batch_idx):
        self.seen.append([*(value.tolist() for value in batch.values()), torch.rand(()).item()])
        return self.loss()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append(batch.tolist())

    def on_train_epoch_end(self):
        self.trainer.datamodule.step += 1


def trainer(**settings):
    """Return a Trainer that writes nothing."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", enable_checkpointing=False, **{"max_epochs": 2, **quiet, **settings})


def a_run(datamodule):
    """Fit twice, validate, and return what was seen."""
    seed_everything(3, verbose=False)
    model = Model()
    own = trainer(reload_dataloaders_every_n_epochs=1)
    own.fit(model, datamodule)
    own.validate(model, datamodule, verbose=False)
    trainer(max_epochs=1).fit(model, datamodule)
    attributes = [datamodule.names, datamodule.weights.tolist(), len(datamodule.train_set), datamodule.step]
    return [*model.seen, *attributes, datamodule.hooks]


@pytest.fixture
def hosts(pool):
    """Two data hosts."""
    return pool.hosts[:2]


def remote(hosts, datamodule, settings=HOOKS):
    """Return a DataModule whose hooks run on data hosts."""
    return RemoteDataModule(datamodule, [host.address for host in hosts], settings=settings)


def test_a_run_is_that_of_stock_lightning(hosts, tmp_path):
    """Datasets that cannot be pickled change no batch, order, random number, epoch, attribute or hook."""
    stock = a_run(Data(tmp_path / "stock"))
    assert a_run(remote(hosts, Data(tmp_path / "remote"))) == stock


def test_trainers_say_what_they_lack(hosts, tmp_path):
    """The error names the attribute, where it is, and both remedies."""
    data = remote(hosts, Data(tmp_path / "rows"))
    trainer(max_epochs=1).fit(Model(), data)
    for read in (lambda: data.large, lambda: data.rows.file, lambda: data.train_set[0]):
        with pytest.raises(AttributeError, match=r"(?s)on the data hosts.*attribute.*data_service.hooks=trainers"):
            read()
    with pytest.raises(AttributeError, match=r"level cannot be set on a trainer.*data_service.hooks=trainers"):
        data.train_set.level = 1
    with pytest.raises(AttributeError, match="'Data' object has no attribute 'nothing'"):
        _ = data.nothing
    data.close()


class Shared(Data):
    """A DataModule whose sampler holds it and the Trainer."""

    def train_dataloader(self):
        sampler = Shuffled(self.train_set)
        sampler.owners = self, self.trainer
        return {"rows": DataLoader(self.train_set, 4, sampler=sampler)}


def test_samplers_see_the_datamodule_and_the_trainer_of_the_rank(hosts, tmp_path):
    """Samplers hold the rank's DataModule and Trainer, not copies, so they see the current epoch."""
    data, own = remote(hosts, Shared(tmp_path / "rows")), trainer(max_epochs=1)
    own.fit(Model(), data)
    assert own.train_dataloader["rows"].sampler.owners == (data, own)


class ByHost(Data):
    """A DataModule whose data differ between hosts."""

    def setup(self, stage):
        self.rows = [f"{index}-{os.environ[HOST_VARIABLE]}" for index in range(5)]

    def train_dataloader(self):
        dataset = Listed()
        dataset.files = self.rows
        return DataLoader(dataset, 2)


class Listed(Dataset):
    """A dataset of files."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.tensor(index)


def test_hosts_with_other_files_are_an_error(hosts, tmp_path):
    """Lists of the same length with other files raise an error that names both hosts and the list."""
    data = remote(hosts, ByHost(tmp_path / "rows"))
    with pytest.raises(DataHostMismatchError, match=r"(?s)dataset.files: 5 items.*sort") as caught:
        trainer(max_epochs=-1, limit_val_batches=0).fit(Silent(), data)  # run until the second host has answered
    assert all(host.address in str(caught.value) for host in hosts)


class Silent(Model):
    """Records nothing."""

    def training_step(self, batch, batch_idx):
        return self.loss()

    def on_train_epoch_end(self):
        pass


class ByRank(Data):
    """A DataModule that splits its data by rank."""

    def train_dataloader(self):
        ranks = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(list(range(8))[ranks[0] :: ranks[1]], 2)


class Distributed(Data):
    """A DataModule that leaves the split to torch's sampler."""

    def train_dataloader(self):
        sampler = DistributedSampler(self.rows, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(self.rows, 2, sampler=sampler)


def test_a_hook_that_splits_by_rank_is_an_error(hosts, tmp_path, monkeypatch):
    """A hook runs once for all ranks, so it cannot split by rank. A DistributedSampler gets each trainer's rank."""
    own = trainer(max_epochs=1)
    monkeypatch.setattr(type(own), "world_size", 2)
    for kind in (ByRank, Distributed):
        data = remote(hosts, kind(tmp_path / "rows"))
        data.trainer = own
        data.setup("fit")
        if kind is ByRank:
            with pytest.raises(DataSettingsError, match=r"global_rank .*test_hooks_on_hosts.py:\d+.*world_size=2"):
                data.train_dataloader()
        else:
            monkeypatch.setattr(type(own), "global_rank", 1)
            loader = data.train_dataloader()
            assert (loader.sampler.rank, loader.sampler.num_replicas) == (1, 2)
        data.close()


class Failing(Data):
    """A DataModule whose hook fails."""

    def setup(self, stage):
        raise FileNotFoundError("no such channel")


def test_the_error_of_a_hook_arrives(hosts, tmp_path):
    """A hook's error arrives with the hook, the host and the traceback."""
    with pytest.raises(DataServiceError, match=r"(?s)no such channel.*setup\('fit'\).*raise FileNotFoundError"):
        trainer().fit(Model(), remote(hosts, Failing(tmp_path / "rows")))


def test_a_data_module_that_cannot_be_pickled_is_an_error(hosts, tmp_path):
    """The error names the attribute and where to create it."""
    data = Data(tmp_path / "rows")
    data.lock = threading.Lock()
    with pytest.raises(DataSettingsError, match=r"Data\.lock is a lock.*Create what cannot be pickled in setup"):
        trainer().fit(Model(), remote(hosts, data))


class Counted(Data):
    """Records in a file which hooks have run on which host."""

    def _note(self, hook):
        with self.path.with_suffix(".hooks").open("a") as file:
            file.write(f"{os.environ.get(HOST_VARIABLE)} {hook}\n")

    def prepare_data(self):
        super().prepare_data()
        self._note("prepare_data")

    def setup(self, stage):
        super().setup(stage)
        self._note("setup")


class Unchanged(Counted):
    """A DataModule whose loader hooks change no attribute."""

    def train_dataloader(self):
        loaders = super().train_dataloader()
        self.hooks.pop()
        return loaders


class Killing(Model):
    """Doubles the rows after the first epoch, and kills and restarts a data host in the last one."""

    def __init__(self, host=None):
        super().__init__()
        self.host = host

    def training_step(self, batch, batch_idx):
        if self.host is not None and batch_idx == 1 and self.current_epoch == 4:
            self.host.kill()
            self.host.start()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.trainer.datamodule.step = 2


def test_a_host_that_comes_back_runs_the_hooks_again(tmp_path):
    """A restarted host recreates all that an iterator needs, attributes set long ago included: the run is the same."""

    def seen(model, data):
        seed_everything(3, verbose=False)
        trainer(reload_dataloaders_every_n_epochs=1, max_epochs=5).fit(model, data)
        return model.seen

    stock = seen(Killing(), Unchanged(tmp_path / "stock"))
    with running(Host("a")) as (host,):
        assert seen(Killing(host), remote([host], Unchanged(tmp_path / "rows"))) == stock
    hooks = (tmp_path / "rows.hooks").read_text().splitlines()
    assert hooks == 2 * ["a prepare_data", "a setup"]


@pytest.mark.matrix(rows=["False"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_prepare_data_runs_on_each_host_or_on_one(hosts, tmp_path, everywhere):
    """``prepare_data_per_node`` decides: on a shared disk, two hosts would write the same files."""
    data = Counted(tmp_path / "rows")
    data.prepare_data_per_node = everywhere
    data = remote(hosts, data)
    trainer(max_epochs=1).fit(Model(), data)
    hooks = (tmp_path / "rows.hooks").read_text().splitlines()
    assert sorted(set(hooks)) == ["a prepare_data", "a setup", *["b prepare_data"] * everywhere, "b setup"]
    data.close()
