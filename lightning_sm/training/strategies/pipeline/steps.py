"""The user's steps, which call a network that is split across several ranks."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.draws import MatchedDraws
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.layers import Network
from lightning_sm.training.strategies.pipeline.random_state import random_state, take_random_state
from lightning_sm.training.strategies.pipeline.step_effects import StepEffects

# Attributes of these classes are copied, because steps may change them in place.
_CONTAINERS = (list, dict, set, deque)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class _LeftError(BaseException):
    """An exception that ends the user's step when it calls the network; ``except Exception`` does not catch it."""


class UserSteps:
    """A runner of the user's steps for a network that is split across several ranks.

    The LightningModule stays as the user wrote it. Each rank of a replica runs a step until it calls the network, and
    then runs its own stage. The last rank receives the output and runs the rest of the step. The others leave the step
    early, and its effects are then applied to them (see ``StepEffects``). While the stages run a training step, the
    last rank also runs ``training_step`` for each microbatch, on a copy of the module, to get the loss.

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
        # A memo for deepcopy: copies of the module share these objects with the original.
        self._shared = {id(item): item for item in (*network.module.modules(), *module.parameters(), group)}
        self._name = network.name
        self.where = f"{type(module).__name__}.training_step"
        self._replica = replica
        self._forward = everywhere
        self._recording = ExitStack()
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
            self._recording.close()  # replays draw anew from here on
            output = forward(inputs)
            if not goes_on:
                raise _LeftError
            return output

        recorded: Any = nullcontext() if effects is None else effects.recorded(name)
        result: Any = None
        with self._replica.together(), suppress(_LeftError), torch.no_grad(), recorded:
            result = self._with_network(call, f"{type(self._module).__name__}.{name}", step)
        return result if effects is None else effects.share(result)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Remember what replays of the training step in this block need: the module and the random numbers."""
        with ExitStack() as self._recording:
            if self._replica.is_last:
                self._before = self._copy(self._module)
                self._draws = self._recording.enter_context(MatchedDraws())
            yield

    def check_inputs(self, inputs: tuple[Any, ...], rows: int) -> None:
        """Check the inputs that ``training_step`` passes to the network.

        Args:
            inputs: The inputs.
            rows: Number of rows in the batch.

        Raises:
            StrategyError: The inputs do not have the rows of the batch.
        """
        if any(not isinstance(value, Tensor) or not value.ndim or len(value) != rows for value in inputs):
            shown = ", ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in inputs)
            raise StrategyError(
                f"{self.where} calls self.{self._name}(...) with ({shown}), but the batch has {rows} rows. "
                "Microbatches are cut from the rows of both: pass tensors with one row (dimension 0) per sample."
            )

    def compare_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        """Check that all ranks pass the same inputs to the network; a collective call within the replica.

        Args:
            inputs: This rank's inputs.

        Raises:
            StrategyError: The inputs differ from those on the first rank, the only ones that the network gets.
        """
        with self._replica.together():
            # Send copies: to torch, NCCL's broadcast changes a tensor in place on the sender, too.
            sent = self._replica.broadcast([value.clone() for value in inputs], 0)
            pairs = zip(inputs, sent, strict=True)
            if not all(torch.allclose(own, first, rtol=1e-3, atol=1e-5, equal_nan=True) for own, first in pairs):
                raise StrategyError(
                    f"{self.where} passes other inputs to self.{self._name}(...) on this rank than on the first one. "
                    "They depend on what it changes after this call, such as the state of a generator, but only the "
                    "last rank runs it to the end. Change that before the call, or set outputs: all."
                )

    def draws(self, rows: slice, num_rows: int) -> MatchedDraws | None:
        """Return the random numbers for a replay; None if the step draws none before it calls the network.

        Args:
            rows: The rows of the microbatch.
            num_rows: Number of rows in the batch.
        """
        return MatchedDraws(self._draws.of_rows(rows, num_rows)) if self._draws.has_drawn else None

    def loss(self, arguments: tuple[Any, ...], output: Any, draws: MatchedDraws | None = None) -> Tensor:
        """Return the loss of a microbatch from the network's output, without changing the module.

        Args:
            arguments: The arguments of ``training_step``, with the rows of the microbatch.
            output: The network's output for the microbatch.
            draws: The random numbers that the step draws before it calls the network. Later ones are added to them.

        Raises:
            StrategyError: ``training_step`` calls the network several times, returns no loss, or cannot draw the given
                random numbers.
        """
        module = self._copy(self._before)

        def network(*_: Any) -> Any:
            if draws is not None:
                if not draws.is_like(self._draws):
                    raise StrategyError(
                        f"{self.where} draws random numbers before it calls self.{self._name}(...), and these cannot "
                        "be divided among microbatches. Draw with torch, one row for each row of the batch, or draw in "
                        "on_after_batch_transfer."
                    )
                take_random_state(state)
            return output

        if draws is not None:
            state = random_state()
            take_random_state(self._draws.start)
        trainer: Any = self._module.trainer
        should_stop = trainer.should_stop
        with draws or nullcontext():
            result = self._with_network(network, self.where, lambda: module.training_step(*arguments))
        trainer.should_stop = should_stop
        return loss_of(result, self.where)

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

    def _copy(self, original: LightningModule) -> Any:
        """Return a copy of a module, with the same network, for replays that log nothing and leave no trace.

        Buffers and metrics are copied, too: restoring them in place would break autograd if a loss depends on them.
        """
        module: Any = object.__new__(type(original))
        attributes = vars(module)
        for spare in self._spares.values():
            spare.reset()
        known = {**self._shared, **self._spares, **{id(spare): spare for spare in self._spares.values()}}
        for name, value in vars(original).items():
            if name in {"_modules", "_buffers"} or isinstance(value, _GENERATORS):
                attributes[name] = copy.deepcopy(value, known)
            else:
                attributes[name] = copy.copy(value) if isinstance(value, _CONTAINERS) else value
        attributes["log"] = attributes["print"] = lambda *_, **__: None
        return module

    @cached_property
    def _spares(self) -> dict[int, Any]:
        """A copy of each metric, by the metric's id; made once on the device, so no step copies an epoch's states."""
        metrics = [child for child in self._module.modules() if isinstance(child, (Metric, MetricCollection))]
        known = dict(self._shared)
        return {id(metric): copy.deepcopy(metric, known) for metric in metrics if id(metric) not in known}


def loss_of(result: Any, where: str) -> Tensor:
    """Return the loss in the result of ``training_step``.

    Args:
        result: The result.
        where: The name of ``training_step`` in messages.

    Raises:
        StrategyError: The result has no loss.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise StrategyError(
            f"{where} returned {type(result).__name__} without a loss. In a pipeline, every step needs one, because "
            "one rank of a replica cannot skip a batch on its own."
        )
    return loss
