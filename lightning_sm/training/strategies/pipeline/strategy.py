"""PipelineParallelStrategy: the stages of a network on several ranks, and several replicas of such pipelines."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from lightning_sm._lightning import (
    DDPStrategy,
    LambdaCallback,
    LightningModule,
    StochasticWeightAveraging,
    Trainer,
    WeightAveraging,
    sized_len,
)
from lightning_sm._table import draw_table
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.balance import balanced, explicit_split
from lightning_sm.training.strategies.pipeline.checkpoint import LogicalCheckpoint
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.forward import evaluate, refuse_mixed_rows
from lightning_sm.training.strategies.pipeline.gradients import StepGradients, average
from lightning_sm.training.strategies.pipeline.layers import Network, materialize
from lightning_sm.training.strategies.pipeline.loaders import FollowingLoader
from lightning_sm.training.strategies.pipeline.loss import LossKind, StepLoss, is_checked
from lightning_sm.training.strategies.pipeline.placement import PlacementOrder, num_stages, replicas_of
from lightning_sm.training.strategies.pipeline.random_state import random_state, stage_stream, take_random_state
from lightning_sm.training.strategies.pipeline.rows import num_microbatches, num_rows
from lightning_sm.training.strategies.pipeline.schedules import ScheduleName, ScheduleRunner
from lightning_sm.training.strategies.pipeline.steps import UserSteps, loss_of
from lightning_sm.training.strategies.pipeline.tied import TiedWeights, find_tied

logger = logging.getLogger(__name__)

# With 2.9, neighbouring stages greet each other with tensors of different sizes, and Gloo ends the process.
_OLDEST_TORCH = "2.11"
_TIMEOUT = timedelta(minutes=30)  # torch's and Lightning's default


class PipelineParallelStrategy(DDPStrategy):
    """A strategy that spreads the layers of a model over several processes, with data parallelism over the rest.

    The LightningModule is an ordinary one: its network is an ``nn.Sequential``, or a module with a method
    ``pipeline_layers()`` that returns its layers in order, and ``training_step`` calls the network once. Each process
    keeps its stages of the network. Logged values, metrics, the returned loss, gradient accumulation, clipping,
    schedulers, validation, test and prediction are those of DDP with one process for each replica, and so are
    checkpoints: one file, from which any number of stages, or a single process, can resume.

    Args:
        pipeline_parallel_size: Processes for one replica of the model; "auto": those of a host, or of all hosts if each
            has one.
        data_parallel_size: Replicas; "auto": as many as the processes make up.
        num_microbatches: Number of microbatches per step. With fewer, ranks wait longer for each other; choose at
            least as many as there are stages. Batches are cut into equal parts, as many as possible up to this number.
        schedule: Order of forward and backward passes: "1f1b" holds activations of at most as many microbatches as
            there are stages, "gpipe" those of all.
        placement: "cluster": the ranks of a replica are neighbours, mostly on one host; "spread": they are as far apart
            as possible, so that replicas of a stage are neighbours.
        network: Name of the network in the LightningModule; None: its only child that can be cut.
        loss: How the loss of a batch follows from those of its microbatches: "mean" weighs them by rows, or by what the
            module's method ``pipeline_weight(batch)`` returns; "sum" adds them up. A check compares gradients in the
            first steps and in one of a hundred.
        split: Where the network is cut: "parameters" balances their number; a list names the layer that begins each
            stage but the first.
        outputs: "loss": the ranks of the last stage alone have the network's outputs in training, validation and test;
            the others get what the step logs, its metrics and buffers, and the numbers that it returns. "all": the
            outputs go to all ranks, and each runs all of the step. Predictions always go to all ranks.
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
        placement: PlacementOrder = "cluster",
        network: str | None = None,
        split: Literal["parameters"] | list[int | str] = "parameters",
        loss: LossKind = "mean",
        outputs: Literal["loss", "all"] = "loss",
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        if TorchVersion(torch.__version__) < _OLDEST_TORCH:
            raise StrategyError(
                f"strategy=pipeline needs torch {_OLDEST_TORCH} or newer, and this is {torch.__version__}. With torch "
                "2.6 the first step hangs on Gloo, and with 2.9 it ends the process. Update torch, or use "
                "strategy=fsdp."
            )
        for option, value, known in (
            ("schedule", schedule, get_args(ScheduleName)),
            ("placement", placement, get_args(PlacementOrder)),
            ("loss", loss, get_args(LossKind)),
            ("outputs", outputs, ("loss", "all")),
        ):
            if value not in known:
                raise StrategyError(f"{option}={value!r} is not one of {', '.join(known)}.")
        if num_microbatches < 1:
            raise StrategyError(f"num_microbatches={num_microbatches} is not at least 1.")
        if split != "parameters" and not isinstance(split, list):
            raise StrategyError(f"split={split!r} is neither 'parameters' nor a list of layers.")
        if process_group_backend == "smddp":
            raise StrategyError("A pipeline needs a group for each replica, and SMDDP has only one. Use nccl.")
        self._sizes = (pipeline_parallel_size, data_parallel_size)
        self._num_microbatches = num_microbatches
        self._schedule = schedule
        self._order = placement
        self._network_name = network
        self._split = split
        self._loss_kind = loss
        self._group_timeout = timeout
        self._outputs = outputs
        self._num_steps = 0
        # The ranks of each replica, by their stages.
        self._replicas: list[list[int]] = []
        self._cut_module: LightningModule | None = None
        self._is_sync_blocked = False
        # Loaders draw numbers when they start, only on the rank that fetches batches: hooks come after that.
        share = {f"on_{stage}_start": self._share_random_state for stage in ("train", "validation", "test", "predict")}
        self._shared_draws = LambdaCallback(**share)

    # Ranks

    def setup_environment(self) -> None:
        """Connect the ranks, and make the groups of replicas and stages.

        Raises:
            StrategyError: The sizes do not make up the world size.
        """
        super().setup_environment()
        if self._replicas:
            return
        self._replicas = replicas_of(
            self.world_size, num_stages(self.world_size, self.num_processes, *self._sizes), self._order
        )
        self._data_group = self._group([list(ranks) for ranks in zip(*self._replicas, strict=True)])
        tensors, objects = self._group(self._replicas), self._group(self._replicas, "gloo")
        self._number = next(i for i, ranks in enumerate(self._replicas) if self.global_rank in ranks)
        self._replica = Replica(tensors, objects, self._replicas[self._number], self.root_device)

    def _group(self, groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
        """Make groups of ranks; return this rank's."""
        own, _ = dist.new_subgroups_by_enumeration(groups, timeout=self._group_timeout, backend=backend)
        return cast(dist.ProcessGroup, own)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Number of replicas, and this rank's: all ranks of a replica train on the same samples."""
        return {"num_replicas": len(self._replicas), "rank": self._number}

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
        batch, state = self._replica.broadcast((batch, random_state()), 0)
        take_random_state(state)
        return batch

    def _share_random_state(self, *_: Any) -> None:
        """Let all ranks of a replica draw the same numbers as the one that fetches batches; a collective call."""
        take_random_state(self._replica.broadcast(random_state(), 0))

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let only the first rank of a replica fetch batches, if the loader has a length.

        Args:
            dataloader: A loader of the Trainer's.
        """
        # Prediction needs the loader on every rank, to tell writers of predictions which samples a batch has.
        if self._fetches or self._module.trainer.predicting or sized_len(dataloader) is None:
            return dataloader
        return FollowingLoader(dataloader)

    # The model

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded after ``setup``: yes, when each rank has only its stages."""
        return True

    def setup(self, trainer: Any) -> None:
        """Cut the network, and set up the part that this rank keeps.

        Args:
            trainer: The Trainer.

        Raises:
            StrategyError: The model or the Trainer cannot be pipelined; the message has the reason.
        """
        module = self._module
        if module is not self._cut_module:
            self._refuse(trainer, module)
            self._share_random_state()
            with stage_stream(self._replica.position):
                self._cut(module)
            self._cut_module = module
        if self._shared_draws not in trainer.callbacks:
            # Before hooks of callbacks, and before those of the module: callbacks may restart loaders.
            trainer.callbacks = [self._shared_draws, *trainer.callbacks, self._shared_draws]
        # Not DDP's setup, which wraps the model, and copies rank 0's weights to ranks with other stages.
        super(DDPStrategy, self).setup(trainer)
        if not self._fetches:
            # All ranks get the batch of the first rank, which has called the user's hook on it.
            module._on_before_batch_transfer = lambda batch, dataloader_idx=0: batch  # type: ignore[method-assign]
        # Clip by the norm of all stages' gradients. clip_gradients of module and plugin then work unchanged.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

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
        # LightningCLI makes the optimizer of --optimizer with all parameters, before the network is cut.
        own = set(map(id, self._tied.without_copies(self._module.parameters())))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]

    @property
    def _fetches(self) -> bool:
        """Whether this rank fetches its replica's batches."""
        return self._replica.position == 0

    @property
    def _module(self) -> LightningModule:
        return cast(LightningModule, self.lightning_module)

    def _setup_model(self, model: Any) -> Any:
        # Seeds alone do not give the replicas of a stage the same weights.
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), group=self._data_group, group_src=0)
        self._tied.update_copies()
        return model

    def _refuse(self, trainer: Any, module: Any) -> None:
        reasons = [
            (not module.automatic_optimization, "Its training_step steps the optimizer: use automatic optimization"),
            (module._compiler_ctx is not None, "It is compiled as a whole: compile the layers of its network"),
            (getattr(trainer.precision_plugin, "scaler", None), "16-mixed scales the loss: use bf16-mixed"),
            (self._layer_sync is not None, "sync_batchnorm is for ranks with the same layers: use GroupNorm"),
            (
                any(getattr(log, "_log_graph", False) for log in trainer.loggers),
                "log_graph=True of a logger runs the model on rank 0 alone: remove it",
            ),
            (
                any(isinstance(one, (WeightAveraging, StochasticWeightAveraging)) for one in trainer.callbacks),
                "WeightAveraging and StochasticWeightAveraging copy the whole model: remove the callback",
            ),
        ]
        found = [reason for applies, reason in reasons if applies]
        if found:
            raise StrategyError(
                f"strategy=pipeline cannot train this {type(module).__name__}. {'. '.join(found)}. Or use strategy=ddp "
                "or fsdp."
            )

    def _cut(self, module: LightningModule) -> None:
        network = Network(module, self._network_name)
        parts = self._parts(network)
        stages = [[network.layers[i] for i in part] for part in parts]
        rows = []
        for stage, part in enumerate(parts):
            layers = f"{network.name}.{network.names[part[0]]} to {network.names[part[-1]]}"
            parameters = list(torch.nn.ModuleList(stages[stage]).parameters())
            if not any(parameter.requires_grad for parameter in parameters):
                raise StrategyError(
                    f"Stage {stage} ({layers}) has nothing to train, and its optimizer would be empty. Use fewer "
                    "stages, or cut elsewhere with split=[...]."
                )
            ranks = ", ".join(str(ranks[stage]) for ranks in self._replicas)
            rows.append((stage, ranks, layers, f"{sum(parameter.numel() for parameter in parameters):,}"))
        self._report(rows)
        tied = find_tied(module, stages)
        self._checkpoint = LogicalCheckpoint(module, self._replica, tied, is_written=self._number == 0)
        own = network.stage(parts[self._replica.position])
        for stage, part in enumerate(parts):
            if stage != self._replica.position:
                network.remove(part)
        materialize(list(own.layers), self.root_device)
        self._tied = TiedWeights(module, tied, self._replica)
        self._stage = own
        self._steps = UserSteps(
            module,
            network,
            self._replica,
            self._forward_everywhere,
            self._data_group,
            are_everywhere=self._outputs == "all",
        )
        self._loss = StepLoss(module, self._steps, self._loss_kind)
        self._runner = ScheduleRunner(own, self._replica, self.root_device, self._schedule, self._loss)

    def _parts(self, network: Network) -> list[range]:
        size = len(self._replica.ranks)
        if len(network.layers) < size:
            raise StrategyError(
                f"Too few layers in {network.name} ({len(network.layers)}) for {size} stages. Choose a smaller "
                "pipeline_parallel_size."
            )
        if isinstance(self._split, list):
            return explicit_split(self._split, network.names, size)
        return balanced([sum(one.numel() for one in layer.parameters()) for layer in network.layers], size)

    def _report(self, rows: Sequence[Sequence[object]]) -> None:
        """Log which ranks hold which layers."""
        if self.global_rank != 0:
            return
        logger.info(
            "Pipeline over %d ranks, replicas: %d (%s), schedule %s, up to %d microbatches\n%s",
            len(self._replica.ranks),
            len(self._replicas),
            self._order,
            self._schedule,
            self._num_microbatches,
            draw_table(rows, ("stage", "ranks, by replica", "layers", "parameters")),
        )
        if self._outputs == "loss":
            logger.info(
                "Steps run to their end on the ranks of the last stage. What they keep in attributes stays there; what "
                "they log, the values of metrics, and buffers reach all ranks. outputs: all runs them everywhere."
            )

    # Steps

    def training_step(self, *arguments: Any) -> Any:
        """Run a step over all stages.

        Args:
            arguments: Those of the LightningModule's ``training_step``; the first is the batch.

        Returns:
            What ``training_step`` returns for the whole batch, with a loss whose ``backward`` delivers the gradients.
        """
        rows = num_rows(arguments[0])
        microbatches = num_microbatches(rows, self._num_microbatches)
        if microbatches < self._num_microbatches and self._num_steps == 0 and self.global_rank == 0:
            logger.warning(
                "The batch of a replica has %d rows, which num_microbatches=%d does not divide: microbatches: %d. "
                "Choose a batch size that is a multiple of num_microbatches.",
                rows,
                self._num_microbatches,
                microbatches,
            )
        before = random_state()
        gradients = StepGradients(self._module)

        def forward(inputs: tuple[Any, ...]) -> Any:
            """Run the stages forward and backward; return the network's output on ranks that go on with the step."""
            with self._replica.together():
                self._steps.check_inputs(inputs, rows, before)
                if self._num_steps == 0 and microbatches > 1:
                    pair = 2 * rows // microbatches
                    refuse_mixed_rows(self._stage, self._replica, [value[:pair] for value in inputs])
                if self._replica.is_last:
                    self._loss.begin(arguments, rows, microbatches, step=self._num_steps)
            with stage_stream(self._replica.position), gradients:
                output = self._runner.step(inputs, microbatches)
            if self._outputs == "all":
                output = self._replica.broadcast(output, self._replica.last)
            if self._loss.error is not None:
                raise self._loss.error
            return output

        def step() -> Any:
            result = self._module.training_step(*arguments)
            loss_of(result, self._steps.where)
            return result

        with self.precision_plugin.train_step_context():
            result = self._steps.run("training_step", step, forward)
            self._check_loss(result)
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
        return self._steps.run(name, lambda: step(*arguments), self._forward_of_last)

    def _forward_of_last(self, inputs: tuple[Any, ...]) -> Any:
        return evaluate(self._stage, self._replica, inputs, self._num_microbatches)

    def _forward_everywhere(self, *inputs: Any) -> Any:
        """Return the network's output, on every rank of the replica."""
        return self._replica.broadcast(self._forward_of_last(inputs), self._replica.last)

    def _check_loss(self, result: Any) -> None:
        """Raise the same error on all ranks if a loss is not that of its microbatches."""
        if not is_checked(self._num_steps):
            return
        found: list[str | None] = [None] * self.world_size
        own = self._loss.check(float(loss_of(result, self._steps.where))) if self._replica.is_last else None
        dist.all_gather_object(found, own)
        wrong = next(filter(None, found), None)
        if wrong is not None:
            raise StrategyError(wrong)

    def _average(self, parameters: Sequence[Any]) -> None:
        if self._is_sync_blocked:
            return
        self._tied.collect_gradients()
        if len(self._replicas) > 1:
            average(self._tied.without_copies(parameters), self._data_group, len(self._replicas))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave each replica's gradients alone while Lightning accumulates them."""
        self._is_sync_blocked = True
        try:
            yield
        finally:
            self._is_sync_blocked = False

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Make a step, which changes tied parameters on one rank; the others get them from it.

        Args:
            optimizer: This rank's optimizer.
            closure: Computes the loss and the gradients.
            model: Has hooks around the step; None: the LightningModule.
            **kwargs: Arguments of the optimizer's ``step``.
        """
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._tied.update_copies()
        return result

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, self.gradient_norm(parameters))

    def gradient_norm(self, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of all stages, as of the whole model in one process; a collective call.

        Args:
            parameters: This rank's part of the parameters; None: all of the module's.
            norm_type: The p of the p-norm; may be infinite.
        """
        counted = self._module.parameters() if parameters is None else parameters
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(self.root_device)  # that of none is on the CPU
        if math.isinf(norm_type):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self._replica.group)
            return norm
        powers = norm.pow(norm_type)
        dist.all_reduce(powers, group=self._replica.group)
        return powers.pow(1 / norm_type)

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
