"""The side effects of a step on the rank of the last stage, replayed on all ranks of its replica."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.random_state import random_state, take_random_state


class _MetricValue(NamedTuple):
    """A logged metric, sent as its name in the module and its value for the last batch."""

    name: str
    batch_value: Any


class StepEffects:
    """The side effects of the user's steps; only the rank of the last stage runs the steps to the end.

    Calls to ``self.log`` and ``self.print`` are recorded during a step, and replayed on all ranks afterwards. Buffers
    outside the network and ``trainer.should_stop`` are copied to all ranks. Module attributes and metric states stay on
    the last rank, but a metric's ``compute`` returns its value on all ranks.

    Args:
        module: The LightningModule.
        network: The module's network, which is skipped because ranks have different layers.
        replica: The ranks of this replica.
    """

    def __init__(self, module: LightningModule, network: nn.Module, replica: Replica) -> None:
        self._module = module
        self._replica = replica
        inner = {id(child) for child in network.modules()}
        self._parts = {name: child for name, child in module.named_modules() if id(child) not in inner}
        self._metrics = {name: part for name, part in self._parts.items() if isinstance(part, Metric)}
        # The method name, positional arguments and keyword arguments of each call.
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._is_alone = False
        for metric in self._metrics.values():
            metric.compute = self._for_all_ranks(metric.compute)  # type: ignore[method-assign]

    @contextmanager
    def recorded(self, step: str) -> Iterator[None]:
        """Record a step's calls (only those of the last rank count), and let metrics compute on this rank alone.

        Args:
            step: Name of the user's method.
        """
        module: Any = self._module
        trainer, loggers = module.trainer, module.trainer.loggers
        names = {id(metric): name for name, metric in self._metrics.items()}
        self._calls = []

        def log(name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
            kept: Any = value
            if id(value) in names:
                kept = _MetricValue(names[id(value)], value._forward_cache)
            elif isinstance(value, Tensor):
                kept = value.detach().clone()
            # Fail inside the step, where an error is raised on all ranks.
            pickle.dumps((value if kept is value else None, arguments, keywords))
            self._calls.append(("log", (name, kept, *arguments), keywords))

        def print_(*values: Any, **keywords: Any) -> None:
            self._calls.append(("print", tuple(map(str, values)), keywords))

        module.log, module.print = log, print_
        trainer.loggers = [_NoLogger(step) for _ in loggers]
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            trainer.loggers = loggers
            del module.log, module.print

    def share(self, result: Any) -> Any:
        """Apply the effects of the last rank's step on all ranks; a collective call within the replica.

        Args:
            result: The result of the step; used on the last rank.

        Returns:
            On the last rank, the result; on the others, only the numbers in the result.
        """
        effects: Any = None
        trainer = self._module.trainer
        if self._replica.is_last:
            effects = (_numbers_of(result), self._calls, self._buffers(), random_state(), trainer.should_stop)
        numbers, calls, buffers, state, should_stop = self._replica.broadcast(effects, self._replica.last)
        trainer.should_stop |= should_stop
        if not self._replica.is_last:  # there, the loss's graph may need the buffers unchanged
            own = self._buffers()
            for name, buffer in buffers.items():
                own[name].copy_(buffer)
        for name, arguments, keywords in calls:
            getattr(self._module, name)(*(self._argument(value) for value in arguments), **keywords)
        take_random_state(state)
        return result if self._replica.is_last else numbers

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, _MetricValue):
            return value
        metric: Any = self._metrics[value.name]
        metric._forward_cache = value.batch_value
        return metric

    def _buffers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{buffer}": value.detach()
            for name, part in self._parts.items()
            for buffer, value in part.named_buffers(recurse=False)
        }

    def _for_all_ranks(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a metric's ``compute`` so that, outside steps, it returns the last rank's value on all ranks."""

        def shared() -> Any:
            if self._is_alone:
                return compute()
            value = None
            if self._replica.is_last:
                self._is_alone = True  # a metric may call compute() of other metrics
                try:
                    value = compute()
                finally:
                    self._is_alone = False
            return self._replica.broadcast(value, self._replica.last)

        return shared


class _NoLogger:
    """A stand-in for loggers inside steps; it raises when used, because only rank 0's logger writes anything.

    Args:
        step: Name of the user's method that would use the logger.
    """

    def __init__(self, step: str) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        raise StrategyError(
            f"{self._step} uses self.logger.{name}. Only the ranks of the last stage run it, but only rank 0's "
            "logger writes. Log with self.log, or set the strategy's option outputs: all."
        )


def _numbers_of(result: Any) -> Any:
    """Return only the numbers in a step's result; the rest may be as large as the network's outputs."""
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if _is_number(value)}
    return result if _is_number(result) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
