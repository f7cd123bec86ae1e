"""The user's ``training_step``, which calls a network that is spread over several ranks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.calls import CallForm, NetworkCall, NetworkCalls, PositionalCalls
from lightning_sm.training.strategies.pipeline.random_state import random_state
from lightning_sm.training.strategies.pipeline.stage import as_tuple

_OF_LIGHTNING = vars(LightningModule()).keys()
# Attributes of these classes are copied or compared item by item.
CONTAINERS = (list, dict, set, deque)


class _NetworkCalled(BaseException):
    """The exception that carries the network's inputs out of ``training_step``, past the user's exception handlers."""

    def __init__(self, call: NetworkCall) -> None:
        super().__init__()
        self.call = call


class UserSteps:
    """The caller of ``training_step``, with another network in place: one that captures inputs, or has a given output.

    The LightningModule is left as the user wrote it. The first rank runs ``training_step`` up to the network's call.
    The last one runs it for each microbatch to get the loss, and once more with the output for the whole batch: only
    this replay logs, adds to metrics and keeps anything, so that all of it is that of a batch. Other ranks have a
    replay of their own, or repeat the effects of the last one's (see ``EffectRecorder``).

    Args:
        module: The LightningModule.
        network: Its network.
        name: The network's name.
        evaluate: Called with the tensors of a call in place of ``network.forward`` outside of training steps.
        group: The ranks over which metrics are reduced: the replicas.
        calls: How the network is called; None: with tensors in their order.
    """

    def __init__(  # noqa: PLR0917  # what a step needs
        self,
        module: LightningModule,
        network: nn.Module,
        name: str,
        evaluate: Callable[..., Any],
        group: dist.ProcessGroup,
        calls: NetworkCalls | None = None,
    ) -> None:
        self._module = module
        self._name = name
        self._calls = calls or PositionalCalls(f"{type(module).__name__} calls self.{name}")
        self._captured = NetworkCall(())
        self._forward: Callable[[NetworkCall], Any] = self._evaluated
        self._evaluate = evaluate
        self._is_loss_checked = False
        self._spares = _spare_metrics(module)
        inner = {id(child) for child in network.modules()}
        self._around = [child for child in module.modules() if id(child) not in inner and not isinstance(child, Metric)]
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.process_group = group
        # On the instance, so that the user's forward hooks still run.
        network.forward = self._call

    def capture(self, arguments: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
        """Return the inputs with which ``training_step`` calls the network.

        Args:
            arguments: Those of ``training_step``.
            rows: Number of rows of the batch.

        Raises:
            StrategyError: ``training_step`` does not call the network, calls it with other rows, or first draws random
                numbers, which would differ between the ranks that run it.
        """
        before = random_state()
        try:
            with self._quiet(self._stop), torch.no_grad():
                self._module.training_step(*arguments)
        except _NetworkCalled as called:
            self._captured = called.call
            self._calls.form = called.call.form
            inputs = called.call.tensors
        else:
            raise StrategyError(f"{self.where} does not call self.{self._name}(...), the network that is cut.")
        if any(not isinstance(value, Tensor) or not value.ndim or len(value) != rows for value in inputs):
            shown = ", ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in inputs)
            raise StrategyError(
                f"{self.where} calls self.{self._name}(...) with ({shown}), but the batch has {rows} rows. "
                "Microbatches are rows of both: pass tensors with one row (dimension 0) for each sample."
            )
        if before != random_state():
            raise StrategyError(
                f"{self.where} draws random numbers before it calls self.{self._name}(...). Several ranks run it, "
                "each with different numbers. Draw them in on_after_batch_transfer, which runs once for all stages."
            )
        return inputs

    def settle_form(self, known: CallForm) -> StrategyError | None:
        """Return an error if the call that was captured has another form than an earlier one; then keep the earlier.

        Args:
            known: The form with which a batch of the same shapes passed through the stages.
        """
        now = self._calls.form
        if (now.names, now.unsent) == (known.names, known.unsent):
            return None
        self._calls.form = known
        return StrategyError(
            f"{self.where} calls self.{self._name}(...) with {', '.join(now.names)}, but with {', '.join(known.names)} "
            "for an earlier batch of the same shapes. The ranks exchange tensors whose number follows from the shapes "
            "of the batch: pass the same ones for each batch."
        )

    def counts(self) -> Tensor | None:
        """Return how many values of each row the loss averages over, if the call that was captured says so."""
        return self._calls.counts(self._captured)

    def changed_inputs(self, inputs: tuple[Tensor, ...], known: tuple[Tensor, ...]) -> StrategyError | None:
        """Return an error if the network's inputs are not as in an earlier step with a batch of the same shapes.

        Args:
            inputs: The inputs for a microbatch.
            known: Those of the earlier step; their shapes are those of the schedule on all ranks.
        """
        now, before = ([(tuple(value.shape), value.dtype) for value in values] for values in (inputs, known))
        if now == before:
            return None
        return StrategyError(
            f"{self.where} calls self.{self._name}(...) with microbatches of {now}, but with {before} for an earlier "
            "batch of the same shapes. The ranks exchange tensors whose shapes follow from those of the batch: change "
            "them, such as by removing padding, in on_after_batch_transfer."
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
            return _loss_of(self._module.training_step(*arguments), self.where)

    def replay(self, arguments: tuple[Any, ...], output: Any) -> Any:
        """Run ``training_step`` on the whole batch without gradients, and return what it returns.

        Args:
            arguments: Those of ``training_step``.
            output: The network's output for the batch.
        """
        with torch.no_grad(), self.network_as(_Once(output, self.where)):
            result = self._module.training_step(*arguments)
        _loss_of(result, self.where)
        return result

    @staticmethod
    def network_inputs(module: LightningModule, network: nn.Module, example: Any) -> tuple[Any, ...]:
        """Return the inputs with which ``module.forward(example)`` calls the network.

        Args:
            module: The LightningModule.
            network: Its network, as yet uncut.
            example: ``example_input_array``.

        Raises:
            StrategyError: ``forward`` does not call the network.
        """
        handle = network.register_forward_pre_hook(lambda _, inputs: UserSteps._stop(NetworkCall(inputs)))
        try:
            with torch.no_grad():
                arguments = example if isinstance(example, (tuple, list)) else (example,)
                module(**example) if isinstance(example, Mapping) else module(*arguments)
        except _NetworkCalled as called:
            return called.call.tensors
        finally:
            handle.remove()
        raise StrategyError(f"{type(module).__name__}.forward does not call the network that is cut.")

    @property
    def where(self) -> str:
        """The step's name for messages."""
        return f"{type(self._module).__name__}.training_step"

    def _call(self, *inputs: Any, **keywords: Any) -> Any:
        call = self._calls.bind(inputs, keywords)
        return self._calls.result(self._forward(call), call)

    def _evaluated(self, call: NetworkCall) -> Any:
        self._calls.form = call.form
        return self._evaluate(*call.tensors)

    @staticmethod
    def _stop(call: NetworkCall) -> Any:
        raise _NetworkCalled(call)

    def _check_loss(self, arguments: tuple[Any, ...], output: Any) -> None:
        leaves = [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in as_tuple(output)]
        with (
            torch.enable_grad(),
            self._quiet(_Once(leaves[0] if isinstance(output, Tensor) else tuple(leaves), self.where)),
        ):
            loss = _loss_of(self._module.training_step(*arguments), self.where)
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
    def network_as(self, forward: Callable[[NetworkCall], Any]) -> Iterator[None]:
        """Have calls of the network answered by a function.

        Args:
            forward: Returns the network's output for a call.
        """
        self._forward = forward
        try:
            yield
        finally:
            self._forward = self._evaluated

    @contextmanager
    def _quiet(self, forward: Callable[[NetworkCall], Any]) -> Iterator[None]:
        """Keep a part of a step out of logs, metrics, and the module's attributes: a counter counts in the replay."""
        module: Any = self._module
        attributes = vars(module)
        kept = dict(attributes)
        for name in kept.keys() - _OF_LIGHTNING:
            if isinstance(kept[name], CONTAINERS):
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

    def __call__(self, call: NetworkCall) -> Any:
        if self._is_called:
            raise StrategyError(
                f"{self._where} calls the network several times. A pipeline runs it once for each step: join the "
                "inputs along dimension 0 into one call if their rows belong together, or use strategy=ddp or fsdp."
            )
        self._is_called = True
        return self._output


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _loss_of(result: Any, where: str) -> Tensor:
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
