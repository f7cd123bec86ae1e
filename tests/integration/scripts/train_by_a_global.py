"""k-fold cross-validation whose fold is a global, which setup() reads."""

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_sm import SageMakerTrainer


class Data(LightningDataModule):
    """Leaves out the numbers of the fold."""

    def setup(self, stage):
        self.numbers = [number for number in range(12) if number % 3 != fold]

    def train_dataloader(self):
        return DataLoader(self.numbers, 4)


class Model(LightningModule):
    """Notes its numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        return self.weight * 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    for fold in range(3):
        model = Model()
        trainer = SageMakerTrainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
        trainer.fit(model, datamodule=Data())
        print("fold", fold, sorted(set(range(12)) - set(model.seen)), flush=True)
