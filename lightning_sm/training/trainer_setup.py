"""What a SageMaker job adds to a Trainer: cluster environment, callbacks, folders, durable checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sm._lightning import Callback, ClusterEnvironment, Trainer
from lightning_sm.errors import OutputDirectoryError, TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.training.callbacks.line_progress import own_progress
from lightning_sm.training.callbacks.local_position import LocalPosition
from lightning_sm.training.callbacks.outputs import JobOutputs
from lightning_sm.training.callbacks.spot_checkpoint import SpotCheckpoint
from lightning_sm.training.callbacks.step_report import step_reports
from lightning_sm.training.checkpoints.durable_io import make_durable
from lightning_sm.training.environment import SageMakerEnvironment


class TrainerSetup:
    """Adds to a Trainer what the job needs, and leaves alone what the user has set.

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
        self._callbacks: list[Callback] = [LocalPosition(), *step_reports(), self._outputs]

    def arguments(
        self, given: Mapping[str, Any], callbacks: Iterable[Callback], config: str | None = None
    ) -> dict[str, Any]:
        """Return the ``plugins`` and ``callbacks`` for the Trainer, which include the given ones.

        Args:
            given: The user's arguments of the Trainer, or those that a ``trainer_class`` function accepts.
            callbacks: All callbacks of the user's, from wherever they come.
            config: The resolved configuration as YAML, to be saved next to the model; None if there is none.

        Raises:
            TopologyError: The user gave another cluster environment.
        """
        self._outputs.config = config
        plugins = as_list(given.get("plugins"))
        arguments = {"plugins": self._with_environment(plugins, given.get("strategy"))}
        own = list(self._callbacks)
        if given.get("enable_progress_bar") is not False and not given.get("barebones"):
            own[:0] = own_progress(callbacks)
        arguments["callbacks"] = [*as_list(given.get("callbacks")), *own]
        return arguments

    def complete(self, trainer: Trainer) -> None:
        """Add what needs the finished Trainer.

        Raises:
            TopologyError: The Trainer, which a function of the user's made, did not get the cluster environment.
        """
        used = getattr(trainer.strategy, "cluster_environment", None)
        if self._environment.num_nodes > 1 and not isinstance(used, SageMakerEnvironment):
            raise TopologyError(
                f"The job has {self._environment.num_nodes} trainer hosts, but the Trainer that the function given as "
                f"trainer_class returned runs on {trainer.num_nodes} with {type(used).__name__}. Give the function "
                "parameters plugins and num_nodes, and pass them on to Trainer."
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # A function given as trainer_class need not have a parameter for them.
        callbacks.extend(callback for callback in self._callbacks if callback not in callbacks)
        self._outputs.route_checkpoints(trainer)
        if self._job.checkpoint_dir is not None:
            make_durable(trainer, self._job.checkpoint_dir)
        # Added afterwards: a Trainer that gets a Checkpoint callback does not add its default ModelCheckpoint.
        if not any(isinstance(callback, SpotCheckpoint) for callback in callbacks):
            callbacks.append(SpotCheckpoint(self._job.checkpoint_dir or self._job.host_output_dir / "checkpoints"))
        self._environment.announce(trainer.num_devices)

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


def as_list(value: Any) -> list[Any]:
    """Return the items of an argument that takes one item, a list, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_writable(folder: Path) -> None:
    """Fail at the start instead of hours later, at the first result."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputDirectoryError(
            f"{folder} is not writable ({error}). SageMaker mounts it writable: look for a read-only mount, a full "
            "disk, or a container user without permission."
        ) from error
