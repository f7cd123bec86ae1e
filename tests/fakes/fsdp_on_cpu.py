"""FSDP without a GPU: Lightning's strategy, with the two places replaced that require CUDA."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning.strategies import FSDPStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module


class FSDPOnCPU(FSDPStrategy):
    """Lightning's FSDPStrategy with the device "cpu" and a mesh of CPUs.

    Args:
        **kwargs: Arguments of FSDPStrategy, which configuration files may name.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def setup_environment(self) -> None:
        """Make a mesh of CPUs; the original method makes a mesh of GPUs."""
        sizes = self.kwargs.pop("device_mesh", None)
        super().setup_environment()
        if sizes is not None:
            self.kwargs["device_mesh"] = init_device_mesh("cpu", tuple(sizes))

    def _setup_model(self, model: Module) -> Module:
        """Wrap the model on the device "cpu"; the original method passes a device index, which a CPU does not have."""
        return FullyShardedDataParallel(
            module=model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs
        )
