"""The choice between ``pytorch_lightning`` and ``lightning.pytorch``, from which this package's classes derive.

The two distributions contain the same code, but their classes are different objects: a callback from one distribution
is not a callback for the other. This module chooses the one that the script imported first; if the script imported
neither, the module chooses ``pytorch_lightning`` if that is installed. All other modules of lightning_sm import
Lightning's names from this one.
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
    # sys.modules is in import order.
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
    from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning_fabric.utilities.data import _replace_dunder_methods as replace_dunder_methods
    from lightning_fabric.utilities.data import sized_len
    from lightning_fabric.utilities.distributed import _destroy_dist_connection as destroy_dist_connection
    from lightning_fabric.utilities.distributed import _InfiniteBarrier as InfiniteBarrier
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.callbacks import (
        BatchSizeFinder,
        Checkpoint,
        GradientAccumulationScheduler,
        LambdaCallback,
        LearningRateFinder,
        ModelCheckpoint,
        ModelPruning,
        ProgressBar,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
    from pytorch_lightning.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
        Strategy,
    )
    from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
    from pytorch_lightning.trainer import call
    from pytorch_lightning.trainer.connectors import data_connector
    from pytorch_lightning.utilities import CombinedLoader, parsing, rank_zero_only
else:
    # Lightning's names by module; private names lose their underscore. Lightning before 2.6 lacks WeightAveraging, so
    # it becomes an empty tuple, of which nothing is an instance.
    _FABRIC = "lightning_fabric" if DISTRIBUTION == "pytorch_lightning" else "lightning.fabric"
    _NAMES = {
        DISTRIBUTION: "Callback LightningDataModule LightningModule Trainer",
        f"{DISTRIBUTION}.callbacks": "BatchSizeFinder Checkpoint GradientAccumulationScheduler LambdaCallback "
        "LearningRateFinder ModelCheckpoint ModelPruning ProgressBar StochasticWeightAveraging WeightAveraging",
        f"{DISTRIBUTION}.cli": "ArgsType LightningArgumentParser LightningCLI",
        f"{DISTRIBUTION}.loggers": "CSVLogger TensorBoardLogger WandbLogger",
        f"{DISTRIBUTION}.loggers.logger": "DummyLogger",
        f"{DISTRIBUTION}.plugins.environments": "ClusterEnvironment",
        f"{DISTRIBUTION}.plugins.io": "TorchCheckpointIO",
        f"{DISTRIBUTION}.plugins.io.wrapper": "_WrappingCheckpointIO",
        f"{DISTRIBUTION}.strategies": "DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy "
        "SingleDeviceStrategy Strategy",
        f"{DISTRIBUTION}.strategies.launchers": "_MultiProcessingLauncher",
        f"{DISTRIBUTION}.trainer": "call",
        f"{DISTRIBUTION}.trainer.connectors": "data_connector",
        f"{DISTRIBUTION}.utilities": "CombinedLoader parsing rank_zero_only",
        _FABRIC: "Fabric",
        f"{_FABRIC}.utilities.data": "_replace_dunder_methods sized_len",
        f"{_FABRIC}.utilities.distributed": "_InfiniteBarrier _destroy_dist_connection",
    }
    with pause_collector():
        for _module, _names in _NAMES.items():
            for _name in _names.split():
                _default = ((),) if _name == "WeightAveraging" else ()
                globals()[_name.lstrip("_")] = getattr(importlib.import_module(_module), _name, *_default)


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
                f"Import {other} before lightning_sm, and only one of {' and '.join(_DISTRIBUTIONS)} in a script. If a "
                f"library chose {other} because both are installed, uninstall {other.partition('.')[0]}."
            )
