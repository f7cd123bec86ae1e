"""PipelineParallelStrategy: the stages of a network on several ranks, and several replicas of such pipelines."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

from lightning_sm._lightning import (
    DDPStrategy,
    LightningModule,
    Trainer,
    WeightAveraging,
)
from lightning_sm._table import draw_table
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.balance import balanced, explicit_split
from lightning_sm.training.strategies.pipeline.checkpoint import LogicalCheckpoint, synchronize
from lightning_sm.training.strategies.pipeline.evaluation import Evaluation
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.gradients import StepGradients, average, clip_by_norm
from lightning_sm.training.strategies.pipeline.layers import Network, measured_seconds, num_trainable
from lightning_sm.training.strategies.pipeline.loaders import FollowingLoader
from lightning_sm.training.strategies.pipeline.placement import Placement, PlacementOrder, grid
from lightning_sm.training.strategies.pipeline.rows import num_microbatches, num_rows, rows_of, tensors_of
from lightning_sm.training.strategies.pipeline.schedules import (
    SCHEDULES,
    ScheduleName,
    ScheduleRunner,
    chunks_of,
)
from lightning_sm.training.strategies.pipeline.steps import UserSteps

logger = logging.getLogger(__name__)

_OLDEST_TORCH = "2.14"
_NO_SMDDP = "A pipeline needs a process group for each replica, and SMDDP has only one. Use nccl."
_TIMEOUT = timedelta(minutes=30)  # torch's and Lightning's default


class PipelineParallelStrategy(DDPStrategy):
    """A strategy that spreads the layers of a model over several processes, with data parallelism over the rest.

    The LightningModule is an ordinary one: its network is an ``nn.Sequential``, or a module with a method
    ``pipeline_layers()`` that returns its layers in order; ``training_step`` calls the network once. Each process
    keeps its stages of the network. Logged values, metrics, the returned loss, gradient accumulation, clipping,
    schedulers, validation, test and prediction are those of DDP with one process for each replica, and so are
    checkpoints: one file, from which any number of stages, or a single process, can resume.

    Args:
        pipeline_parallel_size: Processes for one replica of the model; "auto": those of a host, or of all hosts if each
            has one.
        data_parallel_size: Replicas; "auto": as many as the processes make up.
        num_microbatches: Number of microbatches per step. With fewer, ranks wait longer for each other; choose at
            least as many as there are stages. Batches are cut into equal parts, as many as possible up to this number.
        schedule: Order of forward and backward passes; all but "gpipe" and "1f1b" have several stages on a rank.
        chunks: Stages on each rank; None: the number that the schedule needs, or 2 if it can have any.
        placement: "cluster": the ranks of a replica are neighbours, mostly on one host; "spread": they are as far apart
            as possible, so that replicas of a stage are neighbours.
        network: Name of the network in the LightningModule; None: its only child that can be cut.
        split: Where the network is cut: "parameters" balances their number, "time" the measured time of the layers,
            which needs ``example_input_array``; a list names the layer that begins each stage but the first.
        process_group_backend: As for DDP.
        timeout: Time after which waiting for another process is an error.

    Raises:
        StrategyError: An argument is invalid. Later, in ``setup``: the model or the Trainer cannot be pipelined.
    """

    def __init__(  # noqa: PLR0917  # as Lightning's strategies
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        num_microbatches: int = 4,
        schedule: ScheduleName = "1f1b",
        chunks: int | None = None,
        placement: PlacementOrder = "cluster",
        network: str | None = None,
        split: Literal["parameters", "time"] | list[int | str] = "parameters",
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if TorchVersion(torch.__version__) < _OLDEST_TORCH:
            raise StrategyError(
                f"strategy=pipeline needs torch {_OLDEST_TORCH} or newer, and this is {torch.__version__}. With torch "
                "2.6 the first step hangs, and versions in between are untested. Update torch, or use strategy=fsdp."
            )
        if num_microbatches < 1:
            raise StrategyError(f"num_microbatches={num_microbatches} is not at least 1.")
        if placement not in ("cluster", "spread"):
            raise StrategyError(f"placement={placement!r} is neither 'cluster' nor 'spread'.")
        if isinstance(split, str) and split not in ("parameters", "time"):
            raise StrategyError(f"split={split!r} is neither 'parameters', 'time' nor a list of layers.")
        if process_group_backend == "smddp":
            raise StrategyError(_NO_SMDDP)
        self._sizes = (pipeline_parallel_size, data_parallel_size)
        self._num_microbatches = num_microbatches
        self._schedule = schedule
        self._chunks = chunks_of(schedule, chunks)
        self._order = placement
        self._network_name = network
        self._split = split
        self._placement: Placement | None = None
        self._cut_module: LightningModule | None = None
        self._is_sync_blocked = False
        self._is_told = False

    # Ranks

    def setup_environment(self) -> None:
        """Connect the ranks, and make the groups of replicas and stages.

        Raises:
            StrategyError: The sizes do not make up the world size.
        """
        super().setup_environment()
        if self._placement is not None:
            return
        if dist.get_backend() == "smddp":
            raise StrategyError(_NO_SMDDP)
        p, d = grid(self.world_size, self.num_processes, *self._sizes)
        is_v_shaped = SCHEDULES[self._schedule].is_v_shaped
        self._placement = Placement(p, d, self._order, self._chunks, is_v_shaped)
        shape, names = self._placement.mesh
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._data_group = mesh["data"].get_group()
        ranks = self._placement.ranks(self._placement.replica(self.global_rank))
        self._replica = Replica(mesh["pipeline"].get_group(), ranks, self.root_device)

    @property
    def placement(self) -> Placement:
        """Which rank holds which stages of which replica.

        Raises:
            StrategyError: The ranks are not connected yet.
        """
        if self._placement is None:
            raise StrategyError("The placement of the stages is unknown before the setup hook.")
        return self._placement

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Number of replicas, and this rank's: all ranks of a replica train on the same samples."""
        placement = self.placement
        return {"num_replicas": placement.data_size, "rank": placement.replica(self.global_rank)}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas: a sum over all ranks would count each replica once for every rank.

        Args:
            tensor: A tensor; other values are returned as they are.
            group: The group; None: this rank's group of replicas.
            reduce_op: "mean" or "sum", or an operation of torch.
        """
        return super().reduce(tensor, group or self._data_group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the replicas, as ``reduce`` does.

        Args:
            tensor: A tensor of any shape.
            group: The group; None: this rank's group of replicas.
            sync_grads: Whether gradients flow back.
        """
        return super().all_gather(tensor, group or self._data_group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return the same decision on all ranks.

        Args:
            decision: This rank's decision.
            all: Whether all ranks must agree; otherwise, one suffices.
        """
        agreeing = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(agreeing)
        return bool(agreeing == self.world_size if all else agreeing > 0)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Give all ranks of the replica the batch of its first rank, after the hooks for its transfer.

        Otherwise, the user's random transforms and samplers could give the stages different batches.

        Args:
            batch: The batch.
            device: This rank's device.
            dataloader_idx: Index of the loader.
        """
        if self._replica.position == 0:
            batch = super().batch_to_device(batch, device, dataloader_idx)
        return self._replica.broadcast(batch, 0)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let only the first rank of a replica fetch batches, if the loader has a length.

        Args:
            dataloader: A loader of the Trainer's.
        """
        trainer = self._module.trainer
        # Prediction needs the loader on every rank, to tell writers of predictions which samples a batch has.
        if self._replica.position == 0 or trainer.predicting:
            return dataloader
        try:
            len(dataloader)
        except (TypeError, NotImplementedError):
            return dataloader
        return FollowingLoader(dataloader, trainer)

    # The model

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded after ``setup``: yes, when each rank has only its stages."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """Cut the network, and set up the part that this rank keeps.

        Args:
            trainer: The Trainer.

        Raises:
            StrategyError: The model or the Trainer cannot be pipelined; the message has the reason.
        """
        module = self._module
        if module is not self._cut_module:
            self._refuse(trainer, module)
            self._cut(module)
            self._cut_module = module
        # Not DDP's setup, which wraps the model, and copies rank 0's weights to ranks with other stages.
        super(DDPStrategy, self).setup(trainer)
        if self._replica.position > 0:
            # All ranks get the batch of the first rank, which has called the user's hook on it.
            module._on_before_batch_transfer = lambda batch, dataloader_idx=0: batch  # type: ignore[method-assign]
        synchronize(module, self._data_group, dist.get_process_group_ranks(self._data_group)[0])
        # Clip by the norm of all stages' gradients. clip_gradients of module and plugin then work unchanged.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, for this rank's parameters.

        Args:
            trainer: The Trainer.
        """
        super().setup_optimizers(trainer)
        own = {id(parameter) for parameter in self._module.parameters()}
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            # LightningCLI makes the optimizer of --optimizer with all parameters, before the network is cut.
            # SageMakerCLI replaces them by the module's, but the strategy also works without SageMakerCLI.
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]

    @property
    def _module(self) -> LightningModule:
        module: Any = self.lightning_module
        return cast(LightningModule, module)

    def _setup_model(self, model: Any) -> Any:
        return model

    @staticmethod
    def _refuse(trainer: Any, module: Any) -> None:
        name = type(module).__name__
        reasons = {
            f"{name} uses manual optimization, so that its training_step steps the optimizer itself. Set "
            "automatic_optimization = True": not module.automatic_optimization,
            f"{name} is compiled as a whole. Compile the layers of its network": module._compiler_ctx is not None,
            "the precision scales the loss (16-mixed). Use bf16-mixed": getattr(
                trainer.precision_plugin, "scaler", None
            )
            is not None,
            "sync_batchnorm=True is for ranks with the same layers. Use GroupNorm or LayerNorm": (
                trainer.strategy._layer_sync is not None
            ),
            "a logger has log_graph=True, which runs the model on rank 0 alone. Remove it": any(
                getattr(log, "_log_graph", False) for log in trainer.loggers
            ),
        }
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging) or type(callback).__name__ == "StochasticWeightAveraging":
                reasons[f"{type(callback).__name__} copies the whole model. Remove it"] = True
        found = [reason for reason, applies in reasons.items() if applies]
        if found:
            raise StrategyError(
                f"strategy=pipeline cannot train this: {'; '.join(found)}. Or use strategy=ddp or fsdp."
            )

    def _cut(self, module: LightningModule) -> None:
        placement = self.placement
        network = Network(module, self._network_name)
        num_layers, num_stages = len(network.layers), placement.num_stages
        if num_layers < num_stages:
            raise StrategyError(
                f"Too few layers in {network.name} ({num_layers}) for {num_stages} stages ({placement.pipeline_size} "
                f"ranks x {placement.chunks} stages on each). Choose a smaller pipeline_parallel_size"
                + (", or a schedule with one stage on each rank, such as 1f1b." if placement.chunks > 1 else ".")
            )
        self._checkpoint = LogicalCheckpoint(module, self._replica, is_written=placement.replica(self.global_rank) == 0)
        parts = self._parts(module, network)
        for stage, part in enumerate(parts):
            if num_trainable([network.layers[i] for i in part]) == 0:
                raise StrategyError(
                    f"Stage {stage} ({_named(network, part)}) has nothing to train, and its optimizer would be empty. "
                    "Use fewer stages, or cut elsewhere with split=[...]."
                )
        own = {stage: network.stage(parts[stage]) for stage in placement.stages(self._replica.position)}
        self._report(network, parts)
        network.remove([part for stage, part in enumerate(parts) if stage not in own])
        evaluation = Evaluation(own, placement, self._replica, self._num_microbatches, self.root_device)
        self._steps = UserSteps(module, network.module, network.name, evaluation, self._data_group)
        self._runner = ScheduleRunner(
            own, placement, self._replica.group, self.root_device, self._schedule, self._microbatch_loss
        )

    def _parts(self, module: LightningModule, network: Network) -> list[range]:
        num_stages = self.placement.num_stages
        if isinstance(self._split, list):
            return explicit_split(self._split, network.names, num_stages)
        if self._split == "parameters":
            sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in network.layers]
            return balanced(sizes, num_stages)
        if module.example_input_array is None:
            raise StrategyError(
                f"split=time measures the layers on {type(module).__name__}.example_input_array, which is not set. "
                "Set it to an input of forward, or use split=parameters."
            )
        measured = self._measured(module, network) if self.global_rank == 0 else []
        return self.broadcast(measured)

    def _measured(self, module: LightningModule, network: Network) -> list[range]:
        example = module.example_input_array
        inputs = UserSteps.network_inputs(module, network.module, example)
        inputs = tuple(value.to(self.root_device) if isinstance(value, Tensor) else value for value in inputs)
        return balanced(measured_seconds(network, inputs, self.root_device), self.placement.num_stages)

    def _report(self, network: Network, parts: Sequence[range]) -> None:
        """Log which ranks hold which layers."""
        hosts = [""] * self.world_size
        topology = getattr(self.cluster_environment, "topology", None)
        dist.all_gather_object(hosts, f"host {self.node_rank}" if topology is None else topology.current_host)
        if self.global_rank != 0:
            return
        placement = self.placement
        rows = []
        for stage, part in enumerate(parts):
            position = placement.position_of(stage)
            ranks = [placement.ranks(replica)[position] for replica in range(placement.data_size)]
            parameters = sum(p.numel() for i in part for p in network.layers[i].parameters())
            held_by = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
            rows.append((stage, held_by, _named(network, part), f"{parameters:,}"))
        p, d = placement.pipeline_size, placement.data_size
        logger.info(
            "Pipeline over %d ranks, %d replica%s (%s), schedule %s, up to %d microbatches\n%s",
            p,
            d,
            "" if d == 1 else "s",
            placement.order,
            self._schedule,
            self._num_microbatches,
            draw_table(rows, ("stage", "ranks, by replica", "layers", "parameters")),
        )

    # Steps

    def training_step(self, *arguments: Any) -> Any:
        """Run a step over all stages.

        Args:
            arguments: Those of the LightningModule's ``training_step``; the first is the batch.

        Returns:
            What ``training_step`` returns for the whole batch, with a loss whose ``backward`` delivers the gradients.
        """
        batch, *rest = arguments
        rows = num_rows(batch)
        microbatches = num_microbatches(rows, self._num_microbatches)
        self._tell_once(rows, microbatches)
        size = rows // microbatches
        self._parts_of_step = [
            (rows_of(batch, rows, slice(i * size, (i + 1) * size)), *rest) for i in range(microbatches)
        ]
        placement = self.placement
        last = placement.position_of(placement.num_stages - 1)
        with self.precision_plugin.train_step_context():
            inputs = self._steps.capture(arguments, rows) if self._replica.position == 0 else ()
            with StepGradients(self._module) as gradients:
                output = self._runner.step(inputs, microbatches, _shapes(batch))
            output = self._replica.broadcast(output, last)
            result = self._steps.replay(arguments, output)
        self._parts_of_step.clear()
        if isinstance(result, Mapping):
            return {**result, "loss": gradients.loss(result["loss"], self._average)}
        return gradients.loss(result, self._average)

    def _microbatch_loss(self, output: Any, index: int) -> Tensor:
        return self._steps.loss(self._parts_of_step[index], output)

    def _average(self, parameters: Sequence[Any]) -> None:
        if self.placement.data_size > 1 and not self._is_sync_blocked:
            average(parameters, self._data_group, self.placement.data_size)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave each replica's gradients alone while Lightning accumulates them."""
        self._is_sync_blocked = True
        try:
            yield
        finally:
            self._is_sync_blocked = False

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_by_norm(list(self.precision_plugin.main_params(optimizer)), clip_val, self._replica.group)

    def _tell_once(self, rows: int, microbatches: int) -> None:
        """Warn in the first step if its microbatches are fewer than configured, or fewer than the stages."""
        if self._is_told or self.global_rank != 0:
            return
        self._is_told = True
        num_stages = self.placement.num_stages
        if microbatches < self._num_microbatches:
            logger.warning(
                "The batch of a replica has %d rows, which num_microbatches=%d does not divide: %d microbatch%s of %d. "
                "Choose a batch size that is a multiple of num_microbatches.",
                rows,
                self._num_microbatches,
                microbatches,
                "" if microbatches == 1 else "es",
                rows // microbatches,
            )
        elif microbatches < num_stages:
            logger.warning(
                "%d microbatch%s for %d stages: ranks wait for each other most of the time. Use num_microbatches of "
                "%d or more.",
                microbatches,
                "" if microbatches == 1 else "es",
                num_stages,
                2 * num_stages,
            )

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of all stages on rank 0, and of this rank's stages elsewhere; a collective call."""
        return self._checkpoint.weights()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the part of this rank's stages from a checkpoint of any number of stages.

        Args:
            checkpoint: The checkpoint.
            strict: Whether its names must be those of the model.

        Raises:
            CheckpointError: ``strict`` is set, and the names differ.
        """
        self._checkpoint.load_weights(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state for all stages on rank 0; a collective call.

        Args:
            optimizer: This rank's optimizer.
        """
        return self._checkpoint.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the part of this rank's stages from the optimizers' states; a collective call.

        Args:
            checkpoint: The checkpoint.

        Raises:
            CheckpointError: It has other groups of parameters.
        """
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._checkpoint.load_optimizer_state(optimizer, state)


def _shapes(batch: Any) -> Hashable:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch))


def _named(network: Network, part: range) -> str:
    first, last = network.names[part[0]], network.names[part[-1]]
    return f"{network.name}.{first}" if len(part) == 1 else f"{network.name}.{first} to {last}"
