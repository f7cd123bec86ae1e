# A user's script: model and data in one file, with a module and a package beside it. Every rank writes what it saw.
import importlib.util
from pathlib import Path

import line
import torch
from parts.report import leave
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerCLI


class Points(LightningDataModule):
    def __init__(self, data_dir: str = "nowhere") -> None:
        super().__init__()
        self.data_dir = data_dir

    def train_dataloader(self):
        points = [[float(word)] for word in Path(self.data_dir, "points.txt").read_text().split()]
        leave("made-batches", {"points": len(points)})
        x = torch.tensor(points)
        return DataLoader(TensorDataset(x, 2 * x), batch_size=2)


class Line(LightningModule):
    def __init__(
        self,
        flag: bool = False,
        off: bool = True,
        nothing: int | None = 1,
        numbers: list[int] = (),
        table: dict[str, float | None] | None = None,
        phrase: str = "",
        rate: float = 0.0,
        code: str = "",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.line = line.make()

    def on_fit_start(self):
        trainer = self.trainer
        seen = {
            "rank": trainer.global_rank,
            "local_rank": trainer.local_rank,
            "node_rank": trainer.node_rank,
            "world_size": trainer.world_size,
            "met": sorted(self.all_gather(torch.tensor(trainer.global_rank)).flatten().tolist()),
            "max_epochs": trainer.max_epochs,
            "has_requirements": importlib.util.find_spec("wanted") is not None,
            "arguments": {name: value for name, value in self.hparams.items() if not name.startswith("_")},
        }
        leave(f"rank-{trainer.global_rank}", seen)

    def training_step(self, batch, batch_idx):
        if self.global_step == 1:
            print(f"rank {self.global_rank} is in the middle", flush=True)
        x, y = batch
        return torch.nn.functional.mse_loss(self.line(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    SageMakerCLI(Line, Points, trainer_defaults={"accelerator": "cpu", "enable_model_summary": False})
