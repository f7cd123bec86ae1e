# A user's actions on a Mac in one process: import everything, train off SageMaker, and try features that need Linux.
import importlib
import json
import pkgutil

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

import lightning_sm
from lightning_sm import DataHost, RemoteDataModule, SageMakerCLI
from lightning_sm.errors import NeedsLinuxError


class Points(LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=self.batch_size)

    val_dataloader = test_dataloader = train_dataloader


class Model(LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def import_everything():
    """Import every module, and return the missing packages, which must be needed only where jobs are submitted."""
    names = [module.name for module in pkgutil.walk_packages(lightning_sm.__path__, "lightning_sm.")]
    return [missing for name in names if (missing := missing_for(name)) is not None]


def missing_for(module):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return error.name
    return None


def refusal(act):
    try:
        act()
    except NeedsLinuxError as error:
        return str(error)
    return None


def serve():
    with DataHost():
        pass


def read_remotely():
    points = RemoteDataModule(Points(), addresses=["127.0.0.1:1"])
    points.setup("fit")
    next(iter(points.train_dataloader()))


if __name__ == "__main__":
    seen = {"missing": import_everything()}
    cli = SageMakerCLI(Model, Points)
    cli.trainer.test(cli.model, cli.datamodule)
    seen |= {"steps": cli.trainer.global_step, "remote": refusal(read_remotely), "host": refusal(serve)}
    print("seen:", json.dumps(seen))
