"""A loader that the user iterates over gives what the local one gives, also beside a pass of the Trainer."""

from itertools import chain, islice

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.utilities import CombinedLoader
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_sm import DataHost, DataServiceSettings, RemoteDataModule
from tests.integration.data.numbers import quiet_trainer

pytestmark = pytest.mark.processes


class Numbers(Dataset):
    """Numbers from ``first`` on."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"index": self.first + index, "x": torch.full((2,), float(index))}


class Stream(IterableDataset):
    """Numbers, split over the workers."""

    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id if info else 0, 24, info.num_workers if info else 1):
            yield {"index": index, "x": torch.full((2,), float(index))}


class Data(LightningDataModule):
    """Loaders of one kind, for training and for validation."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        if self.kind == "stream":
            return DataLoader(Stream(), batch_size=4)
        if self.kind == "combined":
            return CombinedLoader([DataLoader(Numbers(24), batch_size=4), DataLoader(Numbers(8), batch_size=4)])
        return DataLoader(Numbers(24), batch_size=4, shuffle=self.kind == "shuffled")

    def val_dataloader(self):
        return DataLoader(Numbers(12, first=100), batch_size=4)


def indices(batches):
    """The samples of batches, sorted."""
    batches = [batch[0][0] if isinstance(batch, tuple) else batch for batch in batches]
    return sorted(index for batch in batches for index in batch["index"].tolist())


class Model(LightningModule):
    """Reads loaders by hand wherever a hook lets it, and notes what it was given."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.by_hand = {}
        self.trained = {}
        self.validated = {}

    def read(self, where):
        """Read both loaders."""
        data = self.trainer.datamodule
        self.by_hand[where, self.current_epoch, "train"] = indices(data.train_dataloader())
        self.by_hand[where, self.current_epoch, "val"] = indices(data.val_dataloader())

    def on_train_start(self):
        self.read("on_train_start")

    def on_train_epoch_start(self):
        self.read("on_train_epoch_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.read("in the middle")
            loader = self.trainer.datamodule.train_dataloader()
            pairs = list(zip(loader, self.trainer.datamodule.train_dataloader(), strict=True))
            for which in (0, 1):
                self.by_hand[f"two at once, {which}", self.current_epoch, "train"] = indices([p[which] for p in pairs])

    def on_validation_epoch_start(self):
        self.read(f"on_validation_epoch_start, sanity {self.trainer.sanity_checking}")

    def on_train_epoch_end(self):
        self.read("on_train_epoch_end")
        loader = self.trainer.train_dataloader
        loader = loader[0] if isinstance(loader, list) else loader
        self.by_hand["trainer.train_dataloader", self.current_epoch, "train"] = indices(loader)
        self.by_hand["a part", self.current_epoch, "train"] = len(list(islice(loader, 2)))

    def training_step(self, batch, batch_idx):
        batch = batch[0] if isinstance(batch, list) else batch
        self.trained.setdefault(self.current_epoch, []).append(batch["index"].tolist())
        return self.layer(batch["x"]).mean()

    def validation_step(self, batch, batch_idx):
        self.validated.setdefault(self.current_epoch, []).append(batch["index"].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def widening(kind):
    """A kind that only widens what the others show."""
    return pytest.param(kind, marks=pytest.mark.proof)


@pytest.fixture(scope="module", params=[widening("sequential"), "shuffled", widening("combined"), "stream"])
def fitted(request, tmp_path_factory):
    """A model that stock Lightning has trained, and one that was trained with a data host."""
    kind = request.param
    folder = tmp_path_factory.mktemp("by_hand")
    options = {"max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1}
    stock, ours = Model(), Model()
    quiet_trainer(folder, **options).fit(stock, datamodule=Data(kind))
    with DataHost(workers=1) as host:
        quiet_trainer(folder, **options).fit(ours, datamodule=RemoteDataModule(Data(kind), [host.address]))
    return stock, ours


def test_a_pass_by_hand_is_whole(fitted):
    """In every hook, in every epoch, of the training and of the validation data; two passes at once, too."""
    stock, ours = fitted
    assert ours.by_hand == stock.by_hand
    assert len(stock.by_hand) >= 20


def test_the_training_does_not_notice_a_pass_by_hand(fitted):
    """The Trainer's own passes keep their samples and their limits."""
    stock, ours = fitted
    for epoch in (0, 1):
        assert sorted(chain(*ours.trained[epoch])) == sorted(chain(*stock.trained[epoch]))
    assert ours.validated == stock.validated


def test_each_pass_by_hand_over_a_shuffled_loader_has_its_own_order(tmp_path):
    """As locally; and the order is the same in every run."""
    with DataHost(workers=1) as host:
        orders = [_orders_by_hand(tmp_path, host.address) for _ in range(2)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders[0]}) == 4


def _orders_by_hand(folder, address):
    class Twice(Model):
        def read(self, where):
            if where == "on_train_epoch_end":
                for _ in range(2):
                    batches = list(self.trainer.train_dataloader)
                    self.by_hand[len(self.by_hand)] = [index for batch in batches for index in batch["index"].tolist()]

    model = Twice()
    trainer = quiet_trainer(folder, max_epochs=2, limit_val_batches=0)
    module = RemoteDataModule(Data("shuffled"), [address], seed=5)
    model.on_train_batch_end = lambda *_: None
    trainer.fit(model, datamodule=module)
    return [order for order in model.by_hand.values() if isinstance(order, list) and len(order) == 24][:4]


def test_a_second_pass_costs_no_slot_of_the_first():
    """While one pass is open, another one runs to its end, and no host is blamed for a lack of slots."""
    with DataHost(workers=2) as host:
        # On a busy machine, a batch may be late for other reasons than a lack of slots, and requested twice.
        settings = DataServiceSettings(window_batches=2, hedge_factor=0.0)
        module = RemoteDataModule(Data("sequential"), [host.address], settings=settings)
        module.setup("fit")
        loader = module.train_dataloader()
        first = iter(loader)
        begun = next(first)
        kept = list(loader)
        kept += list(loader)
        state = module._hosts.connection.feeder.snapshot()
        assert indices([begun, *first]) == list(range(24))
        assert indices(kept) == sorted(2 * list(range(24)))
        assert [one.num_retries for one in state.hosts] == [0]
        module.teardown("fit")


def test_batch_norm_is_updated_from_all_batches(tmp_path):
    """``update_bn`` after a fit reads the training loader once more, from its beginning."""
    statistics = []
    for is_remote in (False, True):

        class Normalized(LightningModule):
            def __init__(self):
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(2)

            def forward(self, x):
                return self.norm(x)

            def training_step(self, batch, batch_idx):
                return self(batch["x"]).mean()

            def on_train_end(self):
                loader = self.trainer.datamodule.train_dataloader()
                update_bn((batch["x"] for batch in loader), self.norm)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)

        model = Normalized()
        trainer = quiet_trainer(tmp_path, max_epochs=1, limit_val_batches=0, limit_train_batches=2)
        if is_remote:
            with DataHost(workers=1) as host:
                trainer.fit(model, datamodule=RemoteDataModule(Data("sequential"), [host.address]))
        else:
            trainer.fit(model, datamodule=Data("sequential"))
        statistics.append((model.norm.running_mean.tolist(), model.norm.num_batches_tracked.item()))
    assert statistics[0] == statistics[1]
    assert statistics[0][1] == 6


def test_loaders_read_by_hand_are_those_of_the_trainers_last_reload(tmp_path):
    """With reload_dataloaders_every_n_epochs=3 and passes by hand in every epoch, the Trainer's loaders stay open."""

    class Reader(Model):
        def read(self, where):
            if where == "in the middle":
                super().read(where)

    model = Reader()
    options = {"max_epochs": 7, "reload_dataloaders_every_n_epochs": 3}
    settings = DataServiceSettings(batch_timeout_s=60.0)
    with DataHost(workers=1) as host:
        module = RemoteDataModule(Data("shuffled"), [host.address], settings=settings)
        quiet_trainer(tmp_path, **options).fit(model, datamodule=module)
    numbers = {"train": list(range(24)), "val": list(range(100, 112))}
    for epoch in range(7):
        assert sorted(chain(*model.trained[epoch])) == numbers["train"]
        assert sorted(chain(*model.validated[epoch])) == numbers["val"]
        for stage, expected in numbers.items():
            assert model.by_hand["in the middle", epoch, stage] == expected
