"""A training whose parts take as long as its arguments say; all of them sleep, so that few cores are enough."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_sm import SageMakerCLI
from lightning_sm._lightning import LightningDataModule, LightningModule


class SlowItems(Dataset[torch.Tensor]):
    """Items of some size that take some time, on one host another time.

    Args:
        item_s: Seconds for an item.
        slow_host: The host on which an item takes ``slow_item_s``.
        slow_item_s: Seconds for an item there.
        num_values: Values of an item, of four bytes each.
        num_items: Number of items.
    """

    def __init__(self, item_s: float, slow_host: str, slow_item_s: float, num_values: int, num_items: int) -> None:
        self._item_s, self._slow_host, self._slow_item_s = item_s, slow_host, slow_item_s
        self._values = torch.ones(num_values)
        self._num_items = num_items

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        """Take the time, and return the values."""
        is_slow = os.environ.get("SM_CURRENT_HOST") == self._slow_host
        time.sleep(self._slow_item_s if is_slow else self._item_s)
        return self._values


class SlowBatches(LightningDataModule):
    """Batches of one item.

    Args:
        item_s: Seconds for a training item.
        slow_host: The host on which it takes ``slow_item_s``.
        slow_item_s: Seconds for an item there.
        validation_s: Seconds for a validation item.
        num_values: Values of an item, of four bytes each.
        num_workers: Workers of the loader.
        setup_s: Seconds of ``setup``.
    """

    def __init__(
        self,
        item_s: float = 0.0,
        slow_host: str = "",
        slow_item_s: float = 0.0,
        validation_s: float = 0.0,
        num_values: int = 256,
        num_workers: int = 0,
        setup_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.train_items = SlowItems(item_s, slow_host, slow_item_s, num_values, 100_000)
        self.validation_items = SlowItems(validation_s, "", 0.0, num_values, 20)
        self.num_workers, self.setup_s, self.has_validation = num_workers, setup_s, validation_s > 0

    def setup(self, stage: str) -> None:
        """Take the time."""
        time.sleep(self.setup_s)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader."""
        return DataLoader(self.train_items, num_workers=self.num_workers)

    def val_dataloader(self) -> Any:
        """Return the validation loader; none if no time is set."""
        return DataLoader(self.validation_items) if self.has_validation else []


class SlowSGD(torch.optim.SGD):
    """SGD whose step takes some time.

    Args:
        parameters: The parameters.
        seconds: How long a step takes.
    """

    def __init__(self, parameters: Any, seconds: float) -> None:
        super().__init__(parameters, lr=0.01)
        self.seconds = seconds

    def step(self, closure: Any = None) -> Any:
        """Take the time after the closure."""
        loss = super().step(closure)
        time.sleep(self.seconds)
        return loss


class SlowModel(LightningModule):
    """A small model.

    Args:
        forward_s: Seconds of ``training_step``.
        slow_rank: The rank on which it takes ``slow_forward_s``.
        slow_forward_s: Seconds there.
        optimizer_s: Seconds of a step of the optimizer.
        to_device_s: Seconds until a batch is on its device.
        checkpoint_s: Seconds for saving a checkpoint.
    """

    def __init__(
        self,
        forward_s: float = 0.01,
        slow_rank: int = -1,
        slow_forward_s: float = 0.0,
        optimizer_s: float = 0.0,
        to_device_s: float = 0.0,
        checkpoint_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.forward_s, self.slow_rank, self.slow_forward_s = forward_s, slow_rank, slow_forward_s
        self.optimizer_s, self.to_device_s, self.checkpoint_s = optimizer_s, to_device_s, checkpoint_s
        self.layer = torch.nn.Linear(256, 1)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Take the time."""
        time.sleep(self.to_device_s)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Take the time, and return a loss."""
        time.sleep(self.slow_forward_s if self.global_rank == self.slow_rank else self.forward_s)
        loss: torch.Tensor = self.layer(batch[:, :256]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Log a metric."""
        self.log("val_loss", self.layer(batch[:, :256]).square().mean())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the time."""
        time.sleep(self.checkpoint_s)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return SlowSGD(self.parameters(), self.optimizer_s)


if __name__ == "__main__":
    SageMakerCLI(SlowModel, SlowBatches)
