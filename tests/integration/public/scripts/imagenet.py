"""ImageNet classification with loaders in the model and no DataModule, after Lightning's example imagenet.py."""

import os

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.data
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.optim import lr_scheduler
from torchmetrics import Accuracy
from torchvision import datasets, models, transforms

from lightning_sm import SageMakerCLI


class ImageNetLightningModel(LightningModule):
    """Train one of torchvision's architectures.

    Args:
        data_path: Folder with the subfolders train and val.
        arch: Name of the architecture.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        batch_size: Images per batch and process.
        workers: Worker processes of each loader.
    """

    def __init__(
        self,
        data_path: str,
        arch: str = "squeezenet1_1",
        weights: str | None = None,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        batch_size: int = 4,
        workers: int = 2,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.data_path, self.batch_size, self.workers = data_path, batch_size, workers
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.model = models.get_model(arch, weights=weights, num_classes=2)
        self.train_dataset = None
        self.eval_dataset = None
        self.train_acc1 = Accuracy(task="multiclass", num_classes=2, top_k=1)
        self.eval_acc1 = Accuracy(task="multiclass", num_classes=2, top_k=1)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        images, target = batch
        output = self.model(images)
        loss = F.cross_entropy(output, target)
        self.log("train_loss", loss)
        self.train_acc1(output, target)
        self.log("train_acc1", self.train_acc1, prog_bar=True)
        return loss

    def eval_step(self, batch, batch_idx, prefix):
        images, target = batch
        output = self.model(images)
        self.log(f"{prefix}_loss", F.cross_entropy(output, target), sync_dist=True)
        self.eval_acc1(output, target)
        self.log(f"{prefix}_acc1", self.eval_acc1, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        return self.eval_step(batch, batch_idx, "val")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        return [optimizer], [lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1 ** (epoch // 30))]

    def setup(self, stage):
        normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        if stage == "fit":
            self.train_dataset = datasets.ImageFolder(
                os.path.join(self.data_path, "train"),
                transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]),
            )
        self.eval_dataset = datasets.ImageFolder(
            os.path.join(self.data_path, "val"), transforms.Compose([transforms.ToTensor(), normalize])
        )

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=self.batch_size, shuffle=True, num_workers=self.workers, pin_memory=True
        )

    def val_dataloader(self):
        return torch.utils.data.DataLoader(
            self.eval_dataset, batch_size=self.batch_size, num_workers=self.workers, pin_memory=True
        )


if __name__ == "__main__":
    SageMakerCLI(
        ImageNetLightningModel,
        trainer_defaults={
            "max_epochs": 90,
            "accelerator": "auto",
            "callbacks": [ModelCheckpoint(monitor="val_acc1", mode="max")],
        },
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
    )
