# Trains on all ranks with state that builds up within an epoch: gradients of several batches, and a random curriculum.
# Rank n writes the sum of the weights to NOTES/<n>.txt. The batch TOLD_IN ("epoch batch_idx") waits until a rank has
# been told to stop.
import os
import time
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerTrainer
from tests.integration.told_ranks import wait_until_told


class Together(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.line = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.scale = 1.0

    def on_train_epoch_start(self):
        self.scale = 1.0 + torch.rand(()).item() / (1 + self.current_epoch)

    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        if "TOLD_IN" in os.environ and f"{self.current_epoch} {batch_idx}" == os.environ["TOLD_IN"]:
            wait_until_told(self.trainer, Path(os.environ["NOTES"]))
        x, y = batch
        loss = self.scale * torch.nn.functional.mse_loss(self.line(x), y) / 4
        self.manual_backward(loss)
        if batch_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_train_end(self):
        (Path(os.environ["NOTES"]) / f"{self.global_rank}.txt").write_text(f"{self.line.weight.sum().item()}\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


if __name__ == "__main__":
    seed_everything(1)
    Path(os.environ["NOTES"]).mkdir(exist_ok=True)
    x = torch.randn(240, 2, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    SageMakerTrainer(accelerator="cpu", logger=False, max_epochs=2).fit(Together(), loader)
