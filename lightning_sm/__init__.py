"""Run PyTorch Lightning on Amazon SageMaker clusters with one unmodified script.

The names in ``__all__`` are the public API; everything else may change without notice. Public names are loaded on first
use (PEP 562), so that the commands start without torch, which costs 2 to 5 s and 1 GB of address space per process.
Importing the package registers the strategies with Lightning's Trainer, for ``Trainer(strategy="pipeline")``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_sm._version import __version__
from lightning_sm.training.strategies.registry import register_with_lightning

if TYPE_CHECKING:
    from lightning_sm.data.host.data_host import DataHost
    from lightning_sm.data.settings import DataServiceSettings
    from lightning_sm.data.trainer.datamodule import RemoteDataModule
    from lightning_sm.job.facts import Channel, InstanceGroup, SageMakerJob
    from lightning_sm.job.topology import Role, Topology
    from lightning_sm.submit.submit_job import submit_job
    from lightning_sm.training.callbacks.local_position import LocalPosition
    from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint
    from lightning_sm.training.cli import SageMakerCLI
    from lightning_sm.training.environment import SageMakerEnvironment
    from lightning_sm.training.gradient_norm import gradient_norm
    from lightning_sm.training.process import prepare_process
    from lightning_sm.training.strategies.pipeline.strategy import PipelineParallelStrategy
    from lightning_sm.training.strategies.smddp import SMDDPStrategy
    from lightning_sm.training.trainer import SageMakerFabric, SageMakerTrainer

__all__ = [
    "Channel",
    "DataHost",
    "DataServiceSettings",
    "InstanceGroup",
    "LocalPosition",
    "PipelineParallelStrategy",
    "RemoteDataModule",
    "Role",
    "SMDDPStrategy",
    "SageMakerCLI",
    "SageMakerEnvironment",
    "SageMakerFabric",
    "SageMakerJob",
    "SageMakerTrainer",
    "SpotCheckpoint",
    "Topology",
    "__version__",
    "gradient_norm",
    "prepare_process",
    "submit_job",
]

_MODULE_OF = {
    "Channel": "lightning_sm.job.facts",
    "DataHost": "lightning_sm.data.host.data_host",
    "DataServiceSettings": "lightning_sm.data.settings",
    "InstanceGroup": "lightning_sm.job.facts",
    "LocalPosition": "lightning_sm.training.callbacks.local_position",
    "PipelineParallelStrategy": "lightning_sm.training.strategies.pipeline.strategy",
    "RemoteDataModule": "lightning_sm.data.trainer.datamodule",
    "Role": "lightning_sm.job.topology",
    "SMDDPStrategy": "lightning_sm.training.strategies.smddp",
    "SageMakerCLI": "lightning_sm.training.cli",
    "SageMakerEnvironment": "lightning_sm.training.environment",
    "SageMakerFabric": "lightning_sm.training.trainer",
    "SageMakerJob": "lightning_sm.job.facts",
    "SageMakerTrainer": "lightning_sm.training.trainer",
    "SpotCheckpoint": "lightning_sm.training.callbacks.spot_checkpoint",
    "Topology": "lightning_sm.job.topology",
    "gradient_norm": "lightning_sm.training.gradient_norm",
    "prepare_process": "lightning_sm.training.process",
    "submit_job": "lightning_sm.submit.submit_job",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        try:
            return getattr(importlib.import_module(_MODULE_OF[name]), name)
        except AttributeError as error:  # "from lightning_sm import ..." would report it as a missing name
            raise ImportError(f"Cannot import {_MODULE_OF[name]}: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_lightning()
