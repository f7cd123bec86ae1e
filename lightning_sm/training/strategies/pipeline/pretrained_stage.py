"""A stage of a model of transformers, which runs the model's own ``forward`` from where it begins to where it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.checkpoint import checkpoint

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.calls import CallForm
from lightning_sm.training.strategies.pipeline.pretrained import PretrainedParts, described
from lightning_sm.training.strategies.pipeline.pretrained_calls import PretrainedCalls
from lightning_sm.training.strategies.pipeline.stage import Stage, as_tuple
from lightning_sm.training.strategies.pipeline.stand_ins import StandIn, in_place

_HIDDEN = "hidden_states"  # the name of a block's input
_PLAIN = (Tensor, bool, int, float, str, torch.dtype, type(None))


class _StageEnd(BaseException):
    """The exception that carries a stage's output out of the model's ``forward``, past its exception handlers."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass
class _Pass:
    """A forward pass through a stage.

    Attributes:
        arrived: The hidden states that the stage before has sent; None in the first stage.
        is_checked: Whether the arguments of blocks are checked.
        following: The block that the model must call next.
    """

    arrived: Tensor | None
    is_checked: bool
    following: int = 0


class PretrainedStage(Stage):
    """A stage of a model of transformers.

    The model's own ``forward`` runs on every stage, so that masks, positions and whatever else blocks need are made as
    in one process, from the inputs of the call, which pass through the stages beside the hidden states. Parts of other
    stages have stand-ins: those before give undefined values (NaN), but for the last one, which gives the hidden states
    that have arrived; the first one behind ends the pass.

    With a call of a new form, a check shows that nothing but the hidden states depends on the parts of other stages.

    Args:
        parts: The parts of the model.
        calls: The calls of the model.
        layers: The indices of the layers: 0 for the embedding, then the blocks, and the head with what precedes it.
        name: The model's name, for messages.
        copies_views: See ``Stage``.
        recomputed: Indices of layers that keep no activations; only those of blocks count.
    """

    def __init__(  # noqa: PLR0917  # as Stage's
        self,
        parts: PretrainedParts,
        calls: PretrainedCalls,
        layers: range,
        name: str,
        copies_views: bool,
        recomputed: frozenset[int],
    ) -> None:
        paths = [path for i in layers for path in parts.layers[i]]
        modules = [parts.model.get_submodule(path) for path in paths]
        has_embedding = layers.start == 0
        super().__init__(
            modules, [f"{name}.{path}" for path in paths], is_first=has_embedding, copies_views=copies_views
        )
        blocks: Any = parts.model.get_submodule(parts.blocks)
        num_blocks = len(blocks)
        self._calls = calls
        self._where = f"{name}, a {described(parts.model)},"
        # In a tuple, as the model's other parts are not this stage's.
        self._blocks = tuple(blocks)
        self._own = range(max(layers.start - 1, 0), min(layers.stop - 1, num_blocks))
        self._recomputed_blocks = {i - 1 for i in recomputed}
        self._has_head = layers.stop == num_blocks + 2
        self._verified: set[CallForm] = set()
        self._pass = _Pass(None, is_checked=False)
        replacements: dict[str, nn.Module] = {
            parts.blocks: nn.ModuleList(StandIn(block, partial(self._block, i)) for i, block in enumerate(blocks))
        }
        if not has_embedding:
            for path in parts.embedding:
                replacements[path] = StandIn(parts.model.get_submodule(path), self._undefined)
        if self._has_head:
            head = parts.model.get_submodule(parts.head)
            replacements[parts.head] = StandIn(head, partial(self._end_with, head))
        self._replacements = tuple(
            (parts.model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module)
            for path, module in replacements.items()
        )

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        form = self._calls.form
        tensors = inputs if self._is_first else inputs[1:]
        arguments, sent = self._arguments(form, tensors, None if self._is_first else inputs[0])
        is_checked = form not in self._verified
        self._pass = _Pass(None if self._is_first else inputs[0], is_checked)
        try:
            with in_place(self._replacements):
                self._calls.forward(**arguments)
        except _StageEnd as end:
            output = end.output
        else:
            raise StrategyError(f"{self._where} did not call its {'head' if self._has_head else 'blocks'}.")
        if is_checked:
            self._check_defined(output)
            self._verified.add(form)
        return output if self._has_head or not sent else (output, *sent)

    def _arguments(
        self, form: CallForm, tensors: tuple[Tensor, ...], arrived: Tensor | None
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Return the model's arguments, and the tensors for the next stage."""
        unsent = None if form.unsent is None else form.unsent[0]
        names = [name for name in form.names if self._is_first or name != unsent]
        named = dict(zip(names, tensors, strict=True))
        sent = tuple(value for name, value in named.items() if name != unsent)
        if arrived is not None and form.unsent is not None:
            # Without data, so that code that would need it fails.
            _, shape, dtype = form.unsent
            named[form.unsent[0]] = torch.empty((len(arrived), *shape), dtype=dtype, device="meta")
        return {**named, **dict(form.constants)}, sent

    def _block(self, i: int, *arguments: Any, **keywords: Any) -> Any:
        """Run block i, or what stands for it."""
        current = self._pass
        if i != current.following:
            raise StrategyError(
                f"{self._where} calls its block {i} where {current.following} would follow. A pipeline needs every "
                "block once, in order: set layerdrop and the like to 0."
            )
        current.following += 1
        hidden, arguments, keywords = _hidden(arguments, keywords, self._where)
        if i == self._own.stop:  # the stage has no block
            raise _StageEnd(hidden)
        if i < self._own.start:
            is_last = i == self._own.start - 1
            return current.arrived if is_last else self._undefined()
        if i == 0 and current.arrived is not None:
            hidden = current.arrived
        if current.is_checked:
            self._check_arguments(i, arguments, keywords)
        block: Callable[..., Any] = self._blocks[i]
        if i in self._recomputed_blocks and torch.is_grad_enabled():
            output = checkpoint(block, hidden, *arguments, use_reentrant=False, **keywords)
        else:
            output = block(hidden, *arguments, **keywords)
        if not isinstance(output, Tensor):
            raise StrategyError(
                f"{self._where} has blocks that return a {type(output).__name__}. A pipeline needs blocks that return "
                "the hidden states alone, as most of transformers 5 do: update transformers, or use strategy=fsdp."
            )
        if i + 1 == self._own.stop and not self._has_head:
            raise _StageEnd(output)
        return output

    def _end_with(self, head: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if self._pass.following != len(self._blocks):
            raise StrategyError(
                f"{self._where} called {self._pass.following} of its {len(self._blocks)} blocks. A pipeline needs "
                "every block once, in order: set layerdrop and the like to 0."
            )
        raise _StageEnd(head(*arguments, **keywords))

    def _undefined(self, *_: Any, **__: Any) -> Tensor:
        """Return undefined values of the shape of the hidden states, without memory for them."""
        arrived: Any = self._pass.arrived
        undefined: Tensor = arrived.new_full((), math.nan).expand(arrived.shape)
        return undefined

    def _check_arguments(self, i: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        leaves, _ = tree_flatten_with_path(
            (arguments, keywords), is_leaf=lambda value: isinstance(value, (list, dict)) and value is not keywords
        )
        for path, value in leaves:
            if not isinstance(value, _PLAIN):
                raise StrategyError(
                    f"{self._where} gives block {i} a {type(value).__name__} ({keystr(path)}), through which blocks of "
                    "different stages could exchange what is not sent. Use strategy=fsdp."
                )
            if isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any()):
                raise self._depends(f"block {i}")

    def _check_defined(self, output: Any) -> None:
        arrived = self._pass.arrived
        if arrived is None or bool(arrived.isnan().any()):
            return
        if any(bool(value.isnan().any()) for value in as_tuple(output) if value.is_floating_point()):
            raise self._depends(self._names[-1])

    def _depends(self, what: str) -> StrategyError:
        return StrategyError(
            f"{self._where} has more than the hidden states that pass from one part to the next: {what} depends on "
            "values of an earlier stage that are not sent, or its weights make NaN. Use strategy=fsdp."
        )


def _hidden(
    arguments: Sequence[Any], keywords: dict[str, Any], where: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a block's hidden states, and its other arguments."""
    if arguments:
        return arguments[0], tuple(arguments[1:]), keywords
    if _HIDDEN not in keywords:
        raise StrategyError(f"{where} calls its blocks without {_HIDDEN}, but with {', '.join(keywords)}.")
    return keywords[_HIDDEN], (), {name: value for name, value in keywords.items() if name != _HIDDEN}
