"""What a step leaves behind on the rank of the last stage, for the other ranks of its replica."""

from __future__ import annotations

import logging
import operator
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.last_stage_value import REMEDY, LastStageValue
from lightning_sm.training.strategies.pipeline.loss import is_checked
from lightning_sm.training.strategies.pipeline.object_state import object_state
from lightning_sm.training.strategies.pipeline.random_state import sent_random_state, take_random_state
from lightning_sm.training.strategies.pipeline.steps import CONTAINERS

logger = logging.getLogger(__name__)

_OF_LIGHTNING = vars(LightningModule()).keys()
_OF_TORCH = vars(nn.Module()).keys()
_PLAIN = (str, bytes, Number, np.generic, Enum, torch.dtype, type(None))
_WITH_ITEMS = (*CONTAINERS, tuple)
_SENT = (*_PLAIN, np.ndarray, Tensor, *_WITH_ITEMS)


class _MetricCall(NamedTuple):
    """A metric in place of its value, by its name in the module, with the value of its last batch."""

    name: str
    batch_value: Any


class _Change(NamedTuple):
    """A change of an attribute of a part of the module.

    Attributes:
        part: Name of the part; empty for the module itself.
        attribute: Name of the attribute or buffer.
        kind: "set", "grow" (a list has more items), "update" (of a dict), or "fill" (a container has other items).
        value: The new value, or what is to be added.
    """

    part: str
    attribute: str
    kind: str
    value: Any


class StepEffects(NamedTuple):
    """The effects of a step.

    Attributes:
        result: What the step returns, with a ``LastStageValue`` in place of each value that is no number.
        calls: Those of ``self.log`` and ``self.print``, in order: name, arguments, keywords.
        changes: Changes of the module around the network.
        random_state: The state of the default generators after it.
    """

    result: Any
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    changes: list[_Change]
    random_state: bytes


class EffectRecorder:
    """Records the effects of the user's steps on one rank, and repeats them on others, which have no outputs.

    Effects are calls of ``self.log`` and ``self.print``, changes of metrics, of buffers around the network, and of the
    module's attributes that are tensors, arrays, numbers, texts or containers, and the random state. A change within
    another object, such as an evaluator of the user's, stays on the rank that records; a warning says so.

    Args:
        module: The LightningModule.
        network: Its network, which is not looked at: ranks have different layers.
        is_rank_zero: Whether the ranks that record include rank 0, whose loggers write.
    """

    def __init__(self, module: LightningModule, network: nn.Module, *, is_rank_zero: bool) -> None:
        self._module = module
        self._is_rank_zero = is_rank_zero
        inner = {id(child) for child in network.modules()}
        self._parts = {name: child for name, child in module.named_modules() if id(child) not in inner}
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._step = ""
        self._num_recorded: Counter[str] = Counter()
        self._told: set[str] = set()

    def record(self, name: str, step: Callable[[], Any]) -> tuple[Any, StepEffects]:
        """Run a step; return what it returns, and its effects.

        Args:
            name: Name of the user's method.
            step: Calls it.

        Raises:
            StrategyError: It has effects that cannot be repeated on other ranks.
        """
        self._step = name
        before = {part_name: self._state(part) for part_name, part in self._parts.items()}
        self._calls = []
        with self._hidden_changes_told(), self._recorded_calls(), self._guarded_loggers():
            result = step()
        for part in self._parts.values():
            if isinstance(part, MetricCollection):
                # Its metrics share states, and some get them only here.
                list(part.items(keep_base=True, copy_state=False))
        changes: list[_Change] = []
        seen: set[int] = set()
        for part_name, part in self._parts.items():
            changes += self._changes(part_name, before[part_name], self._state(part), seen)
        return result, StepEffects(_for_others(result, name), self._calls, changes, sent_random_state())

    def repeat(self, effects: StepEffects) -> Any:
        """Repeat the effects of a step on this rank; return its result.

        Args:
            effects: Those of the rank of the last stage.
        """
        for name, arguments, keywords in effects.calls:
            getattr(self._module, name)(*(self._argument(value) for value in arguments), **keywords)
        for change in effects.changes:
            _apply(self._parts[change.part], change)
        take_random_state(effects.random_state)
        return effects.result

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, _MetricCall):
            return value
        metric: Any = self._parts[value.name]
        metric._forward_cache = value.batch_value
        return metric

    @contextmanager
    def _recorded_calls(self) -> Iterator[None]:
        module: Any = self._module
        own_log, own_print = module.log, module.print
        names = {id(part): name for name, part in self._parts.items() if isinstance(part, Metric)}

        def log(name: str, value: Any, *arguments: Any, **keywords: Any) -> None:
            if keywords.get("sync_dist_group") is not None:
                raise StrategyError(
                    f"self.log({name!r}, sync_dist_group=...) in {self._step}: only the ranks of the last stage run "
                    f"it. Set {REMEDY}."
                )
            self._check_sendable(f"calls self.log({name!r}, ...)", (arguments, keywords))
            own_log(name, value, *arguments, **keywords)
            kept: Any = value
            if isinstance(value, Metric):
                kept = _MetricCall(names[id(value)], value._forward_cache)
            elif isinstance(value, Tensor):
                kept = value.detach().clone()
            self._calls.append(("log", (name, kept, *arguments), keywords))

        def print_(*values: Any, **keywords: Any) -> None:
            self._check_sendable("calls self.print", keywords)
            own_print(*values, **keywords)
            self._calls.append(("print", tuple(map(str, values)), keywords))

        module.log, module.print = log, print_
        try:
            yield
        finally:
            del module.log, module.print

    @contextmanager
    def _guarded_loggers(self) -> Iterator[None]:
        """Raise if a step uses a logger itself: those of other ranks than 0 write nothing."""
        trainer: Any = self._module.trainer
        loggers = trainer.loggers
        if self._is_rank_zero or not loggers:
            yield
            return
        trainer.loggers = [_NoLogger(self._step) for _ in loggers]
        try:
            yield
        finally:
            trainer.loggers = loggers

    @staticmethod
    def _attributes(part: nn.Module) -> dict[str, Any]:
        """Return what the user has set on a part; not a device, of which each rank has its own."""
        skipped = _OF_LIGHTNING if isinstance(part, LightningModule) else _OF_TORCH
        return {
            name: value
            for name, value in vars(part).items()
            if name not in skipped and not isinstance(value, torch.device)
        }

    @classmethod
    def _state(cls, part: nn.Module) -> dict[str, Any]:
        values = {**cls._attributes(part), **dict(part.named_buffers(recurse=False))}
        return {name: _Frozen.of(value) for name, value in values.items()}

    def _changes(
        self, part: str, before: Mapping[str, _Frozen], after: Mapping[str, _Frozen], seen: set[int]
    ) -> Iterator[_Change]:
        """Yield the changes of a part; those of a container that has several names once."""
        for name, now in after.items():
            then = before.get(name)
            if (then is not None and then.is_same(now)) or id(now.value) in seen:
                continue
            if isinstance(now.value, CONTAINERS):
                seen.add(id(now.value))
            kind, value = _difference(then, now)
            where = f"{type(self._module).__name__}.{f'{part}.' if part else ''}{name}"
            if kind == "set" and not isinstance(value, _SENT):
                raise StrategyError(
                    f"{self._step} sets {where} to an object of {type(value).__name__}. Only the ranks of the last "
                    f"stage run it, and the others would not have the object. Set {REMEDY}."
                )
            self._check_sendable(f"changes {where}", value)
            yield _Change(part, name, kind, value)

    def _check_sendable(self, what: str, value: Any) -> None:
        """Raise on the rank that would send: an error in the middle of a collective call leaves the others waiting."""
        try:
            pickle.dumps(apply_to_collection(value, Tensor, lambda _: None))
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            raise StrategyError(
                f"{self._step} {what}, with something that cannot be sent to the other ranks ({error}). Set {REMEDY}."
            ) from error

    def _warn_once(self, about: str, text: str, *arguments: Any) -> None:
        if about not in self._told:
            self._told.add(about)
            logger.warning(text, *arguments)

    @contextmanager
    def _hidden_changes_told(self) -> Iterator[None]:
        """Warn of changes that other ranks do not get, in the first steps and in one of a hundred."""
        number = self._num_recorded[self._step]
        self._num_recorded[self._step] += 1
        if not is_checked(number):
            yield
            return
        objects, of_trainer = self._object_states(), self._trainer_state()
        yield
        self._tell_object_changes(objects)
        self._tell_trainer_changes(of_trainer)

    def _object_states(self) -> dict[str, tuple[object, bytes]]:
        """Return the objects among the attributes whose changes are not repeated, with a digest of each, by name."""
        states = {}
        for part, module in self._parts.items():
            for name, value in self._attributes(module).items():
                if isinstance(value, (*_SENT, nn.Module, type)) or callable(value):
                    continue
                digest = object_state(value)
                if digest is not None:
                    states[f"{part}.{name}" if part else name] = (value, digest)
        return states

    def _tell_object_changes(self, before: Mapping[str, tuple[object, bytes]]) -> None:
        for name, (value, digest) in before.items():
            if object_state(value) not in (digest, None):
                self._warn_once(
                    name,
                    "%s changes the object %s.%s (%s) on the ranks of the last stage alone, because the other ranks do "
                    "not run it. If hooks of other ranks read the object, as at the end of an epoch: set %s.",
                    self._step,
                    type(self._module).__name__,
                    name,
                    type(value).__name__,
                    REMEDY,
                )

    def _trainer_state(self) -> dict[str, _Frozen | None]:
        """Return the Trainer's attributes by name; None in place of objects, such as its loops."""
        attributes = vars(self._module.trainer)
        return {name: _Frozen.of(value) if isinstance(value, _SENT) else None for name, value in attributes.items()}

    def _tell_trainer_changes(self, before: Mapping[str, _Frozen | None]) -> None:
        """Warn once of each attribute of the Trainer that a step changes or sets: they are not the module's."""
        for name, now in self._trainer_state().items():
            then = before.get(name)
            is_same = name in before and (then is None or now is None or then.is_same(now))
            place = f"self.trainer.{name}"
            if not is_same:
                self._warn_once(
                    place,
                    "%s changes %s on the ranks of the last stage alone, because the other ranks do not run it. Keep "
                    "the value in an attribute of %s, which all ranks get, or set %s.",
                    self._step,
                    place,
                    type(self._module).__name__,
                    REMEDY,
                )


@dataclass(frozen=True)
class _Frozen:
    """A value, and what tells whether it changes in place: items are compared by identity, as there may be many.

    Attributes:
        value: The value.
        version: That of a tensor.
        keys: The items of a container; keys of a dict.
        items: The items of a container; values of a dict.
        inner: The items that are tensors or containers themselves, by their number.
    """

    value: Any
    version: int = 0
    keys: tuple[Any, ...] = ()
    items: tuple[Any, ...] = ()
    inner: Mapping[int, _Frozen] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> _Frozen:
        """Return the value with its state of now."""
        if isinstance(value, Tensor):
            return cls(value, 0 if value.is_inference() else value._version)
        if not isinstance(value, _WITH_ITEMS):
            return cls(value)
        keys = tuple(value)
        items = tuple(value.values()) if isinstance(value, dict) else keys
        inner = {}
        if any(issubclass(kind, (Tensor, *_WITH_ITEMS)) for kind in set(map(type, items))):
            inner = {i: cls.of(item) for i, item in enumerate(items) if isinstance(item, (Tensor, *_WITH_ITEMS))}
        return cls(value, 0, keys, items, inner)

    def is_same(self, other: _Frozen) -> bool:
        """Return whether a later state is the same."""
        if isinstance(self.value, _PLAIN) and type(self.value) is type(other.value):
            return self.value is other.value or bool(self.value == other.value)
        return (
            self.value is other.value
            and self.version == other.version
            and len(self.items) == len(other.items)
            and all(map(operator.is_, self.keys, other.keys))
            and self.begins(other)
        )

    def begins(self, other: _Frozen) -> bool:
        """Return whether a later state has the same items, and perhaps more behind them."""
        return (
            len(self.items) <= len(other.items)
            and all(map(operator.is_, self.items, other.items))
            and all(item.is_same(other.inner[i]) for i, item in self.inner.items())
        )


class _NoLogger:
    """A logger that must not be used.

    Args:
        step: Name of the user's method that would use it.
    """

    def __init__(self, step: str) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        raise StrategyError(
            f"{self._step} uses self.logger.{name}. Only the ranks of the last stage run it, and the logger of rank 0 "
            f"alone writes. Log with self.log, or use the logger in {_end_hook(self._step)}, or set {REMEDY}."
        )


def _difference(then: _Frozen | None, now: _Frozen) -> tuple[str, Any]:
    """Return the kind of a change, and its value."""
    value = now.value
    if then is None or then.value is not value or not isinstance(value, CONTAINERS):
        return "set", value
    if isinstance(value, dict):
        before = {key: i for i, key in enumerate(then.keys)}
        if before.keys() <= value.keys():
            after = {key: i for i, key in enumerate(now.keys)}
            kept = {key for key, i in before.items() if _is_same_item(then, i, now, after[key])}
            return "update", {key: item for key, item in value.items() if key not in kept}
    elif isinstance(value, list) and then.begins(now):
        return "grow", value[len(then.items) :]
    return "fill", value


def _is_same_item(then: _Frozen, i: int, now: _Frozen, j: int) -> bool:
    return then.items[i] is now.items[j] and (i not in then.inner or then.inner[i].is_same(now.inner[j]))


def _apply(part: nn.Module, change: _Change) -> None:
    if change.kind == "set":
        buffer = dict(part.named_buffers(recurse=False)).get(change.attribute)
        if buffer is not None and isinstance(change.value, Tensor) and buffer.shape == change.value.shape:
            with torch.no_grad():
                buffer.copy_(change.value)
        else:
            setattr(part, change.attribute, change.value)
        return
    container = getattr(part, change.attribute)
    if change.kind == "fill":
        container.clear()
    if isinstance(container, (dict, set)):
        container.update(change.value)
    else:
        container.extend(change.value)


def _end_hook(step: str) -> str:
    return f"on_{step.removesuffix('_step').removesuffix('ing')}_batch_end"


def _for_others(result: Any, step: str) -> Any:
    """Return the numbers of what a step returns; the rest may be as large as the network's outputs."""
    if isinstance(result, Mapping):
        return {name: _for_hook(value, f"outputs[{name!r}]", step) for name, value in result.items()}
    return _for_hook(result, "outputs", step)


def _for_hook(value: Any, place: str, step: str) -> Any:
    if not _is_number(value):
        return LastStageValue(value, place, step)
    return value.detach() if isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, Tensor) and value.numel() == 1)
