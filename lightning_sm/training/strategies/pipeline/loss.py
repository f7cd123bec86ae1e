"""The loss of a step, from those of its microbatches: their weights, and the check that they are right."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.random_state import preserve_random_state, random_state
from lightning_sm.training.strategies.pipeline.rows import rows_of
from lightning_sm.training.strategies.pipeline.stage import as_tuple
from lightning_sm.training.strategies.pipeline.steps import UserSteps

logger = logging.getLogger(__name__)

LossKind = Literal["mean", "sum"]

_WEIGHT = "pipeline_weight"
# Steps that are checked: the first ones, and one in so many, as padding may begin late.
_FIRST_STEPS = 10
_EVERY_STEPS = 100
# Highest difference of gradients, relative to their norm: above rounding, below what wrong weights make.
_TOLERANCE = 1e-3
_TOLERANCE_EPS = 4
# Differences below this share of the largest gradient so far are rounding: a trained model's gradients may be no more.
_ROUNDING = 1e-5


def check_loss_options(module: LightningModule, kind: LossKind) -> None:
    """Check ``loss`` and the module's ``pipeline_weight``.

    Args:
        module: The LightningModule.
        kind: ``loss`` of the strategy.

    Raises:
        StrategyError: There are weights for a loss that is a sum.
    """
    if kind == "sum" and hasattr(module, _WEIGHT):
        raise StrategyError(
            f"The strategy has loss=sum, which adds the microbatches' losses up, but {type(module).__name__} has a "
            f"method {_WEIGHT}, with which they are averaged. Remove one of them."
        )


class StepLoss:
    """The loss of a step on the rank of the last stage: called by the schedule for each microbatch.

    The gradient of a step is that of the whole batch's loss only if microbatches have the weights with which that loss
    averages: rows, unless the module has a method ``pipeline_weight(batch)``, which returns any other number, such as
    that of tokens that are not padding.
    ``check`` compares the gradients that two microbatches give with those of both as one batch. It compares gradients,
    because the losses of a model at its start are nearly equal for all tokens.

    An error of the user's code is kept until ``end``: raised in the middle of a schedule, it would leave the other
    ranks waiting.

    Args:
        module: The LightningModule.
        steps: Its steps.
        kind: "mean" or "sum" of the microbatches' losses.
    """

    def __init__(self, module: LightningModule, steps: UserSteps, kind: LossKind) -> None:
        self._module = module
        self._steps = steps
        self._kind = kind
        self._is_random = False
        self._largest = 0.0
        self._error: Exception | None = None
        self._outputs: dict[int, Any] = {}
        self._pair = 0

    def begin(self, arguments: tuple[Any, ...], rows: int, microbatches: int, *, pair: int) -> None:
        """Take a step's batch.

        Args:
            arguments: Those of ``training_step``; the first is the batch.
            rows: Number of rows of the batch.
            microbatches: Number of microbatches; it divides the rows.
            pair: The first of the two microbatches that ``check`` compares, modulo those there are.
        """
        self._arguments = arguments
        self._rows = rows
        self._size = rows // microbatches
        self._pair = pair % max(1, microbatches - 1)
        self._outputs.clear()
        self._error = None
        self._factors = [0.0] * microbatches
        try:
            self._weights = self._weights_of([self._part(i)[0] for i in range(microbatches)])
        except Exception as error:  # noqa: BLE001  # raised by end
            self._error = error
        else:
            self._factors = self._factors_of(self._weights)

    def __call__(self, output: Any, index: int) -> Tensor:
        """Return the weighted loss of a microbatch.

        Args:
            output: The network's output for it.
            index: Its number.
        """
        if index in (self._pair, self._pair + 1):
            self._outputs[index] = tuple(value.detach() for value in as_tuple(output))
        if self._error is not None or self._factors[index] == 0:
            # A mean over nothing is no number, nor are its gradients.
            return _zero_loss(output)
        try:
            return self._steps.loss(self._part(index), output) * self._factors[index]
        except Exception as error:  # noqa: BLE001  # raised by end
            self._error = error
            return _zero_loss(output)

    def try_out(self, output: Any) -> None:
        """Compute the loss of the first microbatch, so that errors show before the schedule runs.

        Args:
            output: The network's output for it.

        Raises:
            StrategyError: See ``UserSteps.loss``, whose other errors are the user's.
        """
        error = self.end()
        if error is not None:
            raise error
        self._steps.loss(self._part(0), output)

    def end(self) -> Exception | None:
        """Return the error of the step, if there was one."""
        error, self._error = self._error, None
        return error

    def check(self) -> str | None:
        """Compare two microbatches with the same rows as one batch.

        Returns:
            None, or what is wrong and how to declare the loss.
        """
        if self._is_random or len(self._outputs) < 2:  # noqa: PLR2004  # a pair
            return None
        first = self._pair
        weights = self._weights[first : first + 2]
        factors = self._factors_of(weights)
        with preserve_random_state(), torch.enable_grad():
            before = random_state()
            apart = [self._gradients(self._part(first + i), self._outputs[first + i]) for i in range(2)]
            joined = tuple(torch.cat(both) for both in zip(*(self._outputs[first + i] for i in range(2)), strict=True))
            loss, gradients = self._gradients(self._part(first, 2), joined)
            self._is_random = before != random_state()
        if self._is_random:
            logger.warning(
                "%s draws random numbers after it calls the network, so that the losses of microbatches cannot be "
                "compared with that of their batch. Make sure that the loss is %s.",
                self._steps.where,
                self._described,
            )
            return None
        expected = [
            torch.cat([_scaled(gradient, factor) for gradient, factor in zip(both, factors, strict=True)])
            for both in zip(*(gradients_of for _, gradients_of in apart), strict=True)
        ]
        norm = _norm(gradients)
        difference = _norm([ours - theirs for ours, theirs in zip(expected, gradients, strict=True)])
        if not math.isfinite(norm):
            return None  # of the user's own making: in one process, too
        self._largest = max(self._largest, norm)
        dtypes = [value.dtype for value in (loss, *joined) if value.is_floating_point()]
        tolerance = max(_TOLERANCE, _TOLERANCE_EPS * max(torch.finfo(dtype).eps for dtype in dtypes))
        if difference <= max(tolerance * norm, _ROUNDING * self._largest):
            return None
        losses = [float(one) for one, _ in apart]
        return self._message(float(loss), losses, weights, difference / norm if norm else math.inf)

    def _weights_of(self, batches: Sequence[Any]) -> list[float]:
        weigh: Any = getattr(self._module, _WEIGHT, None)
        if weigh is None:
            return [float(self._size)] * len(batches)
        found = [weigh(batch) for batch in batches]
        if all(isinstance(weight, Tensor) for weight in found):
            found = torch.stack(found).tolist()  # one transfer from the device
        for weight in found:
            is_number = isinstance(weight, (int, float)) or (isinstance(weight, Tensor) and weight.numel() == 1)
            if not is_number or not 0 <= float(weight) < math.inf:
                raise StrategyError(
                    f"{type(self._module).__name__}.{_WEIGHT}(batch) returned {weight!r}, which is not a number of at "
                    "least 0. Return what the loss of these rows averages over, such as their number of tokens."
                )
        return [float(weight) for weight in found]

    def _factors_of(self, weights: Sequence[float]) -> list[float]:
        if self._kind == "sum":
            return [1.0] * len(weights)
        whole = sum(weights)
        return [weight / whole if whole else 0.0 for weight in weights]

    def _part(self, first: int, number: int = 1) -> tuple[Any, ...]:
        """Return the arguments of ``training_step`` for some microbatches."""
        batch, *rest = self._arguments
        rows = slice(first * self._size, (first + number) * self._size)
        return (rows_of(batch, self._rows, rows), *rest)

    def _gradients(self, arguments: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and its gradients with respect to the network's output."""
        leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in output]
        loss = self._steps.loss(arguments, leaves[0] if len(leaves) == 1 else tuple(leaves))
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
        return loss.detach(), list(gradients)

    @property
    def _described(self) -> str:
        if self._kind == "sum":
            return "the sum of its microbatches' losses (loss=sum)"
        by = f"{_WEIGHT}(batch)" if hasattr(self._module, _WEIGHT) else "rows"
        return f"the mean of its microbatches' losses, weighted by {by}"

    def _message(self, together: float, losses: Sequence[float], weights: Sequence[float], difference: float) -> str:
        name = type(self._module).__name__
        first = self._pair * self._size
        factors = self._factors_of(weights)
        combined = sum(loss * factor for loss, factor in zip(losses, factors, strict=True) if factor)
        remedy = (
            f"If the loss averages over something else, such as tokens that are not padding or classes with weights, "
            f"say what in a method of {name}: "
            f"def {_WEIGHT}(self, batch): return (batch[1] != -100).sum(). "
            "If it adds the rows up, set loss: sum of the strategy. "
            "If it compares the rows of a batch with each other (contrastive losses), microbatches cannot compute it: "
            "use num_microbatches=1, or strategy=ddp or fsdp."
        )
        if self._kind == "mean" and math.isclose(sum(losses), together, rel_tol=_TOLERANCE):
            remedy = "The loss adds the rows up: set loss: sum of the strategy."
        return (
            f"The pipeline would train {name} unlike one process: the loss of {self._steps.where} is not "
            f"{self._described}. For rows {first} to {first + 2 * self._size - 1} of a batch the loss is {together:.6g}"
            f", but its microbatches' losses of {losses[0]:.6g} and {losses[1]:.6g} (weights {weights[0]:g} and "
            f"{weights[1]:g}) make {combined:.6g}, and their gradients differ by {difference:.2g} times the norm. "
            f"{remedy}"
        )


def is_checked(step: int) -> bool:
    """Return whether the losses of a step are checked.

    Args:
        step: Number of steps before it, the same on all ranks.
    """
    return step < _FIRST_STEPS or step % _EVERY_STEPS == 0


def _zero_loss(output: Any) -> Tensor:
    """Return a loss of 0 whose gradients are 0, too, whatever the output."""
    empty = [value.flatten()[:0].float().sum() for value in as_tuple(output) if value.requires_grad]
    return torch.stack(empty).sum()


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    return gradient * factor if factor else torch.zeros_like(gradient)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.float().square().sum()) for tensor in tensors))
