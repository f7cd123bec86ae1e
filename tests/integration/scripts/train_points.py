# A user's script that trains for two epochs and prints the packages of its classes. IMPORTS sets the order of imports,
# and MODEL the Lightning distribution that the model comes from.
import importlib
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

for name in os.environ.get("IMPORTS", "lightning_sm").split(","):
    importlib.import_module(name)

from lightning_sm import SageMakerCLI, SageMakerEnvironment  # noqa: E402 - after the imports whose order matters

pl = importlib.import_module(os.environ.get("MODEL", "pytorch_lightning"))


class Points(pl.LightningDataModule):
    def __init__(self, data_dir: str = "nowhere") -> None:
        super().__init__()
        self.data_dir = data_dir

    def train_dataloader(self):
        points, labels = torch.arange(32.0).reshape(16, 2) / 32, torch.arange(16) % 2
        return DataLoader(TensorDataset(points, labels), batch_size=4)

    val_dataloader = train_dataloader


class Model(pl.LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        correct = self.layer(batch[0]).argmax(dim=1) == batch[1]
        self.log("val_acc", correct.float().mean(), sync_dist=True)

    def on_fit_start(self):
        # Users may write files on every host.
        with open(os.path.join(self.trainer.default_root_dir, "seen.txt"), "w") as file:
            file.write(self.trainer.datamodule.data_dir)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    cli = SageMakerCLI(Model, Points, trainer_defaults={"max_epochs": 2, "enable_model_summary": False})
    parts = [SageMakerCLI, SageMakerEnvironment, type(cli.trainer), *map(type, cli.trainer.callbacks)]
    # For each class, find the package of its nearest base class outside lightning_sm.
    modules = [[base.__module__.partition(".")[0] for base in part.__mro__] for part in parts]
    print("derived from:", *sorted({next(name for name in names if name != "lightning_sm") for names in modules}))
