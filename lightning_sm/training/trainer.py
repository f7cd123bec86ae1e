"""SageMakerTrainer and SageMakerFabric: the counterparts of SageMakerCLI for scripts without LightningCLI."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from lightning_sm._lightning import DummyLogger, Fabric, check_same_distribution
from lightning_sm.data.service import serve
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.data.trainer.remote_trainer import fetch_in_fabric
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from lightning_sm.training.callbacks.outputs import JobOutputs
from lightning_sm.training.fetching_trainer import FetchingTrainer
from lightning_sm.training.group_exit import leave_at_exit
from lightning_sm.training.process import prepare_host
from lightning_sm.training.strategies.choice import refuse_in_fabric
from lightning_sm.training.trainer_setup import TrainerSetup, as_list, cluster_arguments


class SageMakerTrainer(FetchingTrainer):
    """A ``Trainer`` for scripts without LightningCLI that run unchanged on a laptop, on one host and on a cluster.

    Outside SageMaker, it behaves like ``Trainer``. In a SageMaker job, it also

    - sets ``num_nodes`` and the cluster environment, and also the number of devices if a launcher such as torchrun
      determines it;
    - uses the strategy that the SDK's ``distribution`` asks for, if the user has chosen none: ``SMDDPStrategy``, if the
      job supports it, or ``PipelineParallelStrategy`` for ``smdistributed.modelparallel``;
    - writes TensorBoard logs, CSV logs and checkpoints to the folders that SageMaker uploads during training if the job
      has them, and otherwise to the output data directory (one folder per host). Relative folders in
      ``default_root_dir``, TensorBoard and CSV loggers, and ``ModelCheckpoint`` become relative to these folders;
    - makes TensorBoard and W&B continue the curves of earlier attempts after a restart;
    - saves a checkpoint when the job is interrupted, and resumes from the latest valid one (see ``SpotCheckpoint``);
    - writes the best model to the model directory at the end of ``fit``;
    - logs progress line by line, unless the user has another progress bar;
    - runs the workers of its loaders on the data hosts, if the job has data groups. On data hosts, the first ``fit``,
      ``validate``, ``test`` or ``predict`` serves batches until the trainers have finished, then exits.

    The script must read hyperparameters and channels itself: the launcher passes hyperparameters as ``--name=value``,
    and ``SageMakerJob.from_environment()`` provides the channel folders.

    Args:
        data_service: Settings of the data service.
        **kwargs: Arguments of ``Trainer``. They take precedence; a value that contradicts the cluster is an error.

    Raises:
        JobConfigError: The job's files are malformed.
        TopologyError: ``num_nodes`` or ``devices`` contradict the cluster, or there is another cluster environment.
        StrategyError: ``distribution`` asks for model parallelism, but ``strategy`` is another strategy.
        OutputDirectoryError: A directory of the job is not writable.
        MixedLightningError: A callback, or the model or DataModule passed to a method such as ``fit``, derives from the
            other distribution of Lightning.
    """

    def __init__(self, *, data_service: DataServiceSettings | None = None, **kwargs: Any) -> None:
        callbacks = as_list(kwargs.get("callbacks"))
        for callback in callbacks:
            check_same_distribution(type(callback))
        # A Trainer that SageMakerCLI creates is already set up.
        is_set_up = any(isinstance(callback, JobOutputs) for callback in callbacks)
        self._job = None if is_set_up else SageMakerJob.from_environment()
        self._data_service = data_service or DataServiceSettings()
        if self._job is None:
            leave_at_exit()
            super().__init__(**kwargs)
            return
        self._topology, environment = prepare_host(self._job)
        if environment is None:
            # Use the CPU: a data host never trains, and may lack the user's accelerator.
            super().__init__(accelerator="cpu", devices=1, logger=DummyLogger(), enable_checkpointing=False)
            return
        setup = TrainerSetup(self._job, environment)
        super().__init__(**{**kwargs, **setup.arguments(kwargs, callbacks)})
        setup.complete(self)

    def _fetch(self, given: Iterable[Any]) -> None:
        """Set up fetching from the data hosts for a method call; on a data host, serve batches, then exit."""
        if self._job is not None and self._topology.data_hosts:
            if self._topology.role is Role.DATA:
                serve(self._job, self._topology, self._data_service)
                sys.exit(0)
            self._connection = ServiceConnection.of_job(self._job, self._topology, self._data_service)
        super()._fetch(given)


class SageMakerFabric(Fabric):
    """A ``Fabric`` for scripts that run unchanged on a laptop, on one host and on a cluster.

    Outside SageMaker, it behaves like ``Fabric``. In a SageMaker job, it also sets ``num_nodes``, the cluster
    environment, and the number of devices if a launcher determines it. If the job has data hosts, the workers of
    loaders passed to ``setup_dataloaders`` run there. The script itself must write logs and checkpoints, save the
    model, and resume; ``SageMakerJob.from_environment()`` provides the folders. Fabric has no hook for interruptions.

    Args:
        **kwargs: Arguments of ``Fabric``. They take precedence; a value that contradicts the cluster is an error.

    Raises:
        JobConfigError: The job's files are malformed.
        TopologyError: ``num_nodes`` or ``devices`` contradict the cluster, or this host serves data.
        StrategyError: ``distribution`` asks for model parallelism, which Fabric does not support.
    """

    def __init__(self, **kwargs: Any) -> None:
        job = SageMakerJob.from_environment()
        self._data_hosts: tuple[SageMakerJob, Topology] | None = None
        if job is None:
            leave_at_exit()
        else:
            topology, environment = prepare_host(job)
            refuse_in_fabric(job)
            if topology.data_hosts:
                self._data_hosts = job, topology
            if environment is None:
                super().__init__(accelerator="cpu", devices=1)
                return
            kwargs.update(cluster_arguments(environment, kwargs))
            kwargs["plugins"] = [*as_list(kwargs.get("plugins")), environment]
        super().__init__(**kwargs)
        if self._data_hosts is not None:
            connection = ServiceConnection.of_job(*self._data_hosts, DataServiceSettings())
            fetch_in_fabric(self, connection)

    def setup_dataloaders(self, *dataloaders: Any, **kwargs: Any) -> Any:
        """Set up loaders; on a data host, serve batches until the trainers have finished, then exit.

        Args:
            *dataloaders: The loaders.
            **kwargs: Arguments of ``Fabric.setup_dataloaders``.
        """
        if self._data_hosts is not None and self._data_hosts[1].role is Role.DATA:
            serve(*self._data_hosts, DataServiceSettings())
            sys.exit(0)
        return super().setup_dataloaders(*dataloaders, **kwargs)
