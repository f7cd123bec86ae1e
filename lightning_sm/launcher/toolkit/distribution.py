"""How this launcher interprets the SageMaker SDK's ``distribution={...}``.

The SDK turns it into hyperparameters, which tell sagemaker-training to start the ranks with mpirun, torchrun or another
library. Here, they only set the number of ranks per trainer host: the launcher starts the ranks itself.
"""

from __future__ import annotations

from typing import Any

from lightning_sm._log import command_logger
from lightning_sm.errors import TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import toolkit_value
from lightning_sm.job.model_parallel import requested_model_parallelism
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_GROUPS, DEVICES

_LOG = command_logger(__name__)

_STARTERS = {
    "sagemaker_torch_distributed_enabled": "torchrun",
    "sagemaker_mpi_enabled": "mpirun",
    "sagemaker_pytorch_ddp_enabled": "mpirun",
    "sagemaker_distributed_dataparallel_enabled": "smdistributed.dataparallel or pytorchddp",
}
_PER_HOST = "sagemaker_mpi_num_of_processes_per_host"
_MPI_OPTIONS = ("sagemaker_mpi_custom_mpi_options", "sagemaker_distributed_dataparallel_custom_mpi_options")
_GROUPS = "sagemaker_distribution_instance_groups"


def processes_per_host(job: SageMakerJob, topology: Topology) -> int | None:
    """Check the ``distribution`` that a job asks for, and log what this launcher does differently.

    Returns:
        The number of processes per trainer host, set by ``LIGHTNING_SM_DEVICES`` or ``distribution``; None if neither
        sets it.

    Raises:
        TopologyError: ``distribution`` contradicts the job.
        StrategyError: ``distribution`` requests model parallelism that no strategy supports, or that is contradictory.
    """
    asked = {name: toolkit_value(text) for name, text in job.hyperparameters.items()}
    _check_groups(asked.get(_GROUPS), topology)
    split = requested_model_parallelism(job.hyperparameters)
    if split is not None:
        _LOG.info(
            "%s. Here, this becomes %s with SageMakerCLI, SageMakerTrainer, or a Trainer whose strategy has this name.",
            split.source,
            split,
        )
    count = _count(job, asked)
    starters = sorted({starter for name, starter in _STARTERS.items() if asked.get(name)})
    if topology.role is Role.DATA:
        return count
    if count is None and (starters or split is not None):
        count = job.num_gpus or 1
    if split is not None:
        split.check_world_size((count or 1) * topology.num_nodes)
    if starters:
        _LOG.info(
            "distribution={...} asks for %s. This launcher starts the same ranks itself: %d on each trainer host.",
            " and ".join(starters),
            count,
        )
    return count


def exported_variables(job: SageMakerJob, topology: Topology) -> dict[str, str]:
    """Return the variables that a job's ``custom_mpi_options`` set for the script on trainer hosts, and log them.

    Args:
        job: The job.
        topology: The job's hosts.

    Source:
        sagemaker-training 5.1, ``mpi.MasterRunner``: it splits the options at spaces, passes ``-x NAME=value`` on to
        mpirun, which overrides the variable, and turns ``--NCCL_DEBUG value`` into a variable.
    """
    if topology.role is Role.DATA:
        return {}
    variables: dict[str, str] = {}
    for name in _MPI_OPTIONS:
        options = toolkit_value(job.hyperparameters.get(name, ""))
        words = iter(options.split() if isinstance(options, str) else ())
        for word in words:
            if word == "--NCCL_DEBUG":
                variables["NCCL_DEBUG"] = next(words, "")
            elif word == "-x":
                variable, is_set, value = next(words, "").partition("=")
                if is_set:  # otherwise, -x passes on a variable that the script inherits anyway
                    variables[variable] = value
    if variables:
        _LOG.info("setting %s from custom_mpi_options, whose other options only concern mpirun.", ", ".join(variables))
    return variables


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
            f"training groups, leave it out, or choose the data groups with {DATA_GROUPS.name}=name,name (empty: none)."
        )


def _count(job: SageMakerJob, asked: dict[str, Any]) -> int | None:
    per_host = asked.get(_PER_HOST)
    if per_host is None:
        return job.devices
    if not isinstance(per_host, int) or isinstance(per_host, bool) or per_host < 1:
        raise TopologyError(f"The hyperparameter {_PER_HOST} is {per_host!r}; expected a positive whole number.")
    if job.devices not in (None, per_host):
        raise TopologyError(
            f"distribution={{...}} has {_PER_HOST}={per_host}, but {DEVICES.name} is {job.devices}. Remove one."
        )
    return per_host
