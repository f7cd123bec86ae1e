"""What a step leaves behind on the rank of the last stage, for the other ranks of its replica."""

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
    """A metric in place of its value, by its name in the module, with the value of its last batch."""

    name: str
    batch_value: Any


class StepEffects(NamedTuple):
    """The effects of a step.

    Attributes:
        result: The numbers that the step returns.
        calls: Those of ``self.log`` and ``self.print``, in order: name, arguments, keywords.
        buffers: The buffers around the network, by name.
        random_state: The state of the default generators after it.
    """

    result: Any
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    buffers: dict[str, Tensor]
    random_state: bytes


class EffectRecorder:
    """Records the effects of the user's steps on one rank, and repeats them on others, which have no outputs.

    Effects are calls of ``self.log`` and ``self.print``, and buffers around the network. Attributes of the module stay
    on the rank that records, and so do the states of metrics, whose ``compute`` gives all ranks their value.

    Args:
        module: The LightningModule.
        network: Its network, which is not looked at: ranks have different layers.
        replica: The ranks of this replica, of which the last records.
    """

    def __init__(self, module: LightningModule, network: nn.Module, replica: Replica) -> None:
        self._module = module
        self._replica = replica
        inner = {id(child) for child in network.modules()}
        self._parts = {name: child for name, child in module.named_modules() if id(child) not in inner}
        self._metrics = {name: part for name, part in self._parts.items() if isinstance(part, Metric)}
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._is_alone = False
        for metric in self._metrics.values():
            metric.compute = self._for_all_ranks(metric.compute)  # type: ignore[method-assign]

    @contextmanager
    def recorded(self, step: str) -> Iterator[None]:
        """Record the calls of a step.

        Args:
            step: Name of the user's method.
        """
        module: Any = self._module
        trainer, loggers = module.trainer, module.trainer.loggers
        own_log, own_print = module.log, module.print
        names = {id(metric): name for name, metric in self._metrics.items()}
        self._calls = []

        def log(name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
            own_log(name, value, *arguments, **keywords)
            pickle.dumps((arguments, keywords))  # here, an error is one of the step, and is raised on all ranks
            kept: Any = value
            if isinstance(value, Metric):
                kept = _MetricValue(names[id(value)], value._forward_cache)
            elif isinstance(value, Tensor):
                kept = value.detach().clone()
            self._calls.append(("log", (name, kept, *arguments), keywords))

        def print_(*values: Any, **keywords: Any) -> None:
            own_print(*values, **keywords)
            self._calls.append(("print", tuple(map(str, values)), keywords))

        trainer.loggers = [_NoLogger(step) for _ in loggers]
        try:
            with self._calling(log, print_):
                yield
        finally:
            trainer.loggers = loggers

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore the calls of a step on a rank that leaves it at the network's call."""
        with self._calling(_ignore, _ignore):
            yield

    @contextmanager
    def _calling(self, log: Callable[..., None], print_: Callable[..., None]) -> Iterator[None]:
        """Let a step of the module call functions in place of its own, and its metrics compute on this rank only."""
        module: Any = self._module
        module.log, module.print = log, print_
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            del module.log, module.print

    def of_step(self, result: Any) -> StepEffects:
        """Return the effects of the step that was recorded.

        Args:
            result: What it returned.
        """
        return StepEffects(_numbers_of(result), self._calls, self._buffers(), random_state())

    def repeat(self, effects: StepEffects) -> Any:
        """Repeat the effects of a step on this rank; return its result.

        Args:
            effects: Those of the rank of the last stage.
        """
        own = self._buffers()
        for name, buffer in effects.buffers.items():
            own[name].copy_(buffer)
        for name, arguments, keywords in effects.calls:
            getattr(self._module, name)(*(self._argument(value) for value in arguments), **keywords)
        take_random_state(effects.random_state)
        return effects.result

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, _MetricValue):
            return value
        metric: Any = self._metrics[value.name]
        metric._forward_cache = value.batch_value
        return metric

    def _buffers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{buffer}": value
            for name, part in self._parts.items()
            for buffer, value in part.named_buffers(recurse=False)
        }

    def _for_all_ranks(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        """Return a metric's ``compute`` that returns the value of the last rank on all of them, except within steps."""

        def shared() -> Any:
            if self._is_alone:
                return compute()
            value = None
            if self._replica.is_last:
                self._is_alone = True  # a metric may compute others
                try:
                    value = compute()
                finally:
                    self._is_alone = False
            return self._replica.broadcast(value, self._replica.last)

        return shared


class _NoLogger:
    """A logger that must not be used: those of other ranks than 0 write nothing.

    Args:
        step: Name of the user's method that would use it.
    """

    def __init__(self, step: str) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        raise StrategyError(
            f"{self._step} uses self.logger.{name}. Only the ranks of the last stage run it, and the logger of rank 0 "
            "alone writes. Log with self.log, or set outputs: all of the strategy."
        )


def _ignore(*_: Any, **__: Any) -> None:
    pass


def _numbers_of(result: Any) -> Any:
    """Return the numbers of what a step returns; the rest may be as large as the network's outputs."""
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if _is_number(value)}
    return result if _is_number(result) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
