"""A loader that the user iterates over gives the same batches as a local one, even during a pass of the Trainer."""

from itertools import islice

import pytest
import torch
from pytorch_lightning import LightningDataModule, LightningModule, seed_everything
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from lightning_sm import DataServiceSettings, RemoteDataModule
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


class Data(LightningDataModule):
    """Loaders of one kind, for training and for validation."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        if self.kind == "combined":
            return CombinedLoader([DataLoader(Numbers(24), batch_size=4), DataLoader(Numbers(8), batch_size=4)])
        return DataLoader(Numbers(24), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Numbers(12, first=100), batch_size=4)


def indices(batches):
    """Return the samples of batches."""
    batches = [batch[0][0] if isinstance(batch, tuple) else batch for batch in batches]
    return [index for batch in batches for index in batch["index"].tolist()]


class Model(LightningModule):
    """Reads loaders by hand in every hook that allows it, and records the samples."""

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

    def on_fit_start(self):
        self.read("on_fit_start")

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


@pytest.mark.parametrize("kind", ["shuffled", pytest.param("combined", marks=pytest.mark.proof)])
def test_passes_by_hand_are_those_of_local_loaders(tmp_path, kind, pool):
    """Passes by hand match in every hook and epoch, even two at once, and do not affect the Trainer's passes."""
    seen = []
    for data in (Data(kind), RemoteDataModule(Data(kind), [pool.hosts[0].address])):
        seed_everything(3, verbose=False)
        model = Model()
        trainer = quiet_trainer(tmp_path, max_epochs=2, limit_val_batches=2, num_sanity_val_steps=1)
        trainer.fit(model, datamodule=data)
        seen.append((model.by_hand, model.trained, model.validated))
    assert len(seen[0][0]) >= 20
    assert seen[0] == seen[1]


def test_a_second_pass_costs_no_slot_of_the_first(pool):
    """While one pass is open, another one runs to its end, and no host is blamed for a lack of slots."""
    settings = DataServiceSettings(window_batches=2)
    module = RemoteDataModule(Data("shuffled"), [pool.hosts[1].address], settings=settings)
    module.setup("fit")
    loader = module.train_dataloader()
    first = iter(loader)
    begun = next(first)
    kept = list(loader)
    kept += list(loader)
    state = module._service_connection.feeder.snapshot()
    assert sorted(indices([begun, *first])) == list(range(24))
    assert sorted(indices(kept)) == sorted(2 * list(range(24)))
    assert [one.num_retries for one in state.hosts] == [0]
    module.teardown("fit")
