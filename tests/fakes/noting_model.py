"""A model with one weight that records its batches."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import LightningModule


class NotingModel(LightningModule):
    """A base class for models that record batches in ``seen`` and return ``loss()``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def loss(self) -> torch.Tensor:
        """Return a loss that does not depend on the batch."""
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer that changes the weight."""
        return torch.optim.SGD(self.parameters(), 0.1)
