"""The meaning of the SageMaker SDK's ``distribution={...}`` for this launcher.

The SDK turns it into hyperparameters, by which sagemaker-training chooses mpirun, torchrun or another library to start
the ranks. Here, Lightning always starts the same ranks, one process per device on every trainer host.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from lightning_sm._log import command_logger
from lightning_sm.errors import TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.redaction import shown
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import DATA_GROUPS, DEVICES

_LOG = command_logger(__name__)

_SAME_RANKS = {
    "sagemaker_torch_distributed_enabled": "torchrun",
    "sagemaker_mpi_enabled": "mpirun",
    "sagemaker_pytorch_ddp_enabled": "mpirun",
}
_OTHER_LIBRARIES = {
    "mp_parameters": "smdistributed.modelparallel, which splits the model",
    "sagemaker_pytorch_xla_multi_worker_enabled": "the SageMaker Training Compiler (XLA)",
    "sagemaker_parameter_server_enabled": "TensorFlow's parameter server",
    "sagemaker_multi_worker_mirrored_strategy_enabled": "TensorFlow's MultiWorkerMirroredStrategy",
}
_PER_HOST = "sagemaker_mpi_num_of_processes_per_host"
_IN_ALL = "sagemaker_mpi_num_processes"
_MPI_OPTIONS = ("sagemaker_mpi_custom_mpi_options", "sagemaker_distributed_dataparallel_custom_mpi_options")
_GROUPS = "sagemaker_distribution_instance_groups"


def processes_per_host(job: SageMakerJob, topology: Topology) -> int | None:
    """Check the ``distribution`` that a job asks for, and log how this launcher differs.

    Returns:
        The number of processes that it asks for on each trainer host; None if it does not say.

    Raises:
        TopologyError: It contradicts the job, or asks for a library that only other images have.
    """
    asked = {name: _value(text) for name, text in job.hyperparameters.items()}
    for name, library in _OTHER_LIBRARIES.items():
        if asked.get(name):
            raise TopologyError(
                f"The hyperparameter {name} asks for {library}, which this image does not have. Remove it from "
                "distribution={...}. To use a strategy of Lightning, such as fsdp or deepspeed, set trainer.strategy."
            )
    _check_groups(asked.get(_GROUPS), topology)
    if job.asks_for_smddp:
        _LOG.info(
            "distribution={...} asks for smdistributed.dataparallel or pytorchddp, for which the SDK sends the same. "
            "This launcher starts the same ranks. With SageMakerCLI and SageMakerTrainer they use strategy=smddp, if "
            "the job supports it and the script names no other strategy."
        )
    starters = sorted({starter for name, starter in _SAME_RANKS.items() if asked.get(name)})
    if starters:
        _LOG.info(
            "distribution={...} asks for %s. This launcher starts the same ranks without it.",
            " and ".join(starters),
        )
    for name in _MPI_OPTIONS:
        if asked.get(name):
            _LOG.warning(
                "ignoring %s=%r: this launcher does not use mpirun. Set variables with Estimator(environment=...).",
                name,
                shown(name, asked[name]),
            )
    return _count(job, topology, asked)


def _check_groups(names: Any, topology: Topology) -> None:
    if names is None:
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TopologyError(f"The hyperparameter {_GROUPS} is {names!r}; expected a list of group names.")
    known = {group.name: group for group in topology.groups}
    training = [name for name, group in known.items() if group.hosts[0] in topology.trainer_hosts]
    if sorted(names) != sorted(training):
        data = [name for name in known if name not in training]
        raise TopologyError(
            f"distribution={{...}} names the instance groups {names} ({_GROUPS}), but the training groups are "
            f"{training}, and the data groups {data}.\n{topology.table()}\nSet distribution's instance_groups to the "
            f"training groups, leave it out, or choose the data groups by {DATA_GROUPS.name}=name,name (empty: none)."
        )


def _count(job: SageMakerJob, topology: Topology, asked: dict[str, Any]) -> int | None:
    per_host = _number(asked, _PER_HOST)
    in_all = _number(asked, _IN_ALL)
    if per_host is None:
        return None
    if job.devices not in (None, per_host):
        raise TopologyError(
            f"distribution={{...}} has {_PER_HOST}={per_host}, but {DEVICES.name} is {job.devices}. Remove one."
        )
    if in_all not in (None, per_host * topology.num_nodes):
        raise TopologyError(
            f"distribution={{...}} has {_IN_ALL}={in_all} and {_PER_HOST}={per_host}, but the number of trainer hosts "
            f"is {topology.num_nodes}.\n{topology.table()}\n"
            f"Remove {_IN_ALL}."
        )
    return per_host


def _number(asked: dict[str, Any], name: str) -> int | None:
    value = asked.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise TopologyError(f"The hyperparameter {name} is {value!r}; expected a positive whole number.")


def _value(text: str) -> Any:
    """Return the value of a hyperparameter: framework estimators write JSON, the generic one Python literals."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
