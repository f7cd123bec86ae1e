"""Run PyTorch Lightning on Amazon SageMaker clusters with one unmodified script.

Public names are loaded on first use (PEP 562): the launcher and the emulator start without torch, which costs 2 to
5 s and 1 GB of address space per process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sm.callbacks.local_position import LocalPosition
    from lightning_sm.callbacks.spot import SpotCheckpoint
    from lightning_sm.cli import SageMakerCLI
    from lightning_sm.data.batch_types import register_batch_type
    from lightning_sm.data.host import DataHost
    from lightning_sm.data.module import RemoteDataModule
    from lightning_sm.data.settings import DataServiceSettings
    from lightning_sm.environment import SageMakerEnvironment
    from lightning_sm.job import Channel, InstanceGroup, SageMakerJob
    from lightning_sm.topology import Role, Topology

__version__ = "0.1.0"

__all__ = [
    "Channel",
    "DataHost",
    "DataServiceSettings",
    "InstanceGroup",
    "LocalPosition",
    "RemoteDataModule",
    "Role",
    "SageMakerCLI",
    "SageMakerEnvironment",
    "SageMakerJob",
    "SpotCheckpoint",
    "Topology",
    "__version__",
    "register_batch_type",
]

_MODULE_OF = {
    "Channel": "lightning_sm.job",
    "DataHost": "lightning_sm.data.host",
    "DataServiceSettings": "lightning_sm.data.settings",
    "InstanceGroup": "lightning_sm.job",
    "LocalPosition": "lightning_sm.callbacks.local_position",
    "RemoteDataModule": "lightning_sm.data.module",
    "Role": "lightning_sm.topology",
    "SageMakerCLI": "lightning_sm.cli",
    "SageMakerEnvironment": "lightning_sm.environment",
    "SageMakerJob": "lightning_sm.job",
    "SpotCheckpoint": "lightning_sm.callbacks.spot",
    "Topology": "lightning_sm.topology",
    "register_batch_type": "lightning_sm.data.batch_types",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
