"""The calls of a model of transformers, such as ``self.model(input_ids=..., attention_mask=..., labels=...)``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.calls import CallForm, NetworkCall
from lightning_sm.training.strategies.pipeline.pretrained import PretrainedParts, described
from lightning_sm.training.strategies.pipeline.stage import as_tuple
from lightning_sm.training.strategies.pipeline.stand_ins import StandIn, in_place

_IGNORED_LABEL = -100  # torch's and transformers' default of ignore_index

# What the model's own code uses after the head only; "label" is part of the other names, as transformers has it, too.
_OF_THE_LOSS = ("start_positions", "end_positions", "num_items_in_batch")
_REFUSED = {
    "inputs_embeds": "the embedding is a layer of the first stage: pass input_ids",
    "encoder_hidden_states": "stages have no second stream",
    **dict.fromkeys(("cache", "past_key_values"), "stages keep no keys and values, so that they cannot generate text"),
}
# Outputs of the base model that stages do not hand on; None in what a call returns.
_WITHHELD = ("hidden_states", "attentions", "cross_attentions", "cache", "past_key_values")


class PretrainedCalls:
    """The calls of a model of transformers.

    Stages run the model's own ``forward`` without labels. What the user's code gets is made by the same ``forward``,
    with the head's output in place of the head, so that the loss and the class of the output are the model's own.

    Args:
        parts: The parts of the model, before its ``forward`` is replaced.
        where: What calls it, for messages: "Model calls self.model".
    """

    every_rank_binds = True

    def __init__(self, parts: PretrainedParts, where: str) -> None:
        self.form = CallForm()
        self.forward = parts.model.forward
        self._parts = parts
        self._model: Any = parts.model
        self._head = parts.model.get_submodule(parts.head)
        self._base = parts.model.get_submodule(parts.base)
        self._signature = inspect.signature(self.forward)
        self._where = where

    def bind(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> NetworkCall:
        """Return the call; see ``NetworkCalls``.

        Args:
            arguments: The positional arguments.
            keywords: The others.

        Raises:
            StrategyError: Stages cannot honour it.
        """
        named = self._named(arguments, keywords)
        self._refuse(named)
        tensors: dict[str, Tensor] = {}
        constants: dict[str, Any] = {}
        for name, value in named.items():
            if "label" in name or name in _OF_THE_LOSS or name in ("return_dict", "use_cache"):
                continue
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, (bool, int, float, str)):
                constants[name] = value
            else:
                raise self._error(name, f"stages get tensors and plain values, and this is a {type(value).__name__}")
        if "use_cache" in self._signature.parameters:
            constants["use_cache"] = False
        unsent = None
        main = self._model.main_input_name
        if main in tensors and tensors[main].is_floating_point():
            unsent = (main, tuple(tensors[main].shape[1:]), tensors[main].dtype)
        form = CallForm(tuple(tensors), tuple(constants.items()), unsent)
        return NetworkCall(tuple(tensors.values()), form, named)

    def result(self, output: Any, call: NetworkCall) -> Any:
        """Return what the model's ``forward`` makes of the head's output, such as the loss.

        Args:
            output: The head's output.
            call: The call.
        """
        parts = self._parts
        base = _BaseOutputs(len(as_tuple(output)[0]))
        replacements = [
            (parts.model, parts.base, StandIn(self._base, lambda *_, **__: base)),
            (parts.model, parts.head, StandIn(self._head, lambda *_, **__: output)),
        ]
        with in_place(replacements):
            return self.forward(**call.arguments)

    def counts(self, call: NetworkCall) -> Tensor | None:
        """Return the number of labels in each row that are not ignored, or None without labels that are numbers.

        Args:
            call: The call.
        """
        is_shifted = "shift_labels" in call.arguments
        labels = call.arguments.get("shift_labels" if is_shifted else "labels")
        if not isinstance(labels, Tensor) or not labels.ndim or labels.is_floating_point() or labels.is_complex():
            return None
        if not call.tensors or len(labels) != len(call.tensors[0]):
            return None
        loss = getattr(self._model.loss_function, "__name__", "")
        if labels.ndim > 1 and not is_shifted and loss == "ForCausalLMLoss":
            labels = labels[..., 1:]  # a causal model predicts all tokens but the first
        return (labels != _IGNORED_LABEL).reshape(len(labels), -1).sum(1)

    def _named(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*arguments, **keywords)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            is_rest = self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            named.update(value if is_rest else {name: value})
        return {name: value for name, value in named.items() if value is not None}

    def _refuse(self, named: Mapping[str, Any]) -> None:
        """Raise if stages could not honour an argument, or the model's configuration."""
        config = self._model.config
        asked = [name for name, value in named.items() if name.startswith("output_") and value]
        # The configuration has some of them as private attributes behind properties.
        set_to = {f"config.{name.lstrip('_')}": value for name, value in vars(config).items()}
        asked += [name for name, value in set_to.items() if name.startswith("config.output_") and value]
        if asked:
            raise self._error(asked[0], "stages do not hand on what layers compute")
        for name in named.keys() & _REFUSED.keys():
            raise self._error(name, _REFUSED[name])
        if named.get("use_cache"):
            raise self._error("use_cache", _REFUSED["cache"])
        # transformers looks for packed sequences if there is no cache, and stages have none.
        has_cache = named.get("use_cache", getattr(config, "use_cache", False))
        if has_cache and "position_ids" in named and "attention_mask" not in named:
            raise self._error(
                "position_ids",
                "without attention_mask and without a cache they mean packed sequences: pass attention_mask if there "
                "are none, or set config.use_cache = False if there are, as for one process",
            )

    def _error(self, name: str, reason: str) -> StrategyError:
        return StrategyError(
            f"{self._where}, a {described(self._model)}, with {name}: a pipeline cannot honour it, because {reason}. "
            "Remove it, or use strategy=ddp or fsdp."
        )


class _BaseOutputs:
    """The outputs of a base model that did not run: tensors without data, of any name, with rows only."""

    def __init__(self, rows: int) -> None:
        self._tensor = torch.empty((rows, 1, 1), device="meta")

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None if name in _WITHHELD else self._tensor

    def __getitem__(self, key: int | slice) -> Tensor | tuple[()]:
        return () if isinstance(key, slice) else self._tensor
