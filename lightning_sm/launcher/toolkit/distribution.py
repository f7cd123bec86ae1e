"""The meaning of the SageMaker SDK's ``distribution={...}`` for this launcher.

The SDK turns it into hyperparameters, by which sagemaker-training chooses mpirun, torchrun or another library to start
the ranks. Here, they only say how many ranks there are on each trainer host: the launcher starts them itself.
"""

from __future__ import annotations

import shlex
from typing import Any

from lightning_sm._log import command_logger
from lightning_sm.errors import TopologyError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import toolkit_value
from lightning_sm.job.model_parallel import requested_model_parallelism
from lightning_sm.job.redaction import shown_arguments
from lightning_sm.job.topology import Role, Topology
from lightning_sm.job.variables import DATA_GROUPS, DEVICES, PREFIX

_LOG = command_logger(__name__)

_STARTERS = {
    "sagemaker_torch_distributed_enabled": "torchrun",
    "sagemaker_mpi_enabled": "mpirun",
    "sagemaker_pytorch_ddp_enabled": "mpirun",
}
_OTHER_LIBRARIES = {
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
        The number of processes on each trainer host that the job states, by ``LIGHTNING_SM_DEVICES`` or by its
        ``distribution``; None if it states none.

    Raises:
        TopologyError: It contradicts the job, or asks for a library that only other images have.
        StrategyError: It asks for model parallelism that no strategy has, or that contradicts itself or the job.
    """
    asked = {name: toolkit_value(text) for name, text in job.hyperparameters.items()}
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
    split = requested_model_parallelism(job.hyperparameters)
    if split is not None:
        _LOG.info(
            "%s. This is %s here, with SageMakerCLI, SageMakerTrainer, and a Trainer whose strategy has this name.",
            split.source,
            split,
        )
    count = _count(job, topology, asked)
    starters = sorted({starter for name, starter in _STARTERS.items() if asked.get(name)})
    for name in _MPI_OPTIONS:
        variables, ignored = _mpi_options(asked.get(name))
        settings = [variable for variable in variables if variable.startswith(PREFIX)]
        if settings:
            raise TopologyError(
                f"{name} has -x {settings[0]}=..., which reaches the script only, but the launcher reads it, too. Set "
                "it with Estimator(environment=...)."
            )
        if ignored:
            _LOG.warning(
                "ignoring %s of %s: this launcher does not use mpirun. It sets the variables of -x NAME=value.",
                shlex.join(shown_arguments(ignored)),
                name,
            )
    if topology.role is Role.DATA:
        return count
    if count is None and (starters or job.asks_for_smddp or split is not None):
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
    """Return the variables that ``custom_mpi_options`` of a job sets for its script on trainer hosts, and log them.

    Args:
        job: The job.
        topology: Its hosts.

    Source:
        sagemaker-training 5.1, ``mpi.MasterRunner``: it splits the options at spaces, passes ``-x NAME=value`` on to
        mpirun, which overrides the variable, and turns ``--NCCL_DEBUG value`` into one.
    """
    if topology.role is Role.DATA:
        return {}
    variables: dict[str, str] = {}
    for name in _MPI_OPTIONS:
        found, _ = _mpi_options(toolkit_value(job.hyperparameters.get(name, "")))
        variables |= found
        if found:
            _LOG.info("setting %s, as %s has it.", ", ".join(found), name)
    return variables


def _mpi_options(options: Any) -> tuple[dict[str, str], list[str]]:
    """Return the variables that options of mpirun set, and the other options."""
    variables: dict[str, str] = {}
    others: list[str] = []
    words = iter(options.split() if isinstance(options, str) else ())
    for word in words:
        if word == "--NCCL_DEBUG":
            variables["NCCL_DEBUG"] = next(words, "")
        elif word == "-x":
            name, is_set, value = next(words, "").partition("=")
            if is_set:  # otherwise it passes a variable on, which the script has anyway
                variables[name] = value
        else:
            others.append(word)
    return variables, others


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
        return job.devices
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
