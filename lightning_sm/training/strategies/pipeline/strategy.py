"""PipelineParallelStrategy: the stages of a network on several ranks, and several replicas of such pipelines."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

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
from lightning_sm.training.strategies.pipeline.checkpoint import LogicalCheckpoint, synchronize
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.forward import evaluate, try_out
from lightning_sm.training.strategies.pipeline.gradients import StepGradients, average, total_norm
from lightning_sm.training.strategies.pipeline.layers import Network, materialize, num_trainable
from lightning_sm.training.strategies.pipeline.loaders import FollowingLoader
from lightning_sm.training.strategies.pipeline.loss import LossKind, StepLoss, check_loss_options, is_checked
from lightning_sm.training.strategies.pipeline.placement import (
    DATA,
    PIPELINE,
    Placement,
    PlacementOrder,
    grid,
)
from lightning_sm.training.strategies.pipeline.random_state import (
    drawn_seed,
    random_state,
    sent_random_state,
    stage_stream,
    take_random_state,
)
from lightning_sm.training.strategies.pipeline.rows import num_microbatches, num_rows
from lightning_sm.training.strategies.pipeline.schedules import (
    ScheduleName,
    ScheduleRunner,
)
from lightning_sm.training.strategies.pipeline.steps import UserSteps, loss_of
from lightning_sm.training.strategies.pipeline.tied import TiedWeights, find_tied, retie

logger = logging.getLogger(__name__)

# With 2.9, neighbouring stages greet each other with tensors of different sizes, and Gloo ends the process.
_OLDEST_TORCH = "2.11"
_NO_SMDDP = "A pipeline needs a process group for each replica, and SMDDP has only one. Use nccl."
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
        if num_microbatches < 1:
            raise StrategyError(f"num_microbatches={num_microbatches} is not at least 1.")
        if schedule not in get_args(ScheduleName):
            raise StrategyError(f"schedule={schedule!r} is neither '1f1b' nor 'gpipe'.")
        if placement not in ("cluster", "spread"):
            raise StrategyError(f"placement={placement!r} is neither 'cluster' nor 'spread'.")
        if split != "parameters" and not isinstance(split, list):
            raise StrategyError(f"split={split!r} is neither 'parameters' nor a list of layers.")
        if loss not in ("mean", "sum"):
            raise StrategyError(f"loss={loss!r} is neither 'mean' nor 'sum'.")
        if outputs not in ("loss", "all"):
            raise StrategyError(f"outputs={outputs!r} is neither 'loss' nor 'all'.")
        if process_group_backend == "smddp":
            raise StrategyError(_NO_SMDDP)
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
        self._placement = Placement(p, d, self._order)
        shape, names = self._placement.mesh
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._data_group = mesh[DATA].get_group()
        replicas = [self._placement.ranks(replica) for replica in range(d)]
        objects, _ = dist.new_subgroups_by_enumeration(replicas, timeout=self._group_timeout, backend="gloo")
        ranks = replicas[self._placement.replica(self.global_rank)]
        self._replica = Replica(mesh[PIPELINE].get_group(), cast(dist.ProcessGroup, objects), ranks, self.root_device)

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
            self._names = {id(parameter): name for name, parameter in module.named_parameters()}
            self.share_random_state()
            with self._stage_stream():
                self._cut(module)
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
        return self._replica.position == 0

    @property
    def _module(self) -> LightningModule:
        module: Any = self.lightning_module
        return cast(LightningModule, module)

    def _setup_model(self, model: Any) -> Any:
        synchronize(model, self._data_group, dist.get_process_group_ranks(self._data_group)[0])
        self._tied.synchronize()
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
        num_layers, num_stages = len(network.layers), placement.pipeline_size
        if num_layers < num_stages:
            raise StrategyError(
                f"Too few layers in {network.name} ({num_layers}) for {num_stages} stages. Choose a smaller "
                "pipeline_parallel_size."
            )
        tied = find_tied(module, network.layers)
        is_written = placement.replica(self.global_rank) == 0
        self._checkpoint = LogicalCheckpoint(module, self._replica, tied, is_written=is_written)
        parts = self._parts(network)
        for stage, part in enumerate(parts):
            if num_trainable([network.layers[i] for i in part]) == 0:
                raise StrategyError(
                    f"Stage {stage} ({_named(network, part)}) has nothing to train, and its optimizer would be empty. "
                    "Use fewer stages, or cut elsewhere with split=[...]."
                )
        own = network.stage(parts[self._replica.position])
        self._report(network, parts)
        for stage, rank in enumerate(self._replica.ranks):
            if stage != self._replica.position:
                network.remove(parts[stage], f"stage {stage} of the pipeline, on rank {rank}")
        materialize(list(own.layers), self.root_device)
        retie(module, tied)
        stage_of = [stage for stage, part in enumerate(parts) for _ in part]
        self._tied = TiedWeights(module, tied, stage_of, placement, self._replica)
        self._stage = own
        self._steps = UserSteps(
            module, network.module, network.name, self._replica, self._forward_everywhere, self._data_group
        )
        self._loss = StepLoss(module, self._steps, self._loss_kind)
        self._runner = ScheduleRunner(own, self._replica, self.root_device, self._schedule, self._loss)

    def _parts(self, network: Network) -> list[range]:
        num_stages = self.placement.pipeline_size
        if isinstance(self._split, list):
            return explicit_split(self._split, network.names, num_stages)
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in network.layers]
        return balanced(sizes, num_stages)

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
            ranks = [placement.ranks(replica)[stage] for replica in range(placement.data_size)]
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
        if self._outputs == "loss":
            logger.info(
                "Steps run to their end on the ranks of the last stage. What they keep in attributes stays there; what "
                "they log, metrics and buffers reach all ranks. outputs: all runs them everywhere."
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
        before = random_state()
        gradients = StepGradients(self._module)

        def prepare(inputs: tuple[Any, ...]) -> None:
            self._steps.check_inputs(inputs, rows, before)
            if self._replica.is_last:
                self._loss.begin(arguments, rows, microbatches, pair=self._num_steps)

        def step() -> Any:
            result = self._module.training_step(*arguments)
            loss_of(result, self._steps.where)
            return result

        with self.precision_plugin.train_step_context():
            result = self._steps.run(
                "training_step",
                step,
                prepare,
                lambda inputs: self._trained(inputs, microbatches, gradients),
                is_everywhere=self._outputs == "all",
            )
            self._check_loss()
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
        return self._steps.run(name, lambda: step(*arguments), lambda _: None, self._forward_of_last)

    def _forward_of_last(self, inputs: tuple[Any, ...]) -> Any:
        return evaluate(self._stage, self._replica, inputs, self._num_microbatches)

    def _forward_everywhere(self, *inputs: Any) -> Any:
        """Return the network's output, on every rank of the replica."""
        return self._replica.broadcast(self._forward_of_last(inputs), self._replica.last)

    def _trained(self, inputs: tuple[Any, ...], microbatches: int, gradients: StepGradients) -> Any:
        """Run the stages forward and backward; return the network's output on ranks that go on with the step."""
        shapes = tuple((tuple(value.shape), value.dtype) for value in inputs)
        with stage_stream(drawn_seed(), self._replica.position):
            if not self._runner.knows(microbatches, shapes):
                first = tuple(value[: len(value) // microbatches] for value in inputs)
                found = try_out(self._stage, self._replica, first, self._loss.try_out)
                self._runner.learn(microbatches, shapes, found)
            with gradients:
                output = self._runner.step(inputs if self._replica.position == 0 else (), microbatches, shapes)
        if self._outputs == "all":
            output = self._replica.broadcast(output, self._replica.last)
        error = self._loss.end() if self._replica.is_last else None
        if error is not None:
            raise error
        return output

    def _check_loss(self) -> None:
        """Raise the same error on all ranks if a loss is not that of its microbatches, or copies of weights differ."""
        if not is_checked(self._num_steps):
            return
        found: list[str | None] = [None] * self.world_size
        difference = self._tied.difference()
        dist.all_gather_object(found, difference or (self._loss.check() if self._replica.is_last else None))
        wrong = next(filter(None, found), None)
        if wrong is not None:
            raise StrategyError(wrong)

    def _average(self, parameters: Sequence[Any]) -> None:
        if self._is_sync_blocked:
            return
        self._tied.add_gradients()
        if self.placement.data_size > 1:
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
        return total_norm(counted, self._replica.group, self.root_device, norm_type)

    def _tell_once(self, rows: int, microbatches: int) -> None:
        """Warn in the first step if its microbatches are fewer than configured, or fewer than the stages."""
        if self._is_told or self.global_rank != 0:
            return
        self._is_told = True
        num_stages = self.placement.pipeline_size
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


def _named(network: Network, part: range) -> str:
    first, last = network.names[part[0]], network.names[part[-1]]
    return f"{network.name}.{first}" if len(part) == 1 else f"{network.name}.{first} to {last}"
