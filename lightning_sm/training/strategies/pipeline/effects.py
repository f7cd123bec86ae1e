"""What a step leaves behind on the rank of the last stage, for the other ranks of its replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.random_state import sent_random_state, take_random_state


class _MetricValue(NamedTuple):
    """A metric in place of its value, by its name in the module, with the value of its last batch."""

    name: str
    batch_value: Any


class _MetricUpdate(NamedTuple):
    """The states of a metric after a step; of a list, what the step has added."""

    num_updates: int
    states: dict[str, Any]


class StepEffects(NamedTuple):
    """The effects of a step.

    Attributes:
        result: The numbers that the step returns.
        calls: Those of ``self.log`` and ``self.print``, in order: name, arguments, keywords.
        metrics: Metrics that have been updated, by name.
        buffers: The buffers around the network, by name.
        random_state: The state of the default generators after it.
    """

    result: Any
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    metrics: dict[str, _MetricUpdate]
    buffers: dict[str, Tensor]
    random_state: bytes


class EffectRecorder:
    """Records the effects of the user's steps on one rank, and repeats them on others, which have no outputs.

    Effects are calls of ``self.log`` and ``self.print``, metrics, and buffers around the network. Attributes of the
    module stay on the rank that records.

    Args:
        module: The LightningModule.
        network: Its network, which is not looked at: ranks have different layers.
    """

    def __init__(self, module: LightningModule, network: nn.Module) -> None:
        self._module = module
        inner = {id(child) for child in network.modules()}
        self._parts = {name: child for name, child in module.named_modules() if id(child) not in inner}
        self._metrics = {name: part for name, part in self._parts.items() if isinstance(part, Metric)}
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._before: dict[str, _MetricUpdate] = {}

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
        self._before = {name: _state_of(metric) for name, metric in self._metrics.items()}

        def log(name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
            own_log(name, value, *arguments, **keywords)
            kept: Any = value
            if isinstance(value, Metric):
                kept = _MetricValue(names[id(value)], value._forward_cache)
            elif isinstance(value, Tensor):
                kept = value.detach().clone()
            self._calls.append(("log", (name, kept, *arguments), keywords))

        def print_(*values: Any, **keywords: Any) -> None:
            own_print(*values, **keywords)
            self._calls.append(("print", tuple(map(str, values)), keywords))

        module.log, module.print = log, print_
        trainer.loggers = [_NoLogger(step) for _ in loggers]
        try:
            yield
        finally:
            del module.log, module.print
            trainer.loggers = loggers

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore the calls of a step on a rank that leaves it at the network's call."""
        module: Any = self._module
        module.log = module.print = lambda *_, **__: None
        try:
            yield
        finally:
            del module.log, module.print

    def of_step(self, result: Any) -> StepEffects:
        """Return the effects of the step that was recorded.

        Args:
            result: What it returned.
        """
        for part in self._parts.values():
            if isinstance(part, MetricCollection):
                # Its metrics share states, and some get them only here.
                list(part.items(keep_base=True, copy_state=False))
        updates = {}
        for name, metric in self._metrics.items():
            before, now = self._before[name], _state_of(metric)
            if now.num_updates != before.num_updates:
                # Lists grow, and may have the outputs of an epoch.
                states = {
                    state: value[len(before.states[state]) :] if isinstance(value, list) else value
                    for state, value in now.states.items()
                }
                updates[name] = _MetricUpdate(now.num_updates, states)
        return StepEffects(_numbers_of(result), self._calls, updates, self._buffers(), sent_random_state())

    def repeat(self, effects: StepEffects) -> Any:
        """Repeat the effects of a step on this rank; return its result.

        Args:
            effects: Those of the rank of the last stage.
        """
        for name, update in effects.metrics.items():
            metric = self._metrics[name]
            metric._update_count, metric._computed = update.num_updates, None
            for state, value in update.states.items():
                setattr(metric, state, getattr(metric, state) + value if isinstance(value, list) else value)
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


def _state_of(metric: Metric) -> _MetricUpdate:
    states = {state: getattr(metric, state) for state in metric._defaults}
    # A copy, as an update extends the list in place.
    return _MetricUpdate(
        metric._update_count, {name: value[:] if isinstance(value, list) else value for name, value in states.items()}
    )


def _numbers_of(result: Any) -> Any:
    """Return the numbers of what a step returns; the rest may be as large as the network's outputs."""
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if _is_number(value)}
    return result if _is_number(result) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
