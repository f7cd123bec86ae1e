"""A SageMaker job's additions to a Trainer: cluster environment, callbacks, folders and durable checkpoints."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sm._lightning import Callback, ClusterEnvironment, ModelCheckpoint, Trainer
from lightning_sm.errors import OutputDirectoryError, TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.timing.step_times import StepTimes
from lightning_sm.training.callbacks.failing_rank import FailingRank
from lightning_sm.training.callbacks.heartbeat import Heartbeat
from lightning_sm.training.callbacks.line_progress import own_progress
from lightning_sm.training.callbacks.local_position import LocalPosition
from lightning_sm.training.callbacks.mid_epoch import MidEpoch
from lightning_sm.training.callbacks.outputs import JobOutputs
from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint
from lightning_sm.training.checkpoints.auto_resume import CheckpointLoader
from lightning_sm.training.checkpoints.durable_io import make_durable
from lightning_sm.training.checkpoints.sharded import install_shard_hooks
from lightning_sm.training.environment import SageMakerEnvironment
from lightning_sm.training.loggers import continue_runs, default_logger, is_fixed
from lightning_sm.training.process import prepare_process
from lightning_sm.training.strategies.choice import distribution_arguments


class TrainerSetup:
    """The setup of a Trainer for a job; it does not override the user's settings.

    Args:
        job: The job.
        environment: The job's cluster environment.

    Raises:
        OutputDirectoryError: A folder of the job is not writable.
    """

    def __init__(self, job: SageMakerJob, environment: SageMakerEnvironment) -> None:
        for folder in (job.model_dir, job.host_output_dir, job.checkpoint_dir, job.tensorboard_dir):
            if folder is not None:
                _check_writable(folder)
        self._job = job
        self._environment = environment
        self._outputs = JobOutputs(job)
        # Put Heartbeat before the user's callbacks: it must report an epoch's end before they run, which may take time.
        self._first: list[Callback] = [FailingRank(), Heartbeat(), MidEpoch()]
        self._callbacks: list[Callback] = [LocalPosition(), StepTimes(job), self._outputs]

    def arguments(
        self, given: Mapping[str, Any], callbacks: Iterable[Callback], config: str | None = None
    ) -> dict[str, Any]:
        """Return arguments for the Trainer: the cluster's size, folders, strategy, plugins and callbacks.

        Args:
            given: The user's arguments for the Trainer; if ``trainer_class`` is a function, only those that it accepts.
            callbacks: All of the user's callbacks, from every source.
            config: The resolved configuration as YAML, to save next to the model; None if there is none.

        Raises:
            TopologyError: The user set a value that contradicts the cluster, or passed another cluster environment.
            StrategyError: The job asks for model parallelism, but the user has chosen another strategy.
        """
        self._outputs.config = config
        strategy = given.get("strategy")
        arguments: dict[str, Any] = {
            **cluster_arguments(self._environment, given),
            **distribution_arguments(self._job, self._environment.num_nodes, strategy),
            **self._folders(given),
            "plugins": self._with_environment(as_list(given.get("plugins")), strategy),
        }
        own = list(self._callbacks)
        if given.get("enable_progress_bar") is not False and not given.get("barebones"):
            own[:0] = own_progress(callbacks)
        arguments["callbacks"] = [*self._first, *as_list(given.get("callbacks")), *own]
        return arguments

    def complete(self, trainer: Trainer) -> None:
        """Make the additions that need the finished Trainer.

        Raises:
            TopologyError: The user's function made the Trainer without the cluster environment.
        """
        used = getattr(trainer.strategy, "cluster_environment", None)
        if self._environment.num_nodes > 1 and not isinstance(used, SageMakerEnvironment):
            raise TopologyError(
                f"The job has {self._environment.num_nodes} trainer hosts, but the function passed as trainer_class "
                f"made a Trainer with num_nodes={trainer.num_nodes} and {type(used).__name__}. Add the parameters "
                "plugins and num_nodes to the function, and pass them on to Trainer."
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # Add missing callbacks: a function passed as trainer_class may not have the parameter callbacks.
        callbacks[:0] = [callback for callback in self._first if callback not in callbacks]
        callbacks.extend(callback for callback in self._callbacks if callback not in callbacks)
        CheckpointLoader.of(trainer, self._job)
        continue_runs(trainer, self._job)
        self._outputs.route_folders(trainer)
        if self._job.checkpoint_dir is not None:
            make_durable(trainer, self._job.checkpoint_dir)
        install_shard_hooks(trainer)
        # Add SpotCheckpoint last: a Trainer that gets a Checkpoint callback does not add its default ModelCheckpoint.
        if not any(isinstance(callback, SpotCheckpoint) for callback in callbacks):
            callbacks.append(SpotCheckpoint(self._job.checkpoint_dir or self._job.host_output_dir / "checkpoints"))
        if sum(isinstance(callback, ModelCheckpoint) for callback in callbacks) == 1:
            # Lightning counts SpotCheckpoint, too; ckpt_path="best" means the first callback.
            warnings.filterwarnings("ignore", message=".*configured with multiple `ModelCheckpoint`")
        # Announce only now: the user may have passed another SageMakerEnvironment.
        environment = used if isinstance(used, SageMakerEnvironment) else self._environment
        prepare_process(environment).announce(environment, trainer.num_devices)

    def _folders(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``default_root_dir``, and the job's ``logger`` if the user has chosen none."""
        root = given.get("default_root_dir")
        moved = {"default_root_dir": str(self._job.host_output_dir / (root or ""))}
        folders: dict[str, Any] = {} if is_fixed(root) else moved
        chosen = default_logger(self._job, given.get("logger"), barebones=given.get("barebones"))
        if chosen is not None:
            folders["logger"] = chosen
        return folders

    def _with_environment(self, plugins: Sequence[Any], strategy: Any) -> list[Any]:
        candidates = [*plugins, getattr(strategy, "cluster_environment", None)]
        environments = [candidate for candidate in candidates if isinstance(candidate, ClusterEnvironment)]
        if not environments:
            return [*plugins, self._environment]
        if not isinstance(environments[0], SageMakerEnvironment):
            where = "trainer.plugins" if environments[0] in plugins else "trainer.strategy"
            name = type(environments[0]).__name__
            raise TopologyError(
                f"{where} has {name}, but the job adds SageMakerEnvironment, which also supports torchrun and mpirun. "
                f"Remove {name} from {where}."
            )
        return list(plugins)


def cluster_arguments(environment: SageMakerEnvironment, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's or Fabric's ``num_nodes``, and ``devices`` if a launcher sets their number.

    Args:
        environment: The job's cluster environment.
        given: The user's ``num_nodes`` and ``devices``. The job determines a value that is missing or None, and also
            replaces ``num_nodes=1``: scripts pass on this Lightning default from their arguments, and a job with
            several trainer hosts cannot train on only one of them.

    Raises:
        TopologyError: The user set a value that contradicts the cluster.
    """
    stated_nodes = None if given.get("num_nodes") == 1 else given.get("num_nodes")
    stated_devices = _num_devices(given.get("devices"))
    environment.validate_settings(
        num_devices=stated_devices if stated_devices is not None else environment.devices or 1,
        num_nodes=environment.num_nodes if stated_nodes is None else stated_nodes,
    )
    arguments = {"num_nodes": environment.num_nodes}
    if environment.devices is not None and stated_devices is None:
        arguments["devices"] = environment.devices
    return arguments


def as_list(value: Any) -> list[Any]:
    """Return the items of an argument that may be one item, a list, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_writable(folder: Path) -> None:
    """Raise now if a folder is not writable, rather than hours later, when the first result is written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputDirectoryError(
            f"{folder} is not writable ({error}). SageMaker mounts it writable: check for a read-only mount, a full "
            "disk, or a container user without permission."
        ) from error


def _num_devices(setting: Any) -> int | None:
    """Return the number of processes per host in a ``devices`` setting; None if it states no number ("auto", -1)."""
    if isinstance(setting, str):
        numbers = [part for part in setting.split(",") if part.strip()]
        if not all(part.strip().lstrip("-").isdecimal() for part in numbers):
            return None  # "auto", or invalid: Lightning's own check reports it
        setting = int(numbers[0]) if len(numbers) == 1 else numbers
    if isinstance(setting, list):
        return len(setting)
    return setting if isinstance(setting, int) and setting > 0 else None
