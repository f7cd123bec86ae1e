"""The strategy that stands for SageMaker's model parallel library, as the SDK's ``distribution={...}`` configures it.

``distribution={"smdistributed": {"modelparallel": {"enabled": True, "parameters": {...}}}}`` reaches the job as the
hyperparameter ``mp_parameters``. The library (SMP v1) is in no image with a torch that this project supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_sm.errors import StrategyError
from lightning_sm.job.hyperparameters import toolkit_value

_HYPERPARAMETER = "mp_parameters"
_PIPELINE = "pipeline_parallel_degree"

_SCHEDULES = {"interleaved": "1f1b", "simple": "gpipe"}
_BACKENDS = {"auto": None, "nccl": "nccl"}
# The one value of a parameter that needs nothing here, and what to do instead of the others.
_ACCEPTED: Mapping[str, tuple[Any, str]] = {
    "auto_partition": (
        True,
        "Instead of smp.partition, list the layers that begin a stage: split of PipelineParallelStrategy",
    ),
    "load_partition": (False, "List the layers that begin a stage: split of PipelineParallelStrategy"),
    "horovod": (False, "Set ddp to true instead"),
    "fp16": (False, "Set trainer.precision to bf16-mixed or bf16-true instead"),
    "fp16_params": (False, "Set trainer.precision to bf16-true instead"),
    "bf16": (False, "Set trainer.precision to bf16-true instead"),
    "offload_activations": (False, "Call layers by torch.utils.checkpoint instead"),
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
    "hybrid_shard_degree": (1, "It is SMP v2's, which shards by FSDP: use strategy=fsdp or ModelParallelStrategy"),
    "sm_activation_offloading": (False, "It is SMP v2's: use strategy=fsdp with activation checkpointing"),
    "context_parallel_degree": (1, "No strategy here splits sequences"),
    "expert_parallel_degree": (1, "No strategy here spreads experts"),
}
# Parameters that change nothing here, whatever their value.
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
    "sdp_gradient_clipping",
    "sdp_hierarchical_allgather",
    "sdp_max_live_parameters",
    "sdp_param_persistence_threshold",
    "sdp_reduce_bucket_size",
    "skip_tracing",
}
_READ = {
    "partitions",
    _PIPELINE,
    "microbatches",
    "active_microbatches",
    "pipeline",
    "placement_strategy",
    "ddp",
    "ddp_dist_backend",
}


@dataclass(frozen=True)
class ModelParallelism:
    """What a job asks for by ``smdistributed.modelparallel``.

    Attributes:
        asked: The parameters of ``modelparallel``.
        strategy: The strategy: "ddp" if the model is not split.
        options: Arguments of ``PipelineParallelStrategy``; empty for "ddp".
        ranks: Processes for one replica of the model.
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
        """What asks for it, for messages."""
        asked = ", ".join(f"{name}={value}" for name, value in self.asked.items())
        return f"distribution={{...}} asks for smdistributed.modelparallel ({asked})"

    def check_world_size(self, world_size: int) -> None:
        """Check the number of training processes.

        Args:
            world_size: The number.

        Raises:
            StrategyError: It does not consist of whole replicas, or of several although ``ddp`` is not set.
        """
        if world_size % self.ranks:
            raise StrategyError(
                f"{self.source}, hence {self.ranks} processes for each replica of the model, but the number of "
                f"training processes is {world_size}, which is not a multiple. Change one of them."
            )
        if world_size != self.ranks and not self.has_replicas:
            raise StrategyError(
                f"{self.source}, hence {self.ranks} process{'' if self.ranks == 1 else 'es'} for the one replica of "
                f"the model, but the number of training processes is {world_size}. Set ddp to true for several "
                "replicas, or change one of them."
            )


def requested_model_parallelism(hyperparameters: Mapping[str, str]) -> ModelParallelism | None:
    """Return what a job asks for by ``smdistributed.modelparallel``; None if it does not.

    Args:
        hyperparameters: The content of ``hyperparameters.json``.

    Raises:
        StrategyError: Parameters are unknown, contradict each other, or have values that no strategy has.

    Source:
        SageMaker Python SDK v2, doc/api/training/smd_model_parallel_general.rst and ``fw_utils.get_mp_parameters``;
        v3, ``sagemaker.train.distributed.SMP``.
    """
    asked = toolkit_value(hyperparameters.get(_HYPERPARAMETER, "{}"))
    if not asked:
        return None
    if not isinstance(asked, dict) or not all(isinstance(name, str) for name in asked):
        raise StrategyError(f"The hyperparameter {_HYPERPARAMETER} is {asked!r}; expected a dict of parameters.")
    return _Parameters(asked).result()


class _Parameters:
    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked

    def result(self) -> ModelParallelism:
        unknown = sorted(self._asked.keys() - _ACCEPTED.keys() - _WITHOUT_EFFECT - _READ)
        if unknown:
            raise self._error(
                f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} unknown",
                f"Known are {', '.join(sorted({*_ACCEPTED, *_WITHOUT_EFFECT, *_READ}))}",
            )
        for name, (accepted, remedy) in _ACCEPTED.items():
            if self._asked.get(name, accepted) != accepted:
                raise self._error(f"{name}={self._asked[name]!r} has no counterpart here", remedy)
        pipeline = self._pipeline_size()
        has_replicas = self._flag("ddp", False)
        microbatches = self._number("microbatches", 1)
        schedule = self._one_of("pipeline", "interleaved", _SCHEDULES)
        self._check_active(pipeline, microbatches, schedule)
        options = {
            "pipeline_parallel_size": pipeline,
            "data_parallel_size": "auto" if has_replicas else 1,
            "num_microbatches": microbatches,
            "schedule": schedule,
            "placement": self._placement(),
        }
        backend = self._one_of("ddp_dist_backend", "auto", _BACKENDS)
        if backend is not None:
            options["process_group_backend"] = backend
        if pipeline == 1:
            return ModelParallelism(self._asked, "ddp", has_replicas=has_replicas)
        return ModelParallelism(self._asked, "pipeline", options, pipeline, has_replicas)

    def _pipeline_size(self) -> int:
        sizes = {name: self._number(name, 1) for name in ("partitions", _PIPELINE) if name in self._asked}
        if len(set(sizes.values())) > 1:
            raise self._error(
                " and ".join(f"{name}={size}" for name, size in sizes.items()) + " contradict each other",
                "They are two names of one number: remove one",
            )
        return next(iter(sizes.values()), 1)

    def _check_active(self, pipeline: int, microbatches: int, schedule: str) -> None:
        kept = min(microbatches, pipeline) if schedule == "1f1b" else microbatches
        if pipeline > 1 and self._number("active_microbatches", kept) < kept:
            raise self._error(
                f"active_microbatches={self._asked['active_microbatches']} is less than the {kept} microbatches whose "
                f"activations schedule={schedule} holds",
                f"Remove it or set it to {kept}"
                + ("" if schedule == "1f1b" else "; pipeline=interleaved holds those of one for each partition"),
            )

    def _placement(self) -> str:
        value = str(self._asked.get("placement_strategy", "cluster"))
        # The last letter has neighbouring ranks: of data, pipeline and tensor parallelism.
        letters = {"cluster": "DPT", "spread": "TPD"}.get(value, value)
        if sorted(letters) != sorted("DPT"):
            raise self._error(
                f"placement_strategy={value!r} is none of cluster, spread and the permutations of DPT", "Correct it"
            )
        return "cluster" if letters.index("D") < letters.index("P") else "spread"

    def _number(self, name: str, default: int) -> int:
        value = self._asked.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(f"{name}={value!r} is not a positive whole number", "Correct it")
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self._asked.get(name, default)
        if not isinstance(value, bool):
            raise self._error(f"{name}={value!r} is neither true nor false", "Correct it")
        return value

    def _one_of(self, name: str, default: str, meanings: Mapping[str, Any]) -> Any:
        value = self._asked.get(name, default)
        if not isinstance(value, str) or value not in meanings:
            raise self._error(f"{name}={value!r} is not one of {', '.join(meanings)}", "Choose one of them")
        return meanings[value]

    @staticmethod
    def _error(problem: str, remedy: str) -> StrategyError:
        return StrategyError(
            f"distribution={{...}} asks for smdistributed.modelparallel ({_HYPERPARAMETER}), which is "
            f"strategy=pipeline here, but {problem}. {remedy}."
        )
