"""A user's training script that uses all of Lightning's reductions. Each rank writes the results and its weights."""

import json
import os
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerCLI

REDUCTIONS = ("mean", "sum", "max", "min")


def output():
    return Path(os.environ["SAGEMAKER_BASE_DIR"]) / "output"


class Points(LightningDataModule):
    def __init__(self, num_samples: int = 24) -> None:
        super().__init__()
        self.num_samples = num_samples

    def prepare_data(self):
        (output() / "prepared").touch()

    def train_dataloader(self):
        points = torch.arange(2.0 * self.num_samples).reshape(-1, 2) / (2 * self.num_samples)
        return DataLoader(TensorDataset(points, points.sum(dim=1)), batch_size=2)

    val_dataloader = train_dataloader


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.5)

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.layer(batch[0]).flatten(), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)
        for name in REDUCTIONS:
            self.log(name, self.global_rank + 1.0, reduce_fx=name, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_fit_end(self):
        strategy = self.trainer.strategy
        is_first = self.global_rank == 0
        seen = {
            "rank": self.global_rank,
            "strategy": type(strategy).__name__,
            "backend": torch.distributed.get_backend(),
            "all": strategy.reduce_boolean_decision(is_first),
            "any": strategy.reduce_boolean_decision(is_first, all=False),
            "metrics": {name: value.item() for name, value in self.trainer.callback_metrics.items()},
            "weights": {name: value.tolist() for name, value in self.state_dict().items()},
            "step": self.global_step,
        }
        (output() / f"seen-{self.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    SageMakerCLI(
        Model,
        Points,
        save_config_callback=None,
        trainer_defaults={"max_epochs": 2, "accelerator": "cpu", "enable_model_summary": False, "logger": False},
    )
