"""What crosses between the DataModule on a trainer and those on the data hosts."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.callbacks import BasePredictionWriter, BatchSizeFinder
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, get_worker_info

from lightning_sm import DataHost, RemoteDataModule
from lightning_sm.errors import DataSettingsError
from tests.integration.data.cluster import until_up
from tests.integration.data.numbers import quiet_trainer

pytestmark = pytest.mark.processes


class Endless(IterableDataset):
    """A dataset without length."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id if info else 0, 4, info.num_workers if info else 1))


class Sized(Endless):
    """The same with a length."""

    def __len__(self):
        return 10


class Data(LightningDataModule):
    """Loaders over as many numbers as its stage says, and a journal of what runs where.

    Args:
        journal: File for the journal.
    """

    def __init__(self, journal):
        super().__init__()
        self.journal = journal
        self.train_set = None
        self.num_classes = None
        self.stage = 1

    def note(self, what):
        with self.journal.open("a") as file:
            file.write(f"{os.getpid()} {what}\n")

    def prepare_data(self):
        self.note("prepare_data")

    def setup(self, stage=None):
        self.note(f"setup {stage}")
        self.train_set = torch.arange(12)
        self.num_classes = 3

    def train_dataloader(self):
        return DataLoader(self.train_set[: 4 * self.stage], batch_size=2, num_workers=3, drop_last=True)

    def val_dataloader(self):
        return [DataLoader(Endless()), DataLoader(range(3), sampler=WeightedRandomSampler([1.0] * 3, 9))]

    def test_dataloader(self):
        return [DataLoader(range(300), batch_size=2), DataLoader(range(100, 400), batch_size=2)]

    def predict_dataloader(self):
        return [
            DataLoader(range(7), batch_size=3, drop_last=True),
            DataLoader(range(7), batch_size=3, sampler=list(range(6, -1, -1))),
            DataLoader(Endless(), batch_size=1),
        ]

    def state_dict(self):
        return {"stage": self.stage}

    def load_state_dict(self, state_dict):
        self.stage = state_dict["stage"]


class Shared(Data):
    """Its data lies in a file system that all hosts share."""

    def __init__(self, journal):
        super().__init__(journal)
        self.prepare_data_per_node = False


class Model(LightningModule):
    """Notes what it is trained on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch.tolist()))
        return self.weight * 1.0

    def on_train_epoch_end(self):
        self.trainer.datamodule.stage = 2  # noted in the next checkpoint

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """File for the journal of what the tests share."""
    return tmp_path_factory.mktemp("hooks") / "journal"


@pytest.fixture(scope="module")
def address(journal):
    """A data host that serves ``Data``."""
    with DataHost(workers=2) as host:
        yield host.address


@pytest.fixture
def module(address, journal):
    """The DataModule of a trainer that fits without a Trainer."""
    module = RemoteDataModule(Data(journal), [address])
    module.setup("fit")
    yield module
    module.teardown("fit")


@pytest.mark.parametrize(("data", "num_calls"), [pytest.param(Data, 2, marks=pytest.mark.proof), (Shared, 1)])
def test_prepare_data_runs_where_the_datamodule_says(data, num_calls, tmp_path):
    """On every data host, or with prepare_data_per_node=False on one, before any other runs setup()."""
    journal = tmp_path / "journal"
    with ExitStack() as stack:
        addresses = [stack.enter_context(DataHost(workers=1)).address for _ in range(2)]
        module = RemoteDataModule(data(journal), addresses)
        module.setup()
        until_up(module)
        module.train_dataloader()
        module.teardown("fit")
    lines = [line.split(maxsplit=1) for line in journal.read_text().splitlines()]
    assert len([process for process, what in lines if what == "prepare_data"]) == num_calls
    assert len({process for process, what in lines if what == "setup fit"}) == 2
    assert lines[0][1] == "prepare_data"


def test_a_resumed_datamodule_has_its_state_on_the_data_hosts_as_well(tmp_path):
    """A curriculum goes on at its stage: the loaders of the second run are those of the second stage."""
    journal = tmp_path / "journal"
    with DataHost(workers=1) as host:
        first, second = Model(), Model()
        trainer = quiet_trainer(tmp_path, max_epochs=1, limit_val_batches=0)
        trainer.fit(first, datamodule=RemoteDataModule(Data(journal), [host.address]))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        trainer = quiet_trainer(tmp_path, max_epochs=2, limit_val_batches=0)
        module = RemoteDataModule(Data(journal), [host.address])
        trainer.fit(second, datamodule=module, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert first.seen == [(0, [0, 1]), (0, [2, 3])]
    assert second.seen == [(1, [number, number + 1]) for number in (0, 2, 4, 6)]


class Level(LightningDataModule):
    """The collate function reads what the model sets."""

    def __init__(self):
        super().__init__()
        self.stage = 0

    def collate(self, samples):
        return torch.tensor([self.stage for _ in samples])

    def train_dataloader(self):
        return DataLoader(range(4), batch_size=2, collate_fn=self.collate)


@pytest.mark.parametrize("every", [0, 1])
def test_an_attribute_that_the_model_changes_is_sent_with_the_next_loaders_or_told(address, every, tmp_path, caplog):
    """Local workers, which start with each epoch, would see it."""
    model = Model()
    trainer = quiet_trainer(tmp_path, max_epochs=3, limit_val_batches=0, reload_dataloaders_every_n_epochs=every)
    trainer.fit(model, datamodule=RemoteDataModule(Level(), [address]))
    stages = [stage for _, (stage, _) in model.seen]
    assert stages == ([0, 0, 2, 2, 2, 2] if every else [0] * 6)
    told = "The attribute stage of Level has changed since train_dataloader() was called."
    assert caplog.text.count(told) == (0 if every else 1)


def test_what_setup_makes_on_the_data_hosts_is_not_none_on_the_trainer(address, journal):
    """A dataset stays there, and who asks for it is told so; a number is copied."""
    module = RemoteDataModule(Data(journal), [address])
    assert module.train_set is None
    module.setup("fit")
    assert module.num_classes == 3
    with pytest.raises(AttributeError, match=r"Data has no attribute 'train_set' on a trainer\. .*setup\(\)"):
        _ = module.train_set
    module.teardown("fit")


def test_callbacks_read_what_a_loader_is_like(module):
    """Lengths and numbers of the user's loader; what a trainer does not have is an error that says where it is."""
    loader = module.train_dataloader()
    stream, weighted = module.val_dataloader()
    assert (len(loader.dataset), loader.num_workers, loader.drop_last, loader.batch_size) == (4, 3, True, 2)
    assert (len(weighted.dataset), len(weighted)) == (3, 9)
    with pytest.raises(TypeError, match="has no length"):
        len(stream.dataset)
    with pytest.raises(AttributeError, match=r"'classes'.* is on the data hosts"):
        _ = loader.dataset.classes
    with pytest.raises(AttributeError, match=r"'collate_fn'\. The DataLoader is on the data hosts"):
        _ = loader.collate_fn


def test_what_would_change_nothing_is_an_error(module):
    """To set attributes of dataset and loader in a training process would be lost without a word."""
    loader = module.train_dataloader()
    with pytest.raises(AttributeError, match=r"'level' cannot be set: .* is on the data hosts.*reload_dataloaders"):
        loader.dataset.level = 2
    with pytest.raises(TypeError, match=r"no sample 0 here: .* is on the data hosts"):
        _ = loader.dataset[0]
    for name in ("collate_fn", "sampler", "batch_size"):
        with pytest.raises(AttributeError, match=name):
            setattr(loader, name, None)


def test_two_threads_may_read_two_loaders(module):
    """Each gets its own batches."""
    with ThreadPoolExecutor(2) as pool:
        read = [pool.submit(list, loader) for loader in module.test_dataloader()]
    numbers = [[number for batch in one.result() for number in batch.tolist()] for one in read]
    assert numbers == [list(range(300)), list(range(100, 400))]


def test_overfitting_replaces_a_sampler_as_lightning_does(tmp_path):
    """overfit_batches: the order of the dataset, and not what a weighted sampler chooses."""

    class Weighted(Data):
        def train_dataloader(self):
            return DataLoader(range(8), batch_size=2, sampler=WeightedRandomSampler([1.0] * 8, 20))

    journal = tmp_path / "journal"
    options = {"max_epochs": 2, "overfit_batches": 2, "limit_val_batches": 0}
    stock, ours = Model(), Model()
    quiet_trainer(tmp_path, **options).fit(stock, datamodule=Weighted(journal))
    with DataHost(workers=1) as host:
        quiet_trainer(tmp_path, **options).fit(ours, datamodule=RemoteDataModule(Weighted(journal), [host.address]))
    assert ours.seen == stock.seen == [(epoch, batch) for epoch in (0, 1) for batch in ([0, 1], [2, 3])]


def test_a_length_that_cannot_be_used_is_told(tmp_path, caplog):
    """The shards of an iterable dataset may give more batches than its length says; the warning has the way out."""

    class Streamed(Data):
        def train_dataloader(self):
            return DataLoader(Sized(), batch_size=4)

    with DataHost(workers=1) as host:
        module = RemoteDataModule(Streamed(tmp_path / "journal"), [host.address])
        module.setup("fit")
        with pytest.raises(TypeError, match="has no length"):
            len(module.train_dataloader())
        module.teardown("fit")
    assert "len() of its dataset is 10" in caplog.text
    assert "set data_service.batches_per_epoch=3" in caplog.text


def test_a_batch_size_that_cannot_be_found_here_is_an_error(address, journal, tmp_path):
    """BatchSizeFinder would measure batches that were built ahead, with the batch size of an earlier trial."""
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[BatchSizeFinder()])
    with pytest.raises(DataSettingsError, match="BatchSizeFinder changes the batch size between steps"):
        trainer.fit(Model(), datamodule=RemoteDataModule(Data(journal), [address]))


class Writer(BasePredictionWriter):
    """Notes what it is told to write."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((batch.tolist(), batch_indices))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append(batch_indices)


def test_a_prediction_writer_gets_the_indices_of_the_samples(address, journal, tmp_path):
    """By them, predictions of several ranks are put in order; an iterable dataset has none."""
    writers = {}
    for name in ("stock", "ours"):
        writers[name] = Writer()
        trainer = quiet_trainer(tmp_path, callbacks=[writers[name]])
        model = Model()
        model.predict_step = lambda batch, batch_idx, dataloader_idx=0: batch
        trainer.predict(
            model, datamodule=Data(journal) if name == "stock" else RemoteDataModule(Data(journal), [address])
        )
    assert writers["ours"].batches[:6] == writers["stock"].batches[:6]
    assert writers["ours"].batches[0] == ([0, 1, 2], [0, 1, 2])
    assert writers["ours"].epochs == writers["stock"].epochs
    assert writers["ours"].epochs[0][2] == []
