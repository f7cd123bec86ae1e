"""PipelineParallelStrategy: pipeline parallelism, combined with data parallelism over replicas of the pipeline."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sm._lightning import (
    DDPStrategy,
    LambdaCallback,
    LightningModule,
    ModelPruning,
    StochasticWeightAveraging,
    Trainer,
    WeightAveraging,
    sized_len,
)
from lightning_sm._table import draw_table
from lightning_sm.errors import StrategyError
from lightning_sm.training.all_ranks import of_all_ranks
from lightning_sm.training.strategies.pipeline.backward import StepPasses, average
from lightning_sm.training.strategies.pipeline.balance import balanced, explicit_split
from lightning_sm.training.strategies.pipeline.checkpoint import LogicalCheckpoint
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.forward import evaluate, refuse_mixed_rows
from lightning_sm.training.strategies.pipeline.layers import Network, materialize
from lightning_sm.training.strategies.pipeline.loaders import FollowingLoader
from lightning_sm.training.strategies.pipeline.loss import check_loss, loss_of
from lightning_sm.training.strategies.pipeline.placement import PlacementOrder, num_stages, replicas_of
from lightning_sm.training.strategies.pipeline.random_state import random_state, stage_stream, take_random_state
from lightning_sm.training.strategies.pipeline.rows import num_rows
from lightning_sm.training.strategies.pipeline.steps import UserSteps
from lightning_sm.training.strategies.pipeline.tied import TiedWeights, find_tied

logger = logging.getLogger(__name__)

# The training steps in which ranks compare their inputs: the first ones, and then one in _EVERY_STEPS.
_FIRST_STEPS, _EVERY_STEPS = 10, 100
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_TIMEOUT = timedelta(minutes=30)  # torch's and Lightning's default


class PipelineParallelStrategy(DDPStrategy):
    """A strategy that splits the layers of a model across processes, with or without data parallelism.

    Write an ordinary LightningModule: its network is an ``nn.Sequential``, or a module with a method
    ``pipeline_layers()`` that returns its layers in order, and ``training_step`` calls the network once. Each process
    keeps one stage of the network. Logged values, metrics, the returned loss, gradient accumulation, clipping,
    schedulers, validation, test, prediction and checkpoints work as in DDP with one process per replica. A checkpoint
    is one file, from which any number of stages, or a single process, can resume.

    The network runs in microbatches, but ``training_step`` gets the output for the whole batch and computes any loss
    from it. Until the backward pass, each process holds the activations of all microbatches.

    Args:
        pipeline_parallel_size: Number of processes per replica of the model. "auto": all processes on a host, or on all
            hosts if each has only one.
        data_parallel_size: Number of replicas. "auto": as many as the processes allow.
        num_microbatches: Number of microbatches per step. Choose at least one per stage: with fewer, ranks wait longer
            for each other. A batch with fewer rows is split into single rows.
        placement: "cluster": the ranks of a replica are neighbours, mostly on one host. "spread": they are as far apart
            as possible, so that replicas of a stage are neighbours.
        network: Name of the network in the LightningModule. If None, the module's only child that can be split.
        split: Where to split the network: "parameters" balances the number of parameters; a list names the first layer
            of each stage, except for the first stage.
        outputs: "loss": in training, validation and test, only the ranks of the last stage get the network's outputs;
            the others get what the step logs, its metrics and buffers, and the numbers that it returns. "all": all
            ranks get the outputs and run the whole step. Predictions always go to all ranks.
        process_group_backend: As for DDP.
        timeout: How long to wait for another process before raising an error.

    Raises:
        StrategyError: An argument is invalid, or, in ``setup``, the model or the Trainer does not support a pipeline.
    """

    def __init__(  # noqa: PLR0917  # like Lightning's strategies
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        num_microbatches: int = 4,
        placement: PlacementOrder = "cluster",
        network: str | None = None,
        split: Literal["parameters"] | list[int | str] = "parameters",
        outputs: Literal["loss", "all"] = "loss",
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        for option, value, known in (
            ("placement", placement, get_args(PlacementOrder)),
            ("outputs", outputs, ("loss", "all")),
        ):
            if value not in known:
                raise StrategyError(f"{option}={value!r} is not one of {', '.join(known)}.")
        if num_microbatches < 1:
            raise StrategyError(f"num_microbatches={num_microbatches} must be at least 1.")
        if split != "parameters" and not isinstance(split, list):
            raise StrategyError(f"split={split!r} is neither 'parameters' nor a list of layers.")
        if process_group_backend == "smddp":
            raise StrategyError("A pipeline needs a process group per replica, but SMDDP has only one. Use nccl.")
        self._sizes = (pipeline_parallel_size, data_parallel_size)
        self._num_microbatches = num_microbatches
        self._order = placement
        self._network_name = network
        self._split = split
        self._outputs = outputs
        self._num_steps = 0
        # The ranks of each replica, in the order of its stages.
        self._replicas: list[list[int]] = []
        self._cut_module: LightningModule | None = None
        # Starting loaders draws random numbers only on the rank that fetches batches, so share its state afterwards.
        share = {f"on_{stage}_start": self._share_random_state for stage in ("train", "validation", "test", "predict")}
        self._shared_draws = LambdaCallback(**share)

    # Ranks

    def setup_environment(self) -> None:
        """Connect the ranks, and create the process groups of replicas and stages.

        Raises:
            StrategyError: The product of the sizes is not the world size.
        """
        super().setup_environment()
        if self._replicas:
            return
        pipeline_size = num_stages(self.world_size, self.num_processes, *self._sizes)
        self._replicas = replicas_of(self.world_size, pipeline_size, self._order)
        self._data_group = self._group([list(ranks) for ranks in zip(*self._replicas, strict=True)])
        tensors, objects = self._group(self._replicas), self._group(self._replicas, "gloo")
        ranks = next(ranks for ranks in self._replicas if self.global_rank in ranks)
        self._replica = Replica(tensors, objects, ranks, self.root_device)

    def _group(self, groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
        """Create a process group for each list of ranks, and return this rank's group."""
        own, _ = dist.new_subgroups_by_enumeration(groups, timeout=self._timeout, backend=backend)
        return cast(dist.ProcessGroup, own)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Number of replicas and index of this rank's replica: all ranks of a replica train on the same samples."""
        return {"num_replicas": len(self._replicas), "rank": dist.get_rank(self._data_group)}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas: a sum over all ranks would count each replica once per stage.

        Args:
            tensor: A tensor; other values are returned unchanged.
            group: The process group. If None, the ranks that hold the same stage.
            reduce_op: "mean", "sum", or one of torch's ``ReduceOp``.
        """
        return super().reduce(tensor, group or self._data_group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the ranks over which ``reduce`` reduces.

        Args:
            tensor: A tensor of any shape.
            group: The process group. If None, the ranks that hold the same stage.
            sync_grads: Whether gradients flow back.
        """
        return super().all_gather(tensor, group or self._data_group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return the same decision on all ranks.

        Args:
            decision: This rank's decision.
            all: Whether a True result needs True from all ranks; otherwise, one rank is enough.
        """
        decisions = of_all_ranks(bool(decision))
        return False not in decisions if all else True in decisions

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Run the transfer hooks on the replica's first rank, and broadcast its batch to the other ranks.

        If every rank ran them, the user's random transforms and samplers could give the stages different batches. The
        random state is broadcast along with the batch.

        Args:
            batch: The batch.
            device: This rank's device.
            dataloader_idx: Index of the loader.
        """
        if self._replica.is_first:
            batch = super().batch_to_device(batch, device, dataloader_idx)
        batch, state = self._replica.broadcast((batch, random_state()), 0)
        take_random_state(state)
        return batch

    def _share_random_state(self, *_: Any) -> None:
        """Copy the random state of the rank that fetches batches to its whole replica; a collective call."""
        take_random_state(self._replica.broadcast(random_state(), 0))

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let only the first rank of a replica fetch batches, if the loader has a length.

        Args:
            dataloader: One of the Trainer's loaders.
        """
        # For prediction, every rank needs the loader: prediction writers get a batch's sample indices from it.
        if self._replica.is_first or self._module.trainer.predicting or sized_len(dataloader) is None:
            return dataloader
        return FollowingLoader(dataloader)

    # The model

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are loaded after ``setup``, when each rank holds only its stage."""
        return True

    def setup(self, trainer: Any) -> None:
        """Cut the network, and set up the part that this rank keeps.

        Args:
            trainer: The Trainer.

        Raises:
            StrategyError: The model or the Trainer does not support a pipeline; the message gives the reason.
        """
        module = self._module
        if module is not self._cut_module:
            self._refuse(trainer, module)
            self._share_random_state()
            with stage_stream(self._replica.position):
                self._cut(module)
            self._cut_module = module
        if self._shared_draws not in trainer.callbacks:
            # Share the state before the callbacks' hooks, and again before the module's: callbacks may restart loaders.
            trainer.callbacks = [self._shared_draws, *trainer.callbacks, self._shared_draws]
        # Skip DDP's setup: it would wrap the model, and copy rank 0's weights to ranks with other stages.
        super(DDPStrategy, self).setup(trainer)
        if not self._replica.is_first:
            # The batch comes from the first rank, which has already called the user's hook on it.
            module._on_before_batch_transfer = lambda batch, dataloader_idx=0: batch  # type: ignore[method-assign]
        # Clip by the norm over all stages, so that the module's and the plugin's clip_gradients work unchanged.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers for this rank's parameters.

        Args:
            trainer: The Trainer.

        Raises:
            StrategyError: An optimizer needs the gradients of all parameters, but each rank has only some of them.
        """
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise StrategyError(
                "LBFGS needs the gradients of all parameters for its line search, but in a pipeline, each rank has "
                "only those of its stage. Use another optimizer, or strategy=ddp."
            )
        # LightningCLI gives all parameters to the --optimizer before the network is cut, so drop those of other ranks.
        own = set(map(id, self._tied.without_copies(self._module.parameters())))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]

    @property
    def _module(self) -> LightningModule:
        return cast(LightningModule, self.lightning_module)

    def _setup_model(self, model: Any) -> Any:
        # Copy the weights: equal seeds do not guarantee equal weights in all replicas of a stage.
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), group=self._data_group, group_src=0)
        self._tied.update_copies()
        return model

    def _refuse(self, trainer: Any, module: Any) -> None:
        reasons = [
            (not module.automatic_optimization, "Its training_step steps the optimizer: use automatic optimization"),
            (module._compiler_ctx is not None, "It is compiled as a whole: compile the layers of its network"),
            (
                getattr(trainer.precision_plugin, "scaler", None),
                "16-mixed would skip a step on some ranks only: use bf16-mixed",
            ),
            (self._layer_sync is not None, "sync_batchnorm is for ranks with the same layers: use GroupNorm"),
            (
                any(getattr(log, "_log_graph", False) is True for log in trainer.loggers),
                "log_graph=True of a logger runs the model on rank 0 alone: remove it",
            ),
            (
                any(
                    isinstance(one, (ModelPruning, StochasticWeightAveraging, WeightAveraging))
                    for one in trainer.callbacks
                ),
                "ModelPruning, StochasticWeightAveraging and WeightAveraging need the whole model: remove the callback",
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
                    f"Stage {stage} ({layers}) has no trainable parameters. Use fewer stages, or another split=[...]."
                )
            ranks = ", ".join(str(ranks[stage]) for ranks in self._replicas)
            rows.append((stage, ranks, layers, f"{sum(parameter.numel() for parameter in parameters):,}"))
        self._report(rows)
        tied = find_tied(module, stages)
        self._checkpoint = LogicalCheckpoint(module, self._replica, tied)
        self._stage = network.stage(parts[self._replica.position])
        network.keep(parts[self._replica.position])
        materialize(list(self._stage.layers), self.root_device)
        self._tied = TiedWeights(module, tied, self._replica)
        everywhere = self._outputs == "all"
        self._steps = UserSteps(
            module, network, self._replica, self._forward_everywhere, self._data_group, are_everywhere=everywhere
        )

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
            "Pipeline over %d ranks, replicas: %d (%s), up to %d microbatches\n%s",
            len(self._replica.ranks),
            len(self._replicas),
            self._order,
            self._num_microbatches,
            draw_table(rows, ("stage", "ranks, by replica", "layers", "parameters")),
        )
        if self._outputs == "loss":
            logger.info(
                "Only the ranks of the last stage run steps to the end. To run them on all ranks, set outputs: all."
            )
        if self._num_microbatches > 1 and any(isinstance(one, _BATCH_NORMS) for one in self._module.modules()):
            logger.warning("BatchNorm computes statistics of microbatches; GroupNorm and LayerNorm do not.")

    # Steps

    def training_step(self, *arguments: Any) -> Any:
        """Run a step over all stages.

        Args:
            arguments: The arguments of the LightningModule's ``training_step``; the first is the batch.

        Returns:
            The result of ``training_step`` for the whole batch. Calling ``backward`` on its loss adds the gradients.
        """
        rows = num_rows(arguments[0])
        microbatches = min(rows, self._num_microbatches)
        passes = StepPasses(self._stage, self._replica, self._average)

        def forward(inputs: tuple[Any, ...]) -> Any:
            """Run the forward passes of all stages; return the network's output on ranks that continue the step."""
            with self._replica.together():
                self._steps.check_inputs(inputs, rows)
            if self._num_steps == 0 and microbatches > 1:
                refuse_mixed_rows(self._stage, self._replica, [value[: 2 * rows // microbatches] for value in inputs])
            # Comparing takes time, but ranks may come to differ late.
            if self._num_steps < _FIRST_STEPS or self._num_steps % _EVERY_STEPS == 0:
                self._steps.compare_inputs(inputs)
            output = passes.forward(inputs, microbatches)
            if self._outputs == "all":
                output = self._replica.broadcast(output, self._replica.last)
            return None if output is None else passes.attach(output)

        def step() -> Any:
            result = self._module.training_step(*arguments)
            check_loss(loss_of(result, self._steps.where), self._steps.where, self._module, passes)
            return result

        with self.precision_plugin.train_step_context():
            result = self._steps.run("training_step", step, forward)
        self._num_steps += 1
        if self._replica.is_last or self._outputs == "all":
            return result
        # This rank has left the step early. Its loss only starts its part of the backward passes.
        loss = passes.attach(loss_of(result, self._steps.where))
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    def validation_step(self, *arguments: Any) -> Any:
        """Run a validation step over all stages.

        Args:
            arguments: The arguments of the LightningModule's ``validation_step``; the first is the batch.
        """
        return self._evaluated("validation_step", partial(super().validation_step, *arguments))

    def test_step(self, *arguments: Any) -> Any:
        """Run a test step over all stages.

        Args:
            arguments: The arguments of the LightningModule's ``test_step``; the first is the batch.
        """
        return self._evaluated("test_step", partial(super().test_step, *arguments))

    def _evaluated(self, name: str, step: Callable[[], Any]) -> Any:
        return step() if self._outputs == "all" else self._steps.run(name, step, self._forward_of_last)

    def _forward_of_last(self, inputs: tuple[Any, ...]) -> Any:
        return evaluate(self._stage, self._replica, inputs, self._num_microbatches)

    def _forward_everywhere(self, *inputs: Any) -> Any:
        """Return the network's output on every rank of the replica."""
        return self._replica.broadcast(self._forward_of_last(inputs), self._replica.last)

    def _average(self) -> None:
        """Complete the gradients of this rank's parameters, unless those of the next batch will be added."""
        if self._module.trainer.fit_loop._should_accumulate():
            return
        self._tied.collect_gradients()
        if len(self._replicas) > 1:
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            average(self._tied.without_copies(trained), self._data_group, len(self._replicas))

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer, then copy tied parameters from the rank that owns them to the others.

        Args:
            optimizer: This rank's optimizer.
            closure: Computes the loss and the gradients.
            model: The module with the hooks around the step. If None, the LightningModule.
            **kwargs: Arguments of the optimizer's ``step``.
        """
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._tied.update_copies()
        return result

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, self.gradient_norm(parameters))

    def gradient_norm(self, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole model's gradients, over all stages; a collective call.

        Args:
            parameters: The parameters to count on this rank. If None, all parameters of the module.
            norm_type: The p of the p-norm; may be infinite.
        """
        counted = self._module.parameters() if parameters is None else parameters
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(self.root_device)  # CPU if no gradients
        if math.isinf(norm_type):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self._replica.group)
            return norm
        powers = norm.pow(norm_type)
        dist.all_reduce(powers, group=self._replica.group)
        return powers.pow(1 / norm_type)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of all stages on rank 0, and of this rank's stage elsewhere; a collective call."""
        return self._checkpoint.weights()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank 0; a collective call.

        Args:
            checkpoint: The checkpoint.
            filepath: The file.
            storage_options: Options of the checkpoint plugin.

        Raises:
            StrategyError: A callback's tensors differ between stages.
        """
        self._checkpoint.check_callbacks(checkpoint.get("callbacks", {}))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of this rank's stage from a checkpoint made with any number of stages.

        Args:
            checkpoint: The checkpoint.
            strict: Whether the checkpoint must have exactly the model's names.

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
        """Load the optimizer states of this rank's stage; a collective call.

        Args:
            checkpoint: The checkpoint.

        Raises:
            CheckpointError: The checkpoint's parameter groups do not match the optimizers'.
        """
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._checkpoint.load_optimizer_state(optimizer, state)
