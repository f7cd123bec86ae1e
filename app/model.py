"""The model: torchvision's ResNet-18 as an image classifier."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import resnet18

Batch = tuple[Tensor, Tensor]

# 32 groups: the default of the group normalization paper (Wu and He 2018, table 3), a divisor of all ResNet-18 widths.
_NUM_GROUPS = 32

# The share of all steps in which the learning rate rises; then it falls to zero along a half cosine.
_WARMUP_FRACTION = 0.2


class ResNet18Classifier(LightningModule):
    """Classify 3-channel images with a ResNet-18 that is trained from scratch.

    Trained with AdamW: the learning rate rises for a fifth of the run and then falls to zero along a cosine, for any
    number of hosts. Options of the command line (--optimizer, --lr_scheduler) replace both.

    Args:
        num_classes: Number of classes, which the command line takes from the data.
        learning_rate: Highest learning rate of the run.
        weight_decay: Weight decay of AdamW.
        norm: Kind of normalization layers: "batch" computes statistics over the samples of one process, "group" over
            single samples, so that the result does not depend on how a batch is split over hosts.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.01,
        norm: Literal["batch", "group"] = "batch",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        norm_layer = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, _NUM_GROUPS)
        self.network: nn.Module = resnet18(num_classes=num_classes, norm_layer=norm_layer)
        # "micro" is the share of correct images; the default would average over the classes.
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits.

        Args:
            images: Images, (B, 3, H, W) float32.

        Returns:
            Unnormalized scores, (B, num_classes) float32.
        """
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of a batch, a scalar."""
        loss = self._step(batch, "train", self.train_acc)
        # The curve within an epoch, of this process only: synchronization would cost a collective in every step.
        self.log("train_loss_step", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to ``val_loss`` and ``val_acc``."""
        self._step(batch, "val", self.val_acc)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to ``test_loss`` and ``test_acc``."""
        self._step(batch, "test", self.test_acc)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the class probabilities, (B, num_classes) float32; the labels of the batch are not used."""
        logits: Tensor = self(batch[0])
        return logits.softmax(dim=1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Create AdamW and its schedule, which is stepped after every batch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        # Over all hosts and epochs; infinite if the trainer has no last step, as with max_epochs=-1. torch's OneCycleLR
        # would do the same, but fails in the first step after the number of steps that its checkpoint contains, hence
        # in every run that resumes with more epochs or fewer hosts.
        num_steps = self.trainer.estimated_stepping_batches
        scheduler = LambdaLR(optimizer, partial(learning_rate_factor, num_steps=num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _step(self, batch: Batch, stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = functional.cross_entropy(logits, labels)
        accuracy(logits, labels)
        # sync_dist averages over the processes at the end of the epoch. The metric synchronizes itself and counts
        # samples, which is exact even if the processes saw different numbers of them.
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        self.log(f"{stage}_acc", accuracy, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(labels))
        return loss


def learning_rate_factor(step: int, num_steps: float) -> float:
    """Compute the factor of the learning rate: a linear rise, then half a cosine down to zero.

    Args:
        step: Number of optimizer steps done.
        num_steps: Number of optimizer steps of the whole run, or infinity for a constant factor.

    Returns:
        A number from 0 to 1; 0 after the last step.
    """
    if math.isinf(num_steps):
        return 1.0
    if step >= num_steps:
        return 0.0
    num_warmup_steps = max(1, round(_WARMUP_FRACTION * num_steps))
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))
