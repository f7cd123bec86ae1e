"""The user's steps, which call a network that is spread over several ranks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.effects import EffectRecorder
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import random_state
from lightning_sm.training.strategies.pipeline.stage import as_tuple

_OF_LIGHTNING = vars(LightningModule()).keys()
# Attributes of these classes are copied item by item.
_CONTAINERS = (list, dict, set, deque)


_SEVERAL_CALLS = (
    "{where} calls the network several times. A pipeline runs it once for each step: join the inputs along dimension 0 "
    "into one call if their rows belong together, or use outputs: all for evaluations, or strategy=ddp or fsdp."
)


class _LeftError(BaseException):
    """The way out of the user's step at the network's call, past the user's exception handlers."""


class UserSteps:
    """The caller of the user's steps, whose network is spread over several ranks.

    The LightningModule is left as the user wrote it. Each rank of a replica runs a step up to the network's call, in
    which all of them run their stages. The last one has the output, and goes on to the end of the step. The others
    leave it, and repeat its effects (see ``EffectRecorder``). While the stages run a training step, the last rank also
    runs ``training_step`` for each microbatch, to get the loss, without logs, metrics, and anything that it keeps.

    Args:
        module: The LightningModule.
        network: Its network.
        name: The network's name.
        replica: The ranks of this replica.
        everywhere: Called with the inputs of a call outside of steps; returns the output on all ranks.
        group: The ranks over which metrics are reduced: the replicas.
    """

    def __init__(  # noqa: PLR0917  # what a step needs
        self,
        module: LightningModule,
        network: nn.Module,
        name: str,
        replica: Replica,
        everywhere: Callable[..., Any],
        group: dist.ProcessGroup,
    ) -> None:
        self._module = module
        self._name = name
        self._replica = replica
        self._forward = everywhere
        self._effects = EffectRecorder(module, network)
        self._is_loss_checked = False
        self._spares = _spare_metrics(module)
        inner = {id(child) for child in network.modules()}
        self._around = [child for child in module.modules() if id(child) not in inner and not isinstance(child, Metric)]
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.process_group = group
        # On the instance, so that the user's forward hooks still run.
        network.forward = self._call

    def run(
        self,
        name: str,
        step: Callable[[], Any],
        prepare: Callable[[tuple[Any, ...]], None],
        forward: Callable[[tuple[Any, ...]], Any],
        *,
        is_everywhere: bool = False,
    ) -> Any:
        """Run a step of the user's; a collective call of the replica.

        Args:
            name: Name of the user's method.
            step: Calls it, with or without more to do at its end.
            prepare: Called with the network's inputs before any rank runs its stage; its errors are raised on all.
            forward: Runs the stages; returns the output on ranks that go on.
            is_everywhere: Whether all ranks go on to the end of the step.

        Returns:
            What ``step`` returns; on ranks that do not go on, the numbers of that.
        """
        is_called = False
        goes_on = is_everywhere or self._replica.is_last

        def call(*inputs: Any) -> Any:
            nonlocal is_called
            if is_called:
                raise StrategyError(_SEVERAL_CALLS.format(where=self._where(name)))
            is_called = True
            self._replica.raise_together(_error_of(lambda: prepare(inputs)))
            output = forward(inputs)
            if not goes_on:
                raise _LeftError
            return output

        result: Any = None
        error: Exception | None = None
        watch: Any = nullcontext()
        if not is_everywhere:
            watch = self._effects.recorded(name) if goes_on else self._effects.muted()
        try:
            with torch.no_grad(), self.network_as(call), watch:
                result = step()
            if not is_called:
                error = StrategyError(f"{self._where(name)} does not call self.{self._name}(...), the network.")
        except _LeftError:
            pass
        except Exception as raised:
            if raised is self._replica.raised:
                raise
            error = raised
        self._replica.raise_together(error)
        if is_everywhere:
            return result
        effects = self._effects.of_step(result) if goes_on else None
        effects = self._replica.broadcast(effects, self._replica.last)
        return result if goes_on else self._effects.repeat(effects)

    def check_inputs(self, inputs: tuple[Any, ...], rows: int, before: tuple[Any, ...]) -> None:
        """Check the inputs with which ``training_step`` calls the network.

        Args:
            inputs: The inputs.
            rows: Number of rows of the batch.
            before: The random state before the step.

        Raises:
            StrategyError: They have other rows, or the step has drawn random numbers: microbatches would draw others.
        """
        if any(not isinstance(value, Tensor) or not value.ndim or len(value) != rows for value in inputs):
            shown = ", ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in inputs)
            raise StrategyError(
                f"{self.where} calls self.{self._name}(...) with ({shown}), but the batch has {rows} rows. "
                "Microbatches are rows of both: pass tensors with one row (dimension 0) for each sample."
            )
        if before != random_state():
            raise StrategyError(
                f"{self.where} draws random numbers before it calls self.{self._name}(...). It runs again for each "
                "microbatch, with different numbers. Draw them in on_after_batch_transfer, which runs once."
            )

    def loss(self, arguments: tuple[Any, ...], output: Any) -> Tensor:
        """Return the loss of a microbatch, from the network's output.

        Args:
            arguments: Those of ``training_step``, with the rows of the microbatch.
            output: The network's output for it.

        Raises:
            StrategyError: ``training_step`` calls the network several times, uses weights itself, or returns no loss.
        """
        if not self._is_loss_checked:
            self._check_loss(arguments, output)
            self._is_loss_checked = True
        with self._quiet(_Once(output, self.where)):
            return loss_of(self._module.training_step(*arguments), self.where)

    @property
    def where(self) -> str:
        """The name of ``training_step`` for messages."""
        return self._where("training_step")

    def _where(self, step: str) -> str:
        return f"{type(self._module).__name__}.{step}"

    def _call(self, *inputs: Any, **keywords: Any) -> Any:
        if keywords:
            raise StrategyError(
                f"{type(self._module).__name__} calls self.{self._name}({', '.join(keywords)}=...). Stages get "
                "positional arguments only: remove the names."
            )
        return self._forward(*inputs)

    def _check_loss(self, arguments: tuple[Any, ...], output: Any) -> None:
        leaves = [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in as_tuple(output)]
        with (
            torch.enable_grad(),
            self._quiet(_Once(leaves[0] if isinstance(output, Tensor) else tuple(leaves), self.where)),
        ):
            loss = loss_of(self._module.training_step(*arguments), self.where)
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        used = sorted(names[id(leaf)] for leaf in _leaves(loss) if id(leaf) in names)
        if used:
            raise StrategyError(
                f"The loss of {self.where} uses the parameters {', '.join(used)} outside of the call of "
                f"self.{self._name}(...). Each rank has only its own stage's parameters: for decay, use the optimizer's"
                f" weight_decay; layers belong in self.{self._name}."
            )
        if loss.grad_fn is None:
            raise StrategyError(f"The loss of {self.where} does not depend on the output of self.{self._name}(...).")

    @contextmanager
    def network_as(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Have calls of the network answered by a function.

        Args:
            forward: Returns the network's output for a call.
        """
        before, self._forward = self._forward, forward
        try:
            yield
        finally:
            self._forward = before

    @contextmanager
    def _quiet(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Keep a part of a step out of logs, metrics, and the module's attributes: a counter counts in the replay."""
        module: Any = self._module
        attributes = vars(module)
        kept = dict(attributes)
        for name in kept.keys() - _OF_LIGHTNING:
            if isinstance(kept[name], _CONTAINERS):
                attributes[name] = copy.copy(kept[name])
        # Copies take part in the step, as autograd forbids changing back in place what a loss depends on.
        buffers = [
            (child, name, buffer) for child in self._around for name, buffer in child.named_buffers(recurse=False)
        ]
        for owner, name, buffer in buffers:
            setattr(owner, name, buffer.clone())
        module.log = module.print = _nothing
        for parent, name, _, spare in self._spares:
            parent._modules[name] = spare
        try:
            with self.network_as(forward):
                yield
        finally:
            for name in attributes.keys() - kept.keys():
                del attributes[name]
            attributes.update(kept)
            for owner, name, buffer in buffers:
                setattr(owner, name, buffer)
            for parent, name, metric, spare in self._spares:
                parent._modules[name] = metric
                spare.reset()


class _Once:
    """A network that returns a given output, and refuses a second call."""

    def __init__(self, output: Any, where: str) -> None:
        self._output = output
        self._where = where
        self._is_called = False

    def __call__(self, *_: Any) -> Any:
        if self._is_called:
            raise StrategyError(_SEVERAL_CALLS.format(where=self._where))
        self._is_called = True
        return self._output


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _error_of(check: Callable[[], None]) -> Exception | None:
    try:
        check()
    except Exception as raised:  # noqa: BLE001  # raised on all ranks
        return raised
    return None


def loss_of(result: Any, where: str) -> Tensor:
    """Return the loss of what ``training_step`` has returned.

    Args:
        result: What it returned.
        where: Its name for messages.

    Raises:
        StrategyError: There is none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise StrategyError(
            f"{where} returned {type(result).__name__} without a loss. In a pipeline every step needs one: the ranks "
            "of a replica cannot skip a batch by themselves."
        )
    return loss


def _spare_metrics(module: LightningModule) -> list[tuple[nn.Module, str, Any, Any]]:
    """Return copies of the metrics, for parts of a step that must not count: (parent, name, metric, copy)."""
    spares: list[tuple[nn.Module, str, Any, Any]] = []
    parents = [module, *(child for child in module.modules() if child is not module)]
    for parent in parents:
        if isinstance(parent, (Metric, MetricCollection)):
            continue
        for name, child in parent.named_children():
            if isinstance(child, (Metric, MetricCollection)):
                spares.append((parent, name, child, child.clone()))
    return spares


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors that a loss depends on."""
    seen = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)
