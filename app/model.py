"""The model: torchvision's ResNet-18 as an image classifier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models.resnet import BasicBlock, ResNet

from app.schedule import with_schedule

Batch = tuple[Tensor, Tensor]

# 32 groups: the default of the group normalization paper (Wu and He 2018, table 3), a divisor of all ResNet-18 widths.
_NUM_GROUPS = 32


class ResNet18Classifier(LightningModule):
    """Classify 3-channel images with a ResNet-18 that is trained from scratch.

    The optimizer is AdamW. The learning rate rises for a fifth of the run and then falls to zero along a cosine, for
    any number of hosts. To replace either, use --optimizer and --lr_scheduler on the command line.

    Args:
        num_classes: Number of classes, which the command line takes from the data.
        learning_rate: Highest learning rate of the run.
        weight_decay: Weight decay of AdamW.
        norm: Kind of normalization layers: "batch" computes statistics over the samples of one process. "group"
            normalizes each sample separately, so the result does not depend on how a batch is split over hosts.
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
        self.network = _ResNet18(num_classes, norm_layer)
        # "micro" gives the share of correct images; the default averages over classes.
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
        # Log this process's loss only: synchronizing it would cost a collective call in every step.
        self.log("train_loss_step", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to ``val_loss`` and ``val_acc``."""
        self._step(batch, "val", self.val_acc)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to ``test_loss`` and ``test_acc``."""
        self._step(batch, "test", self.test_acc)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the class probabilities, (B, num_classes) float32, ignoring the labels of the batch."""
        logits: Tensor = self(batch[0])
        return logits.softmax(dim=1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Create AdamW and its learning rate schedule, which advances after every batch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        # The number of steps is infinite if the run has no last step, as with max_epochs=-1.
        return with_schedule(optimizer, self.trainer.estimated_stepping_batches)

    def _step(self, batch: Batch, stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = functional.cross_entropy(logits, labels)
        accuracy(logits, labels)
        # sync_dist averages over the ranks at the end of the epoch. The metric synchronizes itself and counts samples,
        # so it is exact even if the ranks saw different numbers of samples.
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        self.log(f"{stage}_acc", accuracy, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(labels))
        return loss


class _ResNet18(ResNet):  # type: ignore[misc]  # torchvision has no type information
    """torchvision's ResNet-18, with a list of layers that can be cut into the stages of a pipeline."""

    def __init__(self, num_classes: int, norm_layer: Callable[[int], nn.Module]) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=num_classes, norm_layer=norm_layer)
        # torchvision's ReLU works in place, which autograd forbids if it is the first layer of a stage.
        self.relu = nn.ReLU()

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers in the order of ``forward``; a pipeline can be cut between any two of them."""
        stem = [self.conv1, self.bn1, self.relu, self.maxpool]
        blocks = [*self.layer1, *self.layer2, *self.layer3, *self.layer4]
        return [*stem, *blocks, self.avgpool, nn.Flatten(), self.fc]
