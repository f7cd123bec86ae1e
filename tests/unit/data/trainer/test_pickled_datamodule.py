"""A RemoteDataModule in another process: strategies that spawn pickle it."""

import pickle

import cloudpickle
import pytest
import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm.data.trainer.bare_loaders import bare_loaders
from lightning_sm.data.trainer.datamodule import RemoteDataModule

DATASET = TensorDataset(torch.arange(4))


def without_a_hook():
    """Return a DataModule whose hook the script has switched off."""
    datamodule = BoringDataModule()
    datamodule.val_dataloader = None
    return datamodule


def hooks_of(datamodule):
    """The stages for which Lightning finds loaders."""
    return [stage for stage in ("train", "val", "test", "predict") if is_overridden(f"{stage}_dataloader", datamodule)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (BoringDataModule, ["train", "val", "test", "predict"]),
        (without_a_hook, ["train", "test", "predict"]),
        (lambda: LightningDataModule.from_datasets(DATASET, test_dataset=DATASET), ["train", "test"]),
        (lambda: bare_loaders(object(), {"val": DataLoader(DATASET)}), ["val"]),
        (lambda: bare_loaders(BoringModel(), {"val": DataLoader(DATASET)}), ["train", "val", "test", "predict"]),
    ],
    ids=["of a class", "switched off", "from_datasets", "bare loaders", "of the model"],
)
def test_it_keeps_its_loaders(make, expected):
    """Hooks may be attributes of the DataModule, which its copy has only when it is complete."""
    module = RemoteDataModule(make(), ["algo-2:1"], seed=3)
    again = cloudpickle.loads(cloudpickle.dumps(module))
    assert hooks_of(module) == hooks_of(again) == expected
    assert type(again).__qualname__ == type(module).__qualname__
    assert (again._hosts.connection.addresses, again._hosts.seed) == (["algo-2:1"], 3)
    assert again._hosts.module.datamodule is again._datamodule


def test_loaders_of_the_model_are_made_by_the_model_of_the_other_process():
    """The model travels with the Trainer, not with what stands for its loaders."""
    module = RemoteDataModule(bare_loaders(BoringModel(), {}), ["algo-2:1"])
    module = pickle.loads(pickle.dumps(module))  # noqa: S301  # pickled right here
    model = BoringModel()
    module.trainer = type("Trainer", (), {"lightning_module": model})()
    module._datamodule.make("val")
    assert len(module._datamodule.val_dataloader()) == len(model.val_dataloader())
