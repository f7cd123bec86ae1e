"""Checks of the loss that ``training_step`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.backward import StepPasses


def loss_of(result: Any, where: str) -> Tensor:
    """Return the loss in the result of ``training_step``.

    Args:
        result: The result.
        where: The name of ``training_step`` in messages.

    Raises:
        StrategyError: The result has no loss.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise StrategyError(
            f"{where} returned {type(result).__name__} without a loss. In a pipeline, every step needs one, because "
            "one rank of a replica cannot skip a batch on its own."
        )
    return loss


def check_loss(loss: Tensor, where: str, module: LightningModule, passes: StepPasses) -> None:
    """Refuse a loss whose backward pass would not be that of the network's output alone.

    Args:
        loss: The loss of the step.
        where: The name of ``training_step`` in messages.
        module: The LightningModule.
        passes: The passes of the step.

    Raises:
        StrategyError: The loss is not one number, does not depend on the network's output, or depends on the stage of
            this rank in other ways.
    """
    if loss.numel() != 1:
        raise StrategyError(f"{where} returned a loss of shape {tuple(loss.shape)}. Return one number.")
    nodes = _graph_of(loss)
    if not any(getattr(node, "passes", None) is passes for node in nodes):  # set by passes.attach
        raise StrategyError(
            f"The loss of {where} does not depend on the network's output, or only on a part without gradients, so its "
            "backward pass would reach no stage. Compute it from the output, without detach() or torch.no_grad()."
        )
    leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    used = [name for name, parameter in module.named_parameters() if id(parameter) in leaves]
    if used or any(id(value) in leaves for inputs in passes.inputs for value in inputs):
        what = f"the parameters {', '.join(used)}" if used else "values that a layer has kept"
        raise StrategyError(
            f"The loss of {where} uses {what} directly, not only the network's output, but each rank has only the "
            "layers of its stage. For weight decay, use the optimizer's weight_decay; move layers into the network; "
            "have layers return auxiliary losses, in a tuple."
        )


def _graph_of(loss: Tensor) -> set[Any]:
    """Return all nodes of a tensor's autograd graph."""
    found: set[Any] = set()
    following = [loss.grad_fn]
    while following:
        node = following.pop()
        if node is not None and node not in found:
            found.add(node)
            following += [other for other, _ in node.next_functions]
    return found
