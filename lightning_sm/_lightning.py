"""The Lightning from which our classes derive, ``pytorch_lightning`` or ``lightning.pytorch``, chosen once, here.

The two distributions contain the same code, but their classes are different objects: a callback of one is not a
callback for the other. The one that the script imported first is chosen; if it imported neither, ``pytorch_lightning``
if it is installed. All other modules of lightning_sm import Lightning's names from this one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from lightning_sm._collector import pause_collector
from lightning_sm.errors import MixedLightningError

_DISTRIBUTIONS = ("pytorch_lightning", "lightning.pytorch")


def _choose() -> str:
    # sys.modules is in the order of import.
    imported = [name for name in sys.modules if name in _DISTRIBUTIONS]
    if imported:
        return imported[0]
    for name in _DISTRIBUTIONS:
        # find_spec of a dotted name would import the parent, and with it all of lightning.
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ModuleNotFoundError("lightning_sm needs PyTorch Lightning: pip install pytorch-lightning (or lightning).")


DISTRIBUTION = _choose()

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.loggers.logger import rank_zero_experiment
    from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning_fabric.utilities.distributed import _InfiniteBarrier as InfiniteBarrier
    from lightning_fabric.utilities.logger import _convert_params as convert_parameters
    from lightning_fabric.utilities.logger import _flatten_dict as flatten_parameters
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.callbacks import (
        BatchSizeFinder,
        Checkpoint,
        ModelCheckpoint,
        OnExceptionCheckpoint,
        ProgressBar,
        WeightAveraging,
    )
    from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
    from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
    from pytorch_lightning.loggers.csv_logs import ExperimentWriter as CSVWriter
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSamplerWrapper
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
    from pytorch_lightning.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        Strategy,
    )
    from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
    from pytorch_lightning.trainer.connectors import data_connector
    from pytorch_lightning.utilities import CombinedLoader, rank_zero_only
else:
    with pause_collector():
        _root = importlib.import_module(DISTRIBUTION)
    _callbacks = importlib.import_module(f"{DISTRIBUTION}.callbacks")
    _cli = importlib.import_module(f"{DISTRIBUTION}.cli")
    _fabric = "lightning_fabric" if DISTRIBUTION == "pytorch_lightning" else "lightning.fabric"
    _environments = importlib.import_module(f"{DISTRIBUTION}.plugins.environments")
    _loggers = importlib.import_module(f"{DISTRIBUTION}.loggers")
    _logger = importlib.import_module(f"{DISTRIBUTION}.loggers.logger")
    _strategies = importlib.import_module(f"{DISTRIBUTION}.strategies")
    _utilities = importlib.import_module(f"{DISTRIBUTION}.utilities")

    Callback = _root.Callback
    LightningDataModule = _root.LightningDataModule
    LightningModule = _root.LightningModule
    Trainer = _root.Trainer
    BatchSizeFinder = _callbacks.BatchSizeFinder
    Checkpoint = _callbacks.Checkpoint
    ModelCheckpoint = _callbacks.ModelCheckpoint
    OnExceptionCheckpoint = _callbacks.OnExceptionCheckpoint
    ProgressBar = _callbacks.ProgressBar
    # Exists since Lightning 2.6; in earlier versions, nothing is an instance of the empty tuple.
    WeightAveraging = getattr(_callbacks, "WeightAveraging", ())
    ArgsType = _cli.ArgsType
    LightningArgumentParser = _cli.LightningArgumentParser
    LightningCLI = _cli.LightningCLI
    ClusterEnvironment = _environments.ClusterEnvironment
    DDPStrategy = _strategies.DDPStrategy
    DeepSpeedStrategy = _strategies.DeepSpeedStrategy
    FSDPStrategy = _strategies.FSDPStrategy
    ModelParallelStrategy = _strategies.ModelParallelStrategy
    CSVLogger = _loggers.CSVLogger
    CSVWriter = importlib.import_module(f"{DISTRIBUTION}.loggers.csv_logs").ExperimentWriter
    DummyLogger = _logger.DummyLogger
    Fabric = importlib.import_module(_fabric).Fabric
    InfiniteBarrier = importlib.import_module(f"{_fabric}.utilities.distributed")._InfiniteBarrier
    IndexBatchSamplerWrapper = importlib.import_module(
        f"{DISTRIBUTION}.overrides.distributed"
    )._IndexBatchSamplerWrapper
    MLFlowLogger = _loggers.MLFlowLogger
    MultiProcessingLauncher = importlib.import_module(f"{DISTRIBUTION}.strategies.launchers")._MultiProcessingLauncher
    Strategy = _strategies.Strategy
    TensorBoardLogger = _loggers.TensorBoardLogger
    TorchCheckpointIO = importlib.import_module(f"{DISTRIBUTION}.plugins.io").TorchCheckpointIO
    WrappingCheckpointIO = importlib.import_module(f"{DISTRIBUTION}.plugins.io.wrapper")._WrappingCheckpointIO
    WandbLogger = _loggers.WandbLogger
    _parameters = importlib.import_module(f"{_fabric}.utilities.logger")
    convert_parameters = _parameters._convert_params
    data_connector = importlib.import_module(f"{DISTRIBUTION}.trainer.connectors.data_connector")
    CombinedLoader = _utilities.CombinedLoader
    flatten_parameters = _parameters._flatten_dict
    rank_zero_experiment = _logger.rank_zero_experiment
    rank_zero_only = _utilities.rank_zero_only

__all__ = [
    "DISTRIBUTION",
    "ArgsType",
    "BatchSizeFinder",
    "CSVLogger",
    "CSVWriter",
    "Callback",
    "Checkpoint",
    "ClusterEnvironment",
    "CombinedLoader",
    "DDPStrategy",
    "DeepSpeedStrategy",
    "DummyLogger",
    "FSDPStrategy",
    "Fabric",
    "IndexBatchSamplerWrapper",
    "InfiniteBarrier",
    "LightningArgumentParser",
    "LightningCLI",
    "LightningDataModule",
    "LightningModule",
    "MLFlowLogger",
    "ModelCheckpoint",
    "ModelParallelStrategy",
    "MultiProcessingLauncher",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "Strategy",
    "TensorBoardLogger",
    "TorchCheckpointIO",
    "Trainer",
    "WandbLogger",
    "WeightAveraging",
    "WrappingCheckpointIO",
    "check_same_distribution",
    "convert_parameters",
    "data_connector",
    "flatten_parameters",
    "rank_zero_experiment",
    "rank_zero_only",
]


def check_same_distribution(candidate: Any) -> None:
    """Refuse a class that derives from the other distribution of Lightning.

    Args:
        candidate: A model, data module or trainer class. Anything that is not a class passes.

    Raises:
        MixedLightningError: The class derives from the distribution that lightning_sm did not choose.
    """
    if not isinstance(candidate, type):
        return
    for other in _DISTRIBUTIONS:
        bases = [base for base in candidate.__mro__ if f"{base.__module__}.".startswith(f"{other}.")]
        if other != DISTRIBUTION and bases:
            raise MixedLightningError(
                f"{candidate.__qualname__} derives from {bases[0].__module__}.{bases[0].__qualname__}, but "
                f"lightning_sm was loaded with {DISTRIBUTION}, whose classes are different objects. "
                f"Import {other} before lightning_sm, and only one of {' and '.join(_DISTRIBUTIONS)} in a script."
            )
