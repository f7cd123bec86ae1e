"""EveryHost: raise an error if training does not span all trainer hosts of the job."""

from __future__ import annotations

from typing import Any

from lightning_sm._lightning import Fabric, LightningModule, Strategy, Trainer
from lightning_sm._unlisted import UnlistedCallback
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import SEPARATE_HOSTS
from lightning_sm.training.cluster_checks import check_num_nodes


class EveryHost(UnlistedCallback):
    """A callback that checks how many hosts a ``Trainer`` or ``Fabric`` spans, before the first step.

    With ``num_nodes=1``, the usual default of scripts and of LightningCLI, each host would train a separate model.
    Nothing would fail, and the job's result would be the model of one host.

    Args:
        topology: Roles and ranks of all hosts.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the hosts of a fit. Other stages may run on one host: Lightning recommends testing on one device.

        Raises:
            TopologyError: The fit spans fewer or more hosts than the job has trainer hosts.
        """
        if stage == "fit":
            self._check("Trainer", trainer.strategy)

    def on_after_setup(self, fabric: Fabric, module: Any) -> None:
        """Check the hosts of a ``Fabric`` once it has set up a model.

        Raises:
            TopologyError: Fabric spans fewer or more hosts than the job has trainer hosts.
        """
        self._check("Fabric", fabric.strategy)

    def _check(self, name: str, strategy: Strategy | Any) -> None:
        num_nodes = getattr(strategy, "num_nodes", 1)  # single-host strategies lack the attribute
        alone = ": each of these hosts would train a model of its own, on all samples" if num_nodes == 1 else ""
        advice = (
            f"Set num_nodes={self._topology.num_nodes}. SageMakerCLI in place of LightningCLI, SageMakerTrainer and "
            f"SageMakerFabric set it in every job. To train separately on each host, set {SEPARATE_HOSTS.name}=1 in "
            "the job's environment."
        )
        check_num_nodes(num_nodes, self._topology, f"{name}(num_nodes={num_nodes})", advice, alone)
