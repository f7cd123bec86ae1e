"""The network of a LightningModule as a list of layers, cut into stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_sm._lightning import LightningModule, rank_zero_only
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.stage import Stage

logger = logging.getLogger(__name__)

_LAYERS = "pipeline_layers"


class Network:
    """The part of a LightningModule to cut into stages: an ``nn.Sequential``, or a module with ``pipeline_layers()``.

    Args:
        module: The LightningModule.
        name: Name of the network in the module. If None, the only child that can be split.

    Raises:
        StrategyError: The network does not exist, or it cannot be split across ranks.
    """

    def __init__(self, module: LightningModule, name: str | None) -> None:
        self.name, self.module = _find(module, name)
        listed: Any = getattr(self.module, _LAYERS, None)
        self.layers: list[nn.Module] = list(self.module if listed is None else listed())  # type: ignore[arg-type]
        paths = {id(child): path for path, child in self.module.named_modules()}
        # A layer that pipeline_layers() creates, such as nn.Flatten, has no path.
        self._paths = [paths.get(id(layer)) for layer in self.layers]
        self.names = [path or type(layer).__name__ for path, layer in zip(self._paths, self.layers, strict=True)]
        self._check(module)

    def stage(self, layers: range) -> Stage:
        """Return the layers of a stage as one module.

        Args:
            layers: Indices of the layers.
        """
        names = [f"{self.name}.{self.names[i]}" for i in layers]
        return Stage([self.layers[i] for i in layers], names, is_first=layers.start == 0)

    def keep(self, layers: range) -> None:
        """Replace layers that another rank holds with placeholders, so that the remaining layers keep their names.

        Args:
            layers: Indices of this rank's layers.
        """
        for i, path in enumerate(self._paths):
            if path is not None and i not in layers:
                parent, _, child_name = path.rpartition(".")
                setattr(self.module.get_submodule(parent), child_name, RemoteLayerPlaceholder())

    def _check(self, module: LightningModule) -> None:
        if any(isinstance(layer, RemoteLayerPlaceholder) for layer in self.module.modules()):
            raise StrategyError(
                f"{type(module).__name__}.{self.name} was cut by another Trainer's strategy, so this rank has "
                "only part of it. Use the same Trainer again, or a new model with ckpt_path."
            )
        forward = getattr(self.module.forward, "__func__", None)
        if not hasattr(self.module, _LAYERS) and forward is not nn.Sequential.forward:
            raise StrategyError(
                f"{self.name} has its own forward, which a pipeline does not call: it calls the layers in turn. Move "
                f"what forward does into layers. If it only calls them, add a method {_LAYERS}() that returns them."
            )
        with_parameters = [id(layer) for layer in self.layers if next(layer.parameters(), None) is not None]
        if len(set(with_parameters)) < len(with_parameters):
            raise StrategyError(f"{self.name} contains the same layer twice. Use two: they may share parameters.")
        _initializers(self.layers)  # while all ranks have all layers, so that all ranks raise
        inside = {id(parameter) for layer in self.layers for parameter in layer.parameters()}
        outside = [name for name, parameter in module.named_parameters() if id(parameter) not in inside]
        if outside:
            raise StrategyError(
                f"The parameters {', '.join(outside)} of {type(module).__name__} belong to no layer of "
                f"{self.name}, so no stage would train them. Move them into {self.name}'s layers."
            )
        hooked = [f"{self.name}.{name}" for name, layer in self.module.named_modules() if name and layer._forward_hooks]
        for name, weight in self.module.named_parameters(self.name):
            hooked += [name] if weight._backward_hooks or weight._post_accumulate_grad_hooks else []
        if hooked and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            logger.warning(
                "The hooks of %s run only on ranks with that layer, once per microbatch. Have layers return what the "
                "loss needs, in a tuple, and change gradients in on_before_optimizer_step.",
                ", ".join(hooked),
            )


class RemoteLayerPlaceholder(nn.Module):
    """A placeholder for a layer that another rank holds."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse to run.

        Raises:
            StrategyError: Always.
        """
        raise StrategyError("Another rank has this layer (see the log). Call the whole network, not its layers.")

    def __getattr__(self, name: str) -> Any:
        """Explain that another rank has the layer, and what to do instead.

        Args:
            name: The attribute.

        Raises:
            AttributeError: Always. Python calls this method only for attributes that ``nn.Module`` lacks.
        """
        raise AttributeError(
            f"Another rank has this layer, so its attribute {name!r} is not available here. "
            "self.trainer.strategy.lightning_module_state_dict() returns the weights of all stages on rank 0: call it "
            "on all ranks, in a hook such as on_train_epoch_end. To use a layer's weights in a step, use strategy=ddp "
            "or fsdp."
        )


def _find(module: LightningModule, name: str | None) -> tuple[str, nn.Module]:
    children = dict(module.named_children()) if name is None else {name: module.get_submodule(name)}
    compiled = [child for child, network in children.items() if _is_compiled(network)]
    if compiled:
        raise StrategyError(
            f"{type(module).__name__}.{compiled[0]} is compiled as a whole, so it cannot be cut into stages. Compile "
            "its layers instead: for layer in network: layer.compile()."
        )
    candidates = {child: network for child, network in children.items() if _can_be_cut(network)}
    if len(candidates) != 1:
        names = ", ".join(f"{child} ({type(network).__name__})" for child, network in children.items())
        raise StrategyError(
            f"Of the modules {names} of {type(module).__name__}, {len(candidates)} can be cut into stages. Choose one "
            f"with network=NAME: an nn.Sequential, or a module with a method {_LAYERS}() that returns its layers in "
            "order, each of which accepts the output of the one before."
        )
    return next(iter(candidates.items()))


def _is_compiled(network: nn.Module) -> bool:
    """Return whether ``torch.compile(network)`` has wrapped a network, or ``network.compile()`` has changed it."""
    inner = getattr(network, "_orig_mod", network)
    return _can_be_cut(inner) and (inner is not network or network._compiled_call_impl is not None)


def _can_be_cut(network: nn.Module) -> bool:
    return isinstance(network, nn.Sequential) or callable(getattr(network, _LAYERS, None))


def materialize(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Allocate and initialize layers that are on the meta device.

    As in torch's FSDP, each module's ``reset_parameters`` initializes it, inner modules first.

    Args:
        layers: The layers.
        device: The device to move them to.

    Raises:
        StrategyError: A module with parameters or buffers on the meta device cannot initialize itself.
    """
    for module, reset in _initializers(layers):
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()


def _initializers(layers: Sequence[nn.Module]) -> list[tuple[nn.Module, Callable[[], Any]]]:
    """Return the modules with tensors on the meta device, inner modules first, and their initializers."""
    initializers = []
    for module in (module for layer in layers for module in reversed(list(layer.modules()))):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        # In torch's MultiheadAttention, the method is private.
        reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            raise StrategyError(
                f"{type(module).__name__} has parameters or buffers on the meta device, but no method "
                "reset_parameters() that initializes them. Add one, or build the module outside of "
                'torch.device("meta").'
            )
        initializers.append((module, reset))
    return initializers
