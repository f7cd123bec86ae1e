"""PipelineParallelStrategy: the stages of a network on several ranks, and several replicas of such pipelines."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_sm._lightning import (
    Callback,
    DDPStrategy,
    LightningModule,
    Trainer,
    WeightAveraging,
)
from lightning_sm._table import draw_table
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.balance import balanced, explicit_split
from lightning_sm.training.strategies.pipeline.calls import CallForm
from lightning_sm.training.strategies.pipeline.checkpoint import LogicalCheckpoint, mapped_checkpoint, synchronize
from lightning_sm.training.strategies.pipeline.effects import EffectRecorder, StepEffects
from lightning_sm.training.strategies.pipeline.evaluation import Evaluation
from lightning_sm.training.strategies.pipeline.evaluation_steps import EvaluationSteps
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.gradients import StepGradients, average, total_norm
from lightning_sm.training.strategies.pipeline.layers import Network, materialize, measured_seconds, num_trainable
from lightning_sm.training.strategies.pipeline.loaders import FollowingLoader
from lightning_sm.training.strategies.pipeline.loss import LossKind, StepLoss, check_loss_options, is_checked
from lightning_sm.training.strategies.pipeline.norm_watch import NormWatch
from lightning_sm.training.strategies.pipeline.placement import (
    DATA,
    PIPELINE,
    TENSOR,
    Placement,
    PlacementOrder,
    grid,
)
from lightning_sm.training.strategies.pipeline.random_state import (
    drawn_seed,
    sent_random_state,
    stage_stream,
    take_random_state,
)
from lightning_sm.training.strategies.pipeline.rows import num_microbatches, num_rows, tensors_of
from lightning_sm.training.strategies.pipeline.schedules import (
    SCHEDULES,
    SEVERAL_STAGES_SINCE,
    ScheduleName,
    ScheduleRunner,
    chunks_of,
    is_since,
    separate_directions,
)
from lightning_sm.training.strategies.pipeline.sharding import HOOK, free_gathered, shard_stages
from lightning_sm.training.strategies.pipeline.steps import UserSteps
from lightning_sm.training.strategies.pipeline.tied import TiedWeights, check_apart, find_tied, retie
from lightning_sm.training.strategies.pipeline.trial import Trial

logger = logging.getLogger(__name__)

# With 2.9, neighbouring stages greet each other with tensors of different sizes, and Gloo ends the process.
_OLDEST_TORCH = "2.11"
_NO_SMDDP = "A pipeline needs a process group for each replica, and SMDDP has only one. Use nccl."
_TIMEOUT = timedelta(minutes=30)  # torch's and Lightning's default


class PipelineParallelStrategy(DDPStrategy):
    """A strategy that spreads the layers of a model over several processes, with data parallelism over the rest.

    The LightningModule is an ordinary one: its network is an ``nn.Sequential``, a module with a method
    ``pipeline_layers()`` that returns its layers in order, or a model of Hugging Face's transformers; ``training_step``
    calls the network once. Each process keeps its stages of the network. Logged values, metrics, the returned loss,
    gradient accumulation, clipping, schedulers, validation, test and prediction are those of DDP with one process for
    each replica, and so are checkpoints: one file, from which any number of stages, or a single process, can resume.

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
        loss: How the loss of a batch follows from those of its microbatches: "mean" weighs them by rows, or by what the
            module's method ``pipeline_weight(batch)`` returns; "sum" adds them up. A check compares gradients in the
            first steps and in one of a hundred.
        split: Where the network is cut: "parameters" balances their number, "time" the measured time of the layers,
            which needs ``example_input_array``; a list names the layer that begins each stage but the first.
        shard: Whether to shard parameters, gradients and optimizer states of each stage over its replicas, by FSDP2: by
            the module's method ``shard_stage(layers, mesh)``, or layer by layer.
        tensor_parallel_size: Ranks among which ``shard_stage`` splits layers: neighbours, which get the same batch. The
            world size is the product of the three sizes. Needs ``shard``.
        outputs: "loss": the ranks of the last stage alone have the network's outputs in training, validation and test;
            the others get what the step logs and changes there, and the numbers that it returns. "all": the outputs go
            to all ranks, and each runs all of the step. Predictions always go to all ranks.
        activation_checkpointing: Whether layers keep only their inputs until the backward pass, which runs them again;
            a number n: every n-th layer of the network does.
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
        loss: LossKind = "mean",
        shard: bool = False,
        tensor_parallel_size: int = 1,
        activation_checkpointing: bool | int = False,
        outputs: Literal["loss", "all"] = "loss",
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if not is_since(_OLDEST_TORCH):
            raise StrategyError(
                f"strategy=pipeline needs torch {_OLDEST_TORCH} or newer, and this is {torch.__version__}. With torch "
                "2.6 the first step hangs on Gloo, and with 2.9 it ends the process. Update torch, or use "
                "strategy=fsdp."
            )
        if num_microbatches < 1:
            raise StrategyError(f"num_microbatches={num_microbatches} is not at least 1.")
        if placement not in ("cluster", "spread"):
            raise StrategyError(f"placement={placement!r} is neither 'cluster' nor 'spread'.")
        if isinstance(split, str) and split not in ("parameters", "time"):
            raise StrategyError(f"split={split!r} is neither 'parameters', 'time' nor a list of layers.")
        if loss not in ("mean", "sum"):
            raise StrategyError(f"loss={loss!r} is neither 'mean' nor 'sum'.")
        if outputs not in ("loss", "all"):
            raise StrategyError(f"outputs={outputs!r} is neither 'loss' nor 'all'.")
        if process_group_backend == "smddp":
            raise StrategyError(_NO_SMDDP)
        if tensor_parallel_size < 1 or (tensor_parallel_size > 1 and not shard):
            raise StrategyError(
                f"tensor_parallel_size={tensor_parallel_size} with shard={shard}: it is at least 1, and layers are "
                f"split by the module's method {HOOK}(layers, mesh), which shard=True calls."
            )
        if activation_checkpointing < 0:
            raise StrategyError(
                f"activation_checkpointing={activation_checkpointing} is neither a bool nor at least 1."
            )
        if shard and SCHEDULES[schedule].splits_backward:
            whole = ", ".join(name for name, other in SCHEDULES.items() if not other.splits_backward)
            raise StrategyError(
                f"shard=True cannot be used with schedule={schedule}, which splits the backward pass: torch's FSDP2 "
                f"would lose gradients, without an error. Choose one of {whole}."
            )
        self._shard = shard
        self._tensor_size = tensor_parallel_size
        self._recompute_every = int(activation_checkpointing)
        self._sizes = (pipeline_parallel_size, data_parallel_size)
        self._num_microbatches = num_microbatches
        self._schedule = schedule
        self._chunks = chunks_of(schedule, chunks)
        if self._chunks > 1 and not is_since(SEVERAL_STAGES_SINCE):
            raise StrategyError(
                f"schedule={schedule} has {self._chunks} stages on each rank, which needs torch {SEVERAL_STAGES_SINCE} "
                f"or newer, and this is {torch.__version__}: stages could wait for each other for ever. Use "
                "schedule=1f1b, or update torch."
            )
        self._order = placement
        self._network_name = network
        self._split = split
        self._loss_kind = loss
        self._group_timeout = timeout
        self._outputs = outputs
        self._num_steps = 0
        self._norm_watch = NormWatch()
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
        p, d = grid(self.world_size, self.num_processes, *self._sizes, self._tensor_size)
        is_v_shaped = SCHEDULES[self._schedule].is_v_shaped
        self._placement = Placement(p, d, self._order, self._chunks, is_v_shaped, self._tensor_size)
        shape, names = self._placement.mesh
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._data_group = mesh[DATA].get_group()
        self._shard_mesh = mesh[DATA, TENSOR]
        separate_directions(self.root_device)
        part = self._placement.part(self.global_rank)
        ranks = self._placement.ranks(self._placement.replica(self.global_rank), part)
        first = self.global_rank - part
        neighbours = list(range(first, first + self._tensor_size))
        split = range(self._tensor_size)
        replicas = [self._placement.ranks(replica, i) for replica in range(d) for i in split]
        places = [list(range(i, i + self._tensor_size)) for i in range(0, self.world_size, self._tensor_size)]
        tensor_group = mesh[TENSOR].get_group()
        # A group of one rank sends nothing.
        tensor_objects = self._object_group(places) if self._tensor_size > 1 else tensor_group
        self._parts_of_place = Replica(tensor_group, tensor_objects, neighbours, self.root_device)
        self._replica = Replica(mesh[PIPELINE].get_group(), self._object_group(replicas), ranks, self.root_device)

    def _object_group(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """Return this rank's one of some groups, on Gloo; a collective call of all ranks."""
        group, _ = dist.new_subgroups_by_enumeration(groups, timeout=self._group_timeout, backend="gloo")
        return cast(dist.ProcessGroup, group)

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

        Otherwise, the user's random transforms and samplers could give the stages different batches. The random state
        that they leave comes along.

        Args:
            batch: The batch.
            device: This rank's device.
            dataloader_idx: Index of the loader.
        """
        if self._fetches:
            batch = super().batch_to_device(batch, device, dataloader_idx)
        return self._from_fetching(batch)

    def _from_fetching(self, value: Any) -> Any:
        """Return the value of the rank that fetches batches, whose random state all ranks of the replica take."""
        sent = (value, sent_random_state()) if self._fetches else None
        if self._replica.position == 0 and self._tensor_size > 1:
            sent = self._parts_of_place.broadcast(sent, 0)
        value, state = self._replica.broadcast(sent, 0)
        if not self._fetches:
            take_random_state(state)
        return value

    def share_random_state(self) -> None:
        """Let all ranks of a replica draw the same numbers as the one that fetches batches; a collective call."""
        self._from_fetching(None)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let only the first rank of a replica fetch batches, if the loader has a length.

        Args:
            dataloader: A loader of the Trainer's.
        """
        trainer = self._module.trainer
        # Prediction needs the loader on every rank, to tell writers of predictions which samples a batch has.
        if self._fetches or trainer.predicting:
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
            check_loss_options(module, self._loss_kind)
            if self._tensor_size > 1 and not hasattr(module, HOOK):
                raise StrategyError(
                    f"tensor_parallel_size={self._tensor_size}: {type(module).__name__} has no method "
                    f"{HOOK}(layers, mesh) that splits the layers of a stage over mesh['{TENSOR}'], such as by "
                    "torch.distributed.tensor.parallel.parallelize_module, and then shards them by fully_shard over "
                    f"mesh['{DATA}']."
                )
            self._is_sharded = False
            # Making layers on the meta device and sharding them replace the parameters that an optimizer may have.
            self._names = {id(parameter): name for name, parameter in module.named_parameters()}
            self.share_random_state()
            with self._stage_stream():
                self._cut(module)
            self._norm_watch.wrap_hooks(module)
            self._cut_module = module
        self._share_draws(trainer)
        # Not DDP's setup, which wraps the model, and copies rank 0's weights to ranks with other stages.
        super(DDPStrategy, self).setup(trainer)
        if not self._fetches:
            # All ranks get the batch of the first rank, which has called the user's hook on it.
            module._on_before_batch_transfer = lambda batch, dataloader_idx=0: batch  # type: ignore[method-assign]
        # Clip by the norm of all stages' gradients. clip_gradients of module and plugin then work unchanged.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _share_draws(self, trainer: Any) -> None:
        """Share the random state before hooks of callbacks and of the module: callbacks may restart loaders."""
        if not any(isinstance(callback, _SharedDraws) for callback in trainer.callbacks):
            shared = _SharedDraws(self)
            trainer.callbacks = [shared, *trainer.callbacks, shared]

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, for this rank's parameters.

        Args:
            trainer: The Trainer.

        Raises:
            StrategyError: An optimizer decides by the gradients of all parameters, of which each rank has a part.
        """
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise StrategyError(
                "LBFGS searches along a line by the gradients of all parameters. In a pipeline each rank has those of "
                "its stages only, and the ranks would take different numbers of steps. Use another optimizer, or "
                "strategy=ddp."
            )
        own = dict(self._module.named_parameters(remove_duplicate=False))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            # LightningCLI makes the optimizer of --optimizer with all parameters, before the network is cut.
            # SageMakerCLI replaces them by the module's, but the strategy also works without SageMakerCLI.
            group["params"] = self._current(group["params"], own)
        self._tied.regroup(self.optimizers)

    def _current(self, parameters: Iterable[Any], own: Mapping[str, Any]) -> list[Any]:
        """Return those of this rank, as they are after the cut."""
        there = {id(parameter) for parameter in own.values()}
        kept = []
        for parameter in parameters:
            if id(parameter) in there:
                kept.append(parameter)
            elif self._names.get(id(parameter)) in own:
                kept.append(own[self._names[id(parameter)]])
        return kept

    @property
    def _fetches(self) -> bool:
        """Whether this rank fetches the batches of its replica."""
        return self._replica.position == 0 and self._parts_of_place.position == 0

    @property
    def _module(self) -> LightningModule:
        module: Any = self.lightning_module
        return cast(LightningModule, module)

    def _setup_model(self, model: Any) -> Any:
        if self._is_sharded:
            return model
        if self._tensor_size > 1:
            synchronize(model, self._parts_of_place.group, self._parts_of_place.ranks[0])
        synchronize(model, self._data_group, dist.get_process_group_ranks(self._data_group)[0])
        self._tied.synchronize()
        if self._shard:
            with self._stage_stream():
                shard_stages(model, self._stages, self._shard_mesh)
            self._is_sharded = True
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
        tied = find_tied(module, network.layers)
        is_written = placement.replica(self.global_rank) == 0 and placement.part(self.global_rank) == 0
        self._checkpoint = LogicalCheckpoint(module, self._replica, tied, is_written=is_written)
        parts = self._parts(module, network)
        for stage, part in enumerate(parts):
            if num_trainable([network.layers[i] for i in part]) == 0:
                raise StrategyError(
                    f"Stage {stage} ({_named(network, part)}) has nothing to train, and its optimizer would be empty. "
                    "Use fewer stages, or cut elsewhere with split=[...]."
                )
        copies_views = SCHEDULES[self._schedule].splits_backward
        own = {
            stage: network.stage(parts[stage], copies_views=copies_views, recompute_every=self._recompute_every)
            for stage in placement.stages(self._replica.position)
        }
        self._report(network, parts)
        others = [stage for stage in range(num_stages) if stage not in own]
        ranks = self._replica.ranks
        holders = [f"stage {stage} of the pipeline, on rank {ranks[placement.position_of(stage)]}" for stage in others]
        network.remove([parts[stage] for stage in others], holders)
        materialize([layer for stage in own.values() for layer in stage.layers], self.root_device)
        retie(module, tied)
        stage_of = [stage for stage, part in enumerate(parts) for _ in part]
        if self._shard:
            check_apart(tied, stage_of, placement)
        self._tied = TiedWeights(module, tied, stage_of, placement, self._replica)
        self._stages = own
        evaluation = Evaluation(own, placement, self._replica, self._num_microbatches, self.root_device)
        last = placement.last_position
        self._steps = UserSteps(module, network.module, network.name, evaluation, self._data_group, network.calls)
        self._calls = network.calls
        self._forms: dict[Hashable, CallForm] = {}
        self._effects = EffectRecorder(module, network.module, is_rank_zero=last == 0)
        self._evaluation_steps = EvaluationSteps(
            self._steps, network.calls, evaluation, self._effects, self._replica, last
        )
        self._loss = StepLoss(module, self._steps, self._loss_kind)
        self._trial = Trial(own, placement, self._replica, self._loss.try_out)
        self._runner = ScheduleRunner(own, placement, self._replica.group, self.root_device, self._schedule, self._loss)

    def _parts(self, module: LightningModule, network: Network) -> list[range]:
        num_stages = self.placement.num_stages
        if isinstance(self._split, list):
            return explicit_split(self._split, network.names, num_stages)
        if self._split == "parameters":
            sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in network.layers]
            return balanced(sizes, num_stages)
        if network.pretrained is not None:
            raise StrategyError(
                "split=time measures layers that take what the one before returns, unlike those of a model of "
                "transformers. Use split=parameters, or name the layers that begin stages: "
                f"split=[{network.names[1 + (len(network.names) - 2) // 2]}]."
            )
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
            ranks = [
                placement.ranks(replica, neighbour)[position]
                for replica in range(placement.data_size)
                for neighbour in range(placement.tensor_size)
            ]
            parameters = sum(p.numel() for i in part for p in network.layers[i].parameters())
            held_by = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
            rows.append((stage, held_by, _named(network, part), f"{parameters:,}"))
        p, d, t = placement.pipeline_size, placement.data_size, placement.tensor_size
        logger.info(
            "Pipeline over %d ranks, %d replica%s (%s%s%s), schedule %s, up to %d microbatches\n%s",
            p,
            d,
            "" if d == 1 else "s",
            placement.order,
            ", sharded" if self._shard else "",
            f", layers split over {t} ranks" if t > 1 else "",
            self._schedule,
            self._num_microbatches,
            draw_table(rows, ("stage", "ranks, by replica", "layers", "parameters")),
        )

    # Steps

    def _stage_stream(self) -> AbstractContextManager[None]:
        """Let the stages draw their own random numbers; all ranks of the replica call it."""
        return stage_stream(drawn_seed(), self._replica.position)

    def training_step(self, *arguments: Any) -> Any:
        """Run a step over all stages.

        Args:
            arguments: Those of the LightningModule's ``training_step``; the first is the batch.

        Returns:
            What ``training_step`` returns for the whole batch, with a loss whose ``backward`` delivers the gradients.
        """
        batch = arguments[0]
        rows = num_rows(batch)
        microbatches = num_microbatches(rows, self._num_microbatches)
        self._tell_once(rows, microbatches)
        last = self.placement.last_position
        is_last = self._replica.position == last
        shapes = _shapes(batch)
        with self.precision_plugin.train_step_context():
            inputs, error = self._captured(arguments, rows)
            with self._stage_stream():
                if is_last:
                    self._loss.begin(arguments, rows, microbatches, pair=self._num_steps)
                inputs, error = self._inputs(inputs, error, rows, microbatches, shapes)
                with StepGradients(self._module) as gradients:
                    output = self._runner.step(inputs, microbatches, shapes)
            error = error or (self._loss.end() if is_last else None)
            if self._outputs == "all":
                self._replica.raise_together(error)
                output = self._replica.broadcast(output, last)
                self._check_loss(is_last=is_last)
                result = self._steps.replay(arguments, output)
            else:
                result = self._result_of_last(arguments, output, error, last)
        self._num_steps += 1
        if isinstance(result, Mapping):
            return {**result, "loss": gradients.loss(result["loss"], self._average)}
        return gradients.loss(result, self._average)

    def validation_step(self, *arguments: Any) -> Any:
        """Run a step of a validation over all stages.

        Args:
            arguments: Those of the LightningModule's ``validation_step``; the first is the batch.
        """
        with self.precision_plugin.val_step_context():
            return self._evaluated("validation_step", arguments)

    def test_step(self, *arguments: Any) -> Any:
        """Run a step of a test over all stages.

        Args:
            arguments: Those of the LightningModule's ``test_step``; the first is the batch.
        """
        with self.precision_plugin.test_step_context():
            return self._evaluated("test_step", arguments)

    def _evaluated(self, name: str, arguments: tuple[Any, ...]) -> Any:
        step = getattr(self._module, name)
        if self._outputs == "all":
            return step(*arguments)
        return self._evaluation_steps(name, lambda: step(*arguments), arguments[0])

    def _result_of_last(self, arguments: tuple[Any, ...], output: Any, error: Exception | None, last: int) -> Any:
        """Return what ``training_step`` returns on the rank of the last stage, after its effects on this rank."""
        result: Any = None
        effects: StepEffects | None = None
        is_last = self._replica.position == last
        if is_last and error is None:
            try:
                result, effects = self._effects.record("training_step", lambda: self._steps.replay(arguments, output))
            except Exception as raised:  # noqa: BLE001  # raised on all ranks of the replica below
                error = raised
        self._replica.raise_together(error)
        self._check_loss(is_last=is_last)
        effects = self._replica.broadcast(effects, last)
        return result if is_last or effects is None else self._effects.repeat(effects)

    def _captured(self, arguments: tuple[Any, ...], rows: int) -> tuple[tuple[Tensor, ...], Exception | None]:
        """Return the network's inputs on ranks that need the call, and the error in getting them."""
        if self._replica.position != 0 and not self._calls.every_rank_binds:
            return (), None
        try:
            return self._steps.capture(arguments, rows), None
        except Exception as raised:  # noqa: BLE001  # raised on all ranks once shapes are known, or after the schedule
            return (), raised

    def _inputs(
        self, inputs: tuple[Tensor, ...], error: Exception | None, rows: int, microbatches: int, shapes: Hashable
    ) -> tuple[tuple[Any, ...], Exception | None]:
        """Return the network's inputs on the first rank, else nothing, and the error in getting them.

        After an error, inputs are placeholders, with which the schedule can run to its end.
        """
        is_first = self._replica.position == 0
        if not is_first:
            inputs = ()
        size = rows // microbatches
        if not self._runner.knows(microbatches, shapes):
            tried = self._trial(tuple(value[:size] for value in inputs), error)
            free_gathered(self._stages)
            self._replica.raise_together(error or tried.error)
            self._runner.learn(microbatches, shapes, tried.shapes)
            self._forms[microbatches, shapes] = self._calls.form
        error = self._steps.settle_form(self._forms[microbatches, shapes]) or error
        if is_first:
            known = self._runner.inputs_of(microbatches, shapes)
            if error is None:
                error = self._steps.changed_inputs(tuple(value[:size] for value in inputs), known)
            if error is not None:
                inputs = tuple(
                    torch.zeros((rows, *value.shape[1:]), dtype=value.dtype, device=self.root_device) for value in known
                )
        return inputs, error

    def _check_loss(self, *, is_last: bool) -> None:
        """Raise the same error on all ranks if a loss is not that of its microbatches, or copies of weights differ."""
        if not is_checked(self._num_steps):
            return
        found: list[str | None] = [None] * self.world_size
        difference = self._tied.difference()
        dist.all_gather_object(found, difference or (self._loss.check() if is_last else None))
        wrong = next(filter(None, found), None)
        if wrong is not None:
            raise StrategyError(wrong)

    def _average(self, parameters: Sequence[Any]) -> None:
        if self._is_sync_blocked:
            return
        self._tied.add_gradients()
        if self.placement.data_size > 1 and not self._shard:
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
        parameters = list(self.precision_plugin.main_params(optimizer))
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, self.gradient_norm(parameters))

    def gradient_norm(self, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of all stages, as of the whole model in one process; a collective call.

        Args:
            parameters: This rank's part of the parameters; None: all of the module's.
            norm_type: The p of the p-norm; may be infinite.
        """
        duplicates = {id(parameter) for parameter in self._tied.duplicates}
        own = self._module.parameters() if parameters is None else parameters
        counted = [parameter for parameter in own if id(parameter) not in duplicates]
        with self._norm_watch.pause():
            return total_norm(counted, self._replica.group, self.root_device, norm_type)

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

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint, of which this rank takes the part of its stages: a local file is mapped, not copied.

        Args:
            checkpoint_path: Path or address of the checkpoint.
            args: ``weights_only``, from Lightning 2.6 on.
            options: The same, by name.
        """
        mapped: dict[str, Any] | None = mapped_checkpoint(self.checkpoint_io, checkpoint_path, *args, **options)
        return super().load_checkpoint(checkpoint_path, *args, **options) if mapped is None else mapped

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


class _SharedDraws(Callback):
    """Lets hooks draw the same numbers on all ranks of a replica after loaders have started.

    That draws numbers, and happens only on the rank that fetches batches.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: PipelineParallelStrategy) -> None:
        self._strategy = strategy

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.share_random_state()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.share_random_state()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.share_random_state()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.share_random_state()


def _shapes(batch: Any) -> Hashable:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch))


def _named(network: Network, part: range) -> str:
    first, last = network.names[part[0]], network.names[part[-1]]
    return f"{network.name}.{first}" if len(part) == 1 else f"{network.name}.{first} to {last}"
