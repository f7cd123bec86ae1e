"""A convolutional network on the MNIST DataModule of lightning-bolts."""

import torch
import torch.nn.functional as F  # noqa: N812
from pytorch_lightning import LightningModule
from torchmetrics.functional import accuracy

from app.bolts_compat import import_bolts
from lightning_sm import SageMakerCLI

MNISTDataModule = import_bolts("pl_bolts.datamodules.mnist_datamodule").MNISTDataModule


class LitMNIST(LightningModule):
    def __init__(self, num_classes: int, channels: int = 4, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.conv = torch.nn.Conv2d(1, channels, 3, stride=3)
        self.head = torch.nn.Linear(channels * 9 * 9, num_classes)

    def forward(self, x):
        return F.log_softmax(self.head(self.conv(x).relu().flatten(1)), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def evaluate(self, batch, stage):
        x, y = batch
        logits = self(x)
        found = accuracy(logits.argmax(dim=1), y, task="multiclass", num_classes=self.hparams.num_classes)
        self.log(f"{stage}_loss", F.nll_loss(logits, y), prog_bar=True, sync_dist=True)
        self.log(f"{stage}_acc", found, prog_bar=True, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MNISTCLI(SageMakerCLI):
    def add_arguments_to_parser(self, parser):
        parser.set_defaults({"data.normalize": True})


if __name__ == "__main__":
    MNISTCLI(LitMNIST, MNISTDataModule, seed_everything_default=7, save_config_callback=None)
