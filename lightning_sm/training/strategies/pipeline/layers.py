"""The network of a LightningModule as a list of layers, cut into stages."""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sm._lightning import LightningModule, rank_zero_only
from lightning_sm.errors import StrategyError

logger = logging.getLogger(__name__)

_warn_once = rank_zero_only(logger.warning)
_LAYERS = "pipeline_layers"
_TRIALS = 3


class Network:
    """The part of a LightningModule that is cut: an ``nn.Sequential``, or a module with ``pipeline_layers()``.

    Args:
        module: The LightningModule.
        name: Name of the network in it; None: the only child that can be cut.

    Raises:
        StrategyError: The network does not exist, or it cannot be split across ranks.
    """

    def __init__(self, module: LightningModule, name: str | None) -> None:
        self.name, self.module = _find(module, name)
        self.layers: list[nn.Module] = list(
            self.module if isinstance(self.module, nn.Sequential) else self.module.pipeline_layers()  # type: ignore[operator]
        )
        paths = {id(child): path for path, child in self.module.named_modules()}
        # A layer that pipeline_layers() makes, such as nn.Flatten, has no path.
        self.names = [paths.get(id(layer), type(layer).__name__) for layer in self.layers]
        self._check(module)

    def stage(self, layers: range) -> Stage:
        """Return the layers of a stage as one module."""
        names = [f"{self.name}.{self.names[i]}" for i in layers]
        return Stage([self.layers[i] for i in layers], names, is_first=layers.start == 0)

    def remove(self, layers: Sequence[range]) -> None:
        """Replace the layers that other ranks hold by placeholders, which keeps the names of the remaining layers."""
        for i in (i for part in layers for i in part):
            path = self.names[i]
            if any(child is self.layers[i] for child in self.module.modules()):
                parent, _, child_name = path.rpartition(".")
                setattr(self.module.get_submodule(parent), child_name, RemoteLayerPlaceholder())

    def _check(self, module: LightningModule) -> None:
        if any(isinstance(layer, RemoteLayerPlaceholder) for layer in self.module.modules()):
            raise StrategyError(
                f"{type(module).__name__}.{self.name} was cut by the strategy of another Trainer, and this rank has "
                "only a part of it. Use the same Trainer again, or a new model with ckpt_path."
            )
        owner: dict[int, int] = {}
        for i, layer in enumerate(self.layers):
            for parameter in layer.parameters():
                if owner.setdefault(id(parameter), i) != i:
                    first = self.names[owner[id(parameter)]]
                    raise StrategyError(
                        f"The layers {self.name}.{first} and {self.name}.{self.names[i]} share a parameter, so that "
                        "two stages would each train their own. Untie the weights, or use strategy=fsdp."
                    )
        outside = [name for name, parameter in module.named_parameters() if id(parameter) not in owner]
        if outside:
            raise StrategyError(
                f"The parameters {', '.join(outside)} of {type(module).__name__} belong to no layer of "
                f"{self.name}, so that no stage would train them. Make them part of {self.name}'s layers."
            )
        if any(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in self.module.modules()):
            _warn_once(
                "%s has BatchNorm layers. In a pipeline their statistics are those of single microbatches, not of "
                "the batch of a process; GroupNorm and LayerNorm do not depend on it.",
                self.name,
            )


class RemoteLayerPlaceholder(nn.Module):
    """A placeholder for a layer that another rank holds."""

    def forward(self, *_: Any) -> Any:
        """Refuse to run.

        Raises:
            StrategyError: Always.
        """
        raise StrategyError(
            "This layer of the network is on another rank of the pipeline. Call the whole network, not its layers."
        )


class Stage(nn.Module):
    """Layers that run one after the other, each on the output of the one before, as in an ``nn.Sequential``.

    Args:
        layers: The layers.
        names: Their names, for messages.
        is_first: Whether it gets the network's inputs.
    """

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str], *, is_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._names = names
        self._is_first = is_first
        # Autograd forbids changing a stage's input in place, as a layer that is not the network's first may do.
        self._copies_input = not is_first and any(getattr(part, "inplace", False) for part in layers[0].modules())

    def forward(self, *inputs: Any) -> Any:
        """Run the layers.

        Args:
            inputs: The output of the stage before, or the network's inputs.

        Returns:
            A tensor, or a tuple of at least two.

        Raises:
            StrategyError: The last layer returns something else, which stages cannot exchange.
        """
        if self._copies_input:
            inputs = tuple(tensor.clone() for tensor in inputs)
        value: Any = inputs if len(inputs) > 1 else inputs[0]
        for i, layer in enumerate(self.layers):
            # Only the network's own inputs come as several arguments; a tuple between layers is one.
            value = layer(*inputs) if i == 0 and self._is_first else layer(value)
        is_tuple = isinstance(value, tuple) and len(value) > 1 and all(isinstance(item, Tensor) for item in value)
        if not isinstance(value, Tensor) and not is_tuple:
            raise StrategyError(
                f"{self._names[-1]}, the last layer of its stage, returns {_described(value)}. Stages exchange a "
                "tensor or a tuple of at least two tensors: change what it returns, or cut elsewhere (split=[...])."
            )
        return value


def _find(module: LightningModule, name: str | None) -> tuple[str, nn.Module]:
    children = dict(module.named_children())
    if name is not None:
        try:
            network = module.get_submodule(name)
        except AttributeError as error:
            raise StrategyError(
                f"network={name!r}: {type(module).__name__} has no such submodule; it has {', '.join(children)}."
            ) from error
        if not _can_be_cut(network):
            raise StrategyError(f"{type(module).__name__}.{name} is {_needed(network)}")
        return name, network
    found = {child: network for child, network in children.items() if _can_be_cut(network)}
    if len(found) != 1:
        have = ", ".join(f"{child} ({type(network).__name__})" for child, network in children.items())
        raise StrategyError(
            f"{type(module).__name__} has {len(found) or 'no'} networks that can be cut into stages; its children are "
            f"{have}. A network is an nn.Sequential, or a module with a method {_LAYERS}() that returns its layers in "
            "order. Say which with network=NAME."
        )
    return next(iter(found.items()))


def _can_be_cut(network: nn.Module) -> bool:
    return isinstance(network, nn.Sequential) or callable(getattr(network, _LAYERS, None))


def _needed(network: nn.Module) -> str:
    return (
        f"a {type(network).__name__}, which cannot be cut into stages. Make it an nn.Sequential, or give it a method "
        f"{_LAYERS}() that returns its layers in order: modules, each of which takes what the one before returns."
    )


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return f"a {type(value).__name__}" if isinstance(value, Mapping) else type(value).__name__


def as_tuple(output: Any) -> tuple[Any, ...]:
    """Return the output of a stage as the arguments of the next one.

    Args:
        output: A tensor, or a tuple of tensors.
    """
    return output if isinstance(output, tuple) else (output,)


def num_trainable(layers: Sequence[nn.Module]) -> int:
    """Return the number of the layers' parameters that are trained."""
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters() if parameter.requires_grad)


def measured_seconds(network: Network, inputs: tuple[Any, ...], device: torch.device) -> list[float]:
    """Return the seconds that the forward and backward passes of each layer take: the median of three trials.

    Args:
        network: The network.
        inputs: Its inputs, on the device.
        device: Device to measure on; each layer is there only while it is measured.
    """
    seconds = []
    for layer in network.layers:
        trial = copy.deepcopy(layer).to(device)
        seconds.append(statistics.median(_seconds(trial, inputs, device) for _ in range(_TRIALS)))
        # The input of the next layer, with a gradient to compute.
        detached = tree_map(lambda one: one.detach().requires_grad_(one.is_floating_point()), trial(*inputs))
        inputs = (detached,)
    return seconds


def _seconds(layer: nn.Module, inputs: tuple[Any, ...], device: torch.device) -> float:
    began = time.perf_counter()
    outputs = [tensor for tensor in tree_leaves(layer(*inputs)) if tensor.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began
