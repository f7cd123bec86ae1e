"""A project template with a custom CLI, after DavidZhang73/pytorch-lightning-template."""

import os
import warnings
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerCLI


class CustomLightningCLI(SageMakerCLI):
    def __init__(self, parser_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        defaults = {
            subcommand: {"default_config_files": [os.path.join("configs", "default.yaml")]}
            for subcommand in ["fit", "validate", "test", "predict"]
        }
        super().__init__(parser_kwargs={**defaults, **(parser_kwargs or {})}, **kwargs)

    def add_arguments_to_parser(self, parser) -> None:
        parser.add_argument("--ignore_warnings", default=False, type=bool, help="Ignore warnings")
        parser.add_argument("--test_after_fit", default=False, type=bool, help="Test the best checkpoint afterwards")

    def before_instantiate_classes(self) -> None:
        if self.config[self.subcommand].get("ignore_warnings"):
            warnings.filterwarnings("ignore")

    def before_fit(self) -> None:
        print(f"training {type(self.model).__name__} with {self.config.fit.model.init_args.lr=}")

    def after_fit(self) -> None:
        if self.config.fit.get("test_after_fit"):
            self._run_subcommand("test")

    def after_test(self) -> None:
        print("Tested on checkpoint:", os.path.basename(self.trainer.ckpt_path or "none"))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Prepares the keyword arguments to pass to the subcommand to run."""
        fn_kwargs = {
            name: value
            for name, value in self.config_init[self.config_init["subcommand"]].items()
            if name in self._subcommand_method_arguments[subcommand]
        }
        fn_kwargs["model"] = self.model
        if self.datamodule is not None:
            fn_kwargs["datamodule"] = self.datamodule
        return fn_kwargs


class SimpleNet(LightningModule):
    def __init__(self, input_size: int, output_size: int = 2, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(input_size, output_size)

    def step(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.step(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.step(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class BlobsDataModule(LightningDataModule):
    def __init__(self, batch_size: int = 4, num_samples: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()

    def make_loader(self, shuffle=False):
        labels = torch.arange(self.hparams.num_samples) % 2
        points = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(1)) + labels[:, None]
        return DataLoader(TensorDataset(points, labels), batch_size=self.hparams.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self.make_loader(shuffle=True)

    def val_dataloader(self):
        return self.make_loader()

    test_dataloader = val_dataloader


if __name__ == "__main__":
    CustomLightningCLI()
