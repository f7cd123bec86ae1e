"""The strategy that replaces SageMaker's model parallel library, configured by the SDK's ``distribution={...}``.

``distribution={"smdistributed": {"modelparallel": {"enabled": True, "parameters": {...}}}}`` reaches the job as the
hyperparameter ``mp_parameters``. No image with a supported torch version contains the library (SMP v1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from lightning_sm.errors import StrategyError
from lightning_sm.job.hyperparameters import toolkit_value

_HYPERPARAMETER = "mp_parameters"

# Orders of data (D), pipeline (P) and tensor (T) parallelism; ranks that differ only in the last one are neighbours.
_PLACEMENTS = {
    **dict.fromkeys(("cluster", "DPT", "DTP", "TDP"), "cluster"),
    **dict.fromkeys(("spread", "PDT", "PTD", "TPD"), "spread"),
}
# For each parameter, the only accepted value, and what to do instead of setting another one.
_ACCEPTED: Mapping[str, tuple[Any, str]] = {
    "auto_partition": (
        True,
        "Instead of smp.partition, use PipelineParallelStrategy's split to list the layers that begin a stage",
    ),
    "load_partition": (False, "Use PipelineParallelStrategy's split to list the layers that begin a stage"),
    "horovod": (False, "Set ddp to true instead"),
    "fp16": (False, "Set trainer.precision to bf16-mixed or bf16-true instead"),
    "fp16_params": (False, "Set trainer.precision to bf16-true instead"),
    "bf16": (False, "Set trainer.precision to bf16-true instead"),
    "offload_activations": (False, "Call layers through torch.utils.checkpoint instead"),
    "delayed_parameter_initialization": (False, "Build the network under torch.device('meta') instead"),
    "shard_optimizer_state": (
        False,
        "Remove modelparallel from distribution, and set trainer.strategy to fsdp or ModelParallelStrategy (FSDP2)",
    ),
    "tensor_parallel_degree": (
        1,
        "Remove modelparallel from distribution, and set trainer.strategy to ModelParallelStrategy",
    ),
    "sharded_data_parallel_degree": (1, "Use strategy=fsdp or ModelParallelStrategy"),
    "active_microbatches": (
        None,
        "Remove it: the activations of all microbatches are held; use smaller batches with accumulate_grad_batches",
    ),
}
# Parameters that have no effect here, whatever their value.
_WITHOUT_EFFECT = {
    "activation_loading_horizon",
    "allow_empty_shards",
    "contiguous",
    "ddp_port",
    "default_partition",
    "deterministic_server",
    "fsdp_cache_flush_warnings",
    "memory_weight",
    "optimize",
    "partition_file",
    "prescaled_batch",
    "random_seed",
    "skip_tracing",
}
_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters that have a counterpart in this package, with the library's defaults."""

    partitions: _Size | None = None
    pipeline_parallel_degree: _Size | None = None
    microbatches: _Size = 1
    # Both mean the strategy's only order: all forward passes of a step, then all backward passes.
    pipeline: Literal["interleaved", "simple"] = "interleaved"
    placement_strategy: Literal["cluster", "spread", "DPT", "DTP", "TDP", "PDT", "PTD", "TPD"] = "cluster"
    ddp: bool = False
    ddp_dist_backend: Literal["auto", "nccl"] = "auto"


@dataclass(frozen=True)
class ModelParallelism:
    """The model parallelism that a job requests with ``smdistributed.modelparallel``.

    Attributes:
        asked: The parameters of ``modelparallel``.
        strategy: The strategy; "ddp" if the model is not split.
        options: Arguments of ``PipelineParallelStrategy``; empty for "ddp".
        ranks: Number of processes per replica of the model.
        has_replicas: Whether there may be several replicas.
    """

    asked: Mapping[str, Any]
    strategy: Literal["ddp", "pipeline"]
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    has_replicas: bool = False

    def __str__(self) -> str:
        """Return the strategy and its options."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"strategy={self.strategy}" + (f" with {options}" if options else "")

    @property
    def source(self) -> str:
        """The source of the request, for messages."""
        asked = ", ".join(f"{name}={value}" for name, value in self.asked.items())
        return f"distribution={{...}} asks for smdistributed.modelparallel ({asked})"

    def check_world_size(self, world_size: int) -> None:
        """Check that the training processes form whole replicas of the model.

        Args:
            world_size: Number of training processes.

        Raises:
            StrategyError: The processes do not form a whole number of replicas, or form several although ``ddp`` is not
                set.
        """
        if world_size % self.ranks or (world_size != self.ranks and not self.has_replicas):
            raise StrategyError(
                f"{self.source}, which takes {self.ranks} processes for each replica of the model, but the number of "
                f"training processes is {world_size}. Change one of the numbers; several replicas need ddp set to true."
            )


def requested_model_parallelism(hyperparameters: Mapping[str, str]) -> ModelParallelism | None:
    """Return the model parallelism that a job requests with ``smdistributed.modelparallel``, or None.

    Args:
        hyperparameters: The content of ``hyperparameters.json``.

    Raises:
        StrategyError: Parameters are unknown, contradict each other, or have values that no strategy supports.

    Source:
        SageMaker Python SDK v2, doc/api/training/smd_model_parallel_general.rst and ``fw_utils.get_mp_parameters``;
        v3, ``sagemaker.train.distributed.SMP``.
    """
    asked = toolkit_value(hyperparameters.get(_HYPERPARAMETER, "{}"))
    if not asked:
        return None
    if not isinstance(asked, dict) or not all(isinstance(name, str) for name in asked):
        raise StrategyError(f"The hyperparameter {_HYPERPARAMETER} is {asked!r}; expected a dict of parameters.")
    for name, (accepted, remedy) in _ACCEPTED.items():
        if asked.get(name, accepted) != accepted:
            raise _error(f"{name}={asked[name]!r} has no counterpart here", remedy)
    read = {name: value for name, value in asked.items() if name not in _ACCEPTED.keys() | _WITHOUT_EFFECT}
    try:
        parameters = msgspec.convert(read, _Parameters)
    except msgspec.ValidationError as error:
        names = ", ".join(sorted({*_ACCEPTED, *_WITHOUT_EFFECT, *_Parameters.__struct_fields__}))
        raise _error(
            f"{', '.join(f'{name}={value!r}' for name, value in read.items())}: {error}", f"Known parameters: {names}"
        ) from error
    return _strategy(asked, parameters)


def _strategy(asked: Mapping[str, Any], wanted: _Parameters) -> ModelParallelism:
    sizes = {wanted.partitions, wanted.pipeline_parallel_degree} - {None}
    if len(sizes) > 1:
        raise _error(
            f"partitions={wanted.partitions} and pipeline_parallel_degree={wanted.pipeline_parallel_degree} contradict "
            "each other",
            "They are two names for one number: remove one",
        )
    pipeline = wanted.partitions or wanted.pipeline_parallel_degree or 1
    options = {
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": "auto" if wanted.ddp else 1,
        "num_microbatches": wanted.microbatches,
        "placement": _PLACEMENTS[wanted.placement_strategy],
    }
    if wanted.ddp_dist_backend != "auto":
        options["process_group_backend"] = wanted.ddp_dist_backend
    if pipeline == 1:
        return ModelParallelism(asked, "ddp", has_replicas=wanted.ddp)
    return ModelParallelism(asked, "pipeline", options, pipeline, wanted.ddp)


def _error(problem: str, remedy: str) -> StrategyError:
    return StrategyError(
        f"distribution={{...}} asks for smdistributed.modelparallel ({_HYPERPARAMETER}), which is strategy=pipeline "
        f"here, but {problem}. {remedy}."
    )
