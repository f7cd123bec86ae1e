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
_SPLITS = {"memory": "parameters", "speed": "time"}
# The weights of memory with which SMP balances partitions: those of its two defaults, and the two extremes.
_SPLITS_BY_WEIGHT = {0.0: "time", 0.2: "time", 0.8: "parameters", 1.0: "parameters"}
# Orders of data, pipeline and tensor parallelism, whose last letter has neighbouring ranks.
_ORDERS = {"DPT": "cluster", "PDT": "spread"}
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
    "offload_activations": (False, "Set activation_checkpointing of PipelineParallelStrategy instead"),
    "delayed_parameter_initialization": (False, "Build the network under torch.device('meta') instead"),
    "sharded_data_parallel_degree": (1, "Use strategy=fsdp or ModelParallelStrategy, or shard_optimizer_state"),
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
    "partition_file",
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
    "optimize",
    "memory_weight",
    "placement_strategy",
    "ddp",
    "ddp_dist_backend",
    "tensor_parallel_degree",
    "prescaled_batch",
    "shard_optimizer_state",
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
        tensor = self._number("tensor_parallel_degree", 1)
        shard = self._flag("shard_optimizer_state", False)
        has_replicas = self._flag("ddp", False)
        microbatches = self._number("microbatches", 1)
        schedule = self._one_of("pipeline", "interleaved", _SCHEDULES)
        self._check_active(pipeline, microbatches, schedule)
        options = {
            "pipeline_parallel_size": pipeline,
            "data_parallel_size": "auto" if has_replicas else 1,
            "num_microbatches": microbatches,
            "schedule": schedule,
            "placement": self._placement(tensor),
            "split": self._split(),
        }
        if shard or tensor > 1:
            self._check_whole_groups(pipeline, tensor, shard=shard, has_replicas=has_replicas)
            options |= {"shard": True, "tensor_parallel_size": tensor}
        backend = self._one_of("ddp_dist_backend", "auto", _BACKENDS)
        if backend is not None:
            options["process_group_backend"] = backend
        if pipeline == 1:
            return ModelParallelism(self._asked, "ddp", has_replicas=has_replicas)
        return ModelParallelism(self._asked, "pipeline", options, pipeline * tensor, has_replicas)

    def _pipeline_size(self) -> int:
        sizes = {name: self._number(name, 1) for name in ("partitions", _PIPELINE) if name in self._asked}
        if len(set(sizes.values())) > 1:
            raise self._error(
                " and ".join(f"{name}={size}" for name, size in sizes.items()) + " contradict each other",
                "They are two names of one number: remove one",
            )
        return next(iter(sizes.values()), 1)

    def _check_whole_groups(self, pipeline: int, tensor: int, *, shard: bool, has_replicas: bool) -> None:
        if pipeline == 1:
            given = "shard_optimizer_state=True" if shard else f"tensor_parallel_degree={tensor}"
            raise self._error(
                f"{given} with a {_PIPELINE} of 1 is no pipeline",
                "Remove modelparallel from distribution, and set trainer.strategy to fsdp or ModelParallelStrategy",
            )
        if shard and not has_replicas:
            raise self._error(
                "shard_optimizer_state=True and ddp=False contradict each other",
                "Shards are spread over replicas: set ddp to true",
            )
        if tensor > 1 and not self._flag("prescaled_batch", False):
            raise self._error(
                f"tensor_parallel_degree={tensor} without prescaled_batch=True gives each rank other samples",
                "Here the ranks of a tensor-parallel group get the same batch: set prescaled_batch to true, and check "
                "the batch size, which is then that of the group",
            )

    def _check_active(self, pipeline: int, microbatches: int, schedule: str) -> None:
        kept = min(microbatches, pipeline) if schedule == "1f1b" else microbatches
        if pipeline > 1 and self._number("active_microbatches", kept) < kept:
            raise self._error(
                f"active_microbatches={self._asked['active_microbatches']} is less than the {kept} microbatches whose "
                f"activations schedule={schedule} holds",
                f"Remove it or set it to {kept}"
                + ("" if schedule == "1f1b" else "; pipeline=interleaved holds those of one for each partition"),
            )

    def _placement(self, tensor: int) -> str:
        value = self._asked.get("placement_strategy", "cluster")
        letters = {"cluster": "DPT", "spread": "TPD"}.get(str(value), str(value))
        if sorted(letters) != sorted("DPT"):
            raise self._error(
                f"placement_strategy={value!r} is none of cluster, spread and the permutations of DPT", "Correct it"
            )
        if tensor == 1:
            letters = letters.replace("T", "") + "T"
        if letters not in _ORDERS:
            raise self._error(
                f"placement_strategy={value!r} with tensor_parallel_degree={tensor} has tensor-parallel ranks apart "
                "from each other",
                "Here they are always neighbours: use DPT (cluster) or PDT",
            )
        return _ORDERS[letters]

    def _split(self) -> str:
        split = self._one_of("optimize", "memory", _SPLITS)
        weight = self._asked.get("memory_weight")
        if weight is None:
            return str(split)
        if isinstance(weight, bool) or weight not in _SPLITS_BY_WEIGHT:
            raise self._error(
                f"memory_weight={weight!r} has no counterpart here",
                "Stages are balanced by parameters (1.0, or 0.8) or by time (0.0, or 0.2)",
            )
        if "optimize" in self._asked and _SPLITS_BY_WEIGHT[weight] != split:
            raise self._error(
                f"optimize={self._asked['optimize']} and memory_weight={weight} contradict each other",
                "Remove one: stages are balanced by parameters (memory) or by time (speed)",
            )
        return _SPLITS_BY_WEIGHT[weight]

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
