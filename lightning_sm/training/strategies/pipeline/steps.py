"""The user's steps, which call a network that is split across several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.layers import Network
from lightning_sm.training.strategies.pipeline.step_effects import StepEffects


class _LeftError(BaseException):
    """An exception that ends the user's step when it calls the network; ``except Exception`` does not catch it."""


class UserSteps:
    """A runner of the user's steps for a network that is split across several ranks.

    The LightningModule stays as the user wrote it. Each rank of a replica runs a step until it calls the network, and
    then runs its own stage. The last rank receives the output and runs the rest of the step. The others leave the step
    early, and its effects are then applied to them (see ``StepEffects``).

    Args:
        module: The LightningModule.
        network: The network of the module.
        replica: The ranks of this replica.
        everywhere: Called with the network's inputs outside of steps; returns the output on all ranks.
        group: The ranks over which metrics are reduced: one per replica.
        are_everywhere: Whether all ranks run steps to the end.

    Attributes:
        where: The name of ``training_step`` in messages.
    """

    def __init__(
        self,
        module: LightningModule,
        network: Network,
        replica: Replica,
        everywhere: Callable[..., Any],
        group: dist.ProcessGroup,
        *,
        are_everywhere: bool,
    ) -> None:
        self._module = module
        self._name = network.name
        self.where = f"{type(module).__name__}.training_step"
        self._replica = replica
        self._forward = everywhere
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.process_group = group
        self._effects = None if are_everywhere else StepEffects(module, network.module, replica)
        # Set forward on the instance, so that the user's forward hooks still run.
        network.module.forward = self._call

    def run(self, name: str, step: Callable[[], Any], forward: Callable[[tuple[Any, ...]], Any]) -> Any:
        """Run one of the user's steps; a collective call within the replica.

        Args:
            name: Name of the user's method.
            step: Calls the method, and may do more work after it.
            forward: Called with the network's inputs; runs the stages, and returns the output on ranks that run the
                step to the end.

        Returns:
            The result of ``step``; on ranks that leave the step, only the numbers in it.
        """
        effects = self._effects
        goes_on = effects is None or self._replica.is_last

        def call(*inputs: Any) -> Any:
            output = forward(inputs)
            if not goes_on:
                raise _LeftError
            return output

        recorded: Any = nullcontext() if effects is None else effects.recorded(name)
        result: Any = None
        with self._replica.together(), suppress(_LeftError), recorded:
            result = self._with_network(call, f"{type(self._module).__name__}.{name}", step)
        return result if effects is None else effects.share(result)

    def check_inputs(self, inputs: tuple[Any, ...], rows: int) -> None:
        """Check the inputs that ``training_step`` passes to the network.

        Args:
            inputs: The inputs.
            rows: Number of rows in the batch.

        Raises:
            StrategyError: The inputs do not have the rows of the batch, or require gradients.
        """
        are_rows = (isinstance(value, Tensor) and value.ndim and len(value) == rows for value in inputs)
        if not inputs or not all(are_rows) or any(value.requires_grad for value in inputs):
            shown = ", ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in inputs)
            raise StrategyError(
                f"{self.where} calls self.{self._name}(...) with ({shown}), but the batch has {rows} rows. Pass "
                "tensors with one row (dimension 0) per sample, from which microbatches can be cut. They must be "
                "detached: the backward pass ends there."
            )

    def compare_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        """Check that all ranks pass the same inputs to the network; a collective call within the replica.

        Args:
            inputs: This rank's inputs.

        Raises:
            StrategyError: The inputs differ from those on the first rank, the only ones that the network gets.
        """
        with self._replica.together():
            sent = self._replica.broadcast(list(inputs), 0)
            pairs = zip(inputs, sent, strict=True)
            if not all(torch.allclose(own, first, rtol=1e-3, atol=1e-5, equal_nan=True) for own, first in pairs):
                raise StrategyError(
                    f"{self.where} passes other inputs to self.{self._name}(...) on this rank than on the first one. "
                    "They depend on what it changes after this call, such as the state of a generator, but only the "
                    "last rank runs it to the end. Change that before the call, or set outputs: all."
                )

    def _call(self, *inputs: Any, **keywords: Any) -> Any:
        if keywords:
            raise StrategyError(
                f"{type(self._module).__name__} calls self.{self._name}({', '.join(keywords)}=...), but stages accept "
                "only positional arguments: remove the names."
            )
        return self._forward(*inputs)

    def _with_network(self, forward: Callable[..., Any], where: str, step: Callable[[], Any]) -> Any:
        """Run a step whose single call of the network is handled by ``forward``.

        Raises:
            StrategyError: The step does not call the network exactly once.
        """
        calls = 0

        def once(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise StrategyError(
                    f"{where} calls the network several times, but a pipeline runs it once per step. If the rows of "
                    "the inputs belong together, concatenate them along dimension 0 into one call. Otherwise, use "
                    "outputs: all for evaluation, or strategy=ddp or fsdp."
                )
            return forward(*inputs)

        before, self._forward = self._forward, once
        try:
            result = step()
        finally:
            self._forward = before
        if not calls:
            raise StrategyError(f"{where} does not call self.{self._name}(...), the network.")
        return result
