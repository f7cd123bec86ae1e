"""The loss of a step, combined from the losses of its microbatches, and a check of how they are weighted."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sm._lightning import LightningModule
from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.draws import MatchedDraws
from lightning_sm.training.strategies.pipeline.random_state import preserve_random_state
from lightning_sm.training.strategies.pipeline.rows import rows_of
from lightning_sm.training.strategies.pipeline.stage import as_output, as_tuple
from lightning_sm.training.strategies.pipeline.steps import UserSteps

logger = logging.getLogger(__name__)

LossKind = Literal["mean", "sum"]

_WEIGHT = "pipeline_weight"
# Check the first steps, and then one step in every _EVERY_STEPS, because the first padded batch may come late.
_FIRST_STEPS = 10
_EVERY_STEPS = 100
# Largest accepted gradient difference, relative to the norm: above rounding, below the effect of wrong weights.
_TOLERANCE = 1e-3
_TOLERANCE_EPS = 4
# Differences below this fraction of the largest gradient so far count as rounding: trained models have tiny gradients.
_ROUNDING = 1e-5


class StepLoss:
    """The loss of a step on the rank of the last stage; the schedule calls it for each microbatch.

    A step computes the gradient of the whole batch's loss only if it weights microbatches as that loss does: by their
    number of rows, or by the number that the module's method ``pipeline_weight(batch)`` returns, such as the number of
    tokens that are not padding. ``check`` compares the gradients of two microbatches with those of the same rows as one
    batch. It does not compare losses, because an untrained model's losses are nearly equal for all tokens.

    Args:
        module: The LightningModule.
        steps: The runner of the module's steps.
        kind: How to combine the microbatches' losses: "mean" or "sum".

    Raises:
        StrategyError: The loss is a sum, but the module has a method ``pipeline_weight``.

    Attributes:
        error: The error that the user's code raised in this step. Raise it only after the schedule: in the middle, it
            would leave the other ranks waiting.
    """

    def __init__(self, module: LightningModule, steps: UserSteps, kind: LossKind) -> None:
        self._module = module
        self._steps = steps
        self._is_sum = kind == "sum"
        self._weigh: Any = getattr(module, _WEIGHT, None)
        if self._is_sum and self._weigh is not None:
            raise StrategyError(
                f"The strategy has loss=sum, which adds up the losses of microbatches, but {type(module).__name__} has "
                f"a method {_WEIGHT}, which is for averaging them. Remove one of the two."
            )
        self._is_comparable = True
        self._largest = 0.0
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self.error: Exception | None = None

    def begin(self, arguments: tuple[Any, ...], rows: int, microbatches: int, *, step: int) -> None:
        """Begin a step, and compute the weights of its microbatches.

        Args:
            arguments: The arguments of ``training_step``; the first is the batch.
            rows: Number of rows in the batch.
            microbatches: Number of microbatches; it divides the number of rows.
            step: Number of the step; it determines which two microbatches ``check`` compares.

        Raises:
            StrategyError: ``pipeline_weight`` does not return a finite number of at least 0.
        """
        self._batch, *self._rest = arguments
        self._rows = rows
        self._size = rows // microbatches
        # Steps 100, 200, ... check pairs 1, 2, ..., so that all pairs have their turn.
        self._pair = step % (_EVERY_STEPS - 1) % max(1, microbatches - 1)
        self._outputs.clear()
        self._sum: Any = 0.0
        self.error = None
        self._weights = [float(self._size)] * microbatches
        if self._weigh is not None:
            parts = (rows_of(self._batch, rows, self._slice(i)) for i in range(microbatches))
            self._weights = [float(self._weigh(part)) for part in parts]
            if not all(0 <= weight < math.inf for weight in self._weights):
                raise StrategyError(
                    f"{type(self._module).__name__}.{_WEIGHT}(batch) returned {self._weights} for the microbatches. "
                    "Return the number of items over which the loss averages, such as the number of tokens."
                )
        self._factors = self._factors_of(self._weights)

    def __call__(self, output: Any, index: Tensor) -> Tensor:
        """Return the weighted loss of a microbatch.

        Args:
            output: The network's output for the microbatch.
            index: Index of the microbatch, as a tensor of one element.
        """
        number = int(index)
        if number in (self._pair, self._pair + 1):
            self._outputs[number] = tuple(value.detach() for value in as_tuple(output))
        # Skip weights of 0: a mean over nothing is NaN, and so are its gradients.
        if self.error is None and self._factors[number]:
            try:
                loss = self._loss(output, number) * self._factors[number]
            except Exception as error:  # noqa: BLE001  # raised after the schedule
                self.error = error
            else:
                self._sum = self._sum + loss.detach()
                return loss
        empty = [value.flatten()[:0].float().sum() for value in as_tuple(output) if value.requires_grad]
        return torch.stack(empty).sum()

    def try_out(self, output: Any) -> None:
        """Compute the loss of the first microbatch, to raise its errors before the schedule runs.

        Args:
            output: The network's output for the microbatch.

        Raises:
            StrategyError: As in ``UserSteps.loss``; any other error comes from the user's code.
        """
        leaves = _leaves(as_tuple(output))
        loss = self._loss(as_output(leaves), 0)
        if refusal := self._refusal(loss):
            raise StrategyError(refusal)
        torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)

    def check(self, whole: float) -> str | None:
        """Compare the gradients of two microbatches with those of the same rows as one batch.

        Args:
            whole: The loss of the whole batch.

        Returns:
            An error message that explains how to declare the loss; None if no error is found.
        """
        if math.isfinite(whole) and not math.isfinite(self._sum):
            return self._wrong(0, len(self._weights), whole, float(self._sum))
        first, number = self._pair, len(self._outputs)
        factors = self._factors_of(self._weights[first : first + number])
        if not self._is_comparable or not any(factors):
            return None
        leaves = _leaves(torch.cat(parts) for parts in zip(*self._outputs.values(), strict=True))
        apart: Any = 0.0
        parts = []
        for i, half in enumerate(zip(*(leaf.chunk(number) for leaf in leaves), strict=True)):
            if factors[i]:
                parts.append(self._steps.draws(self._slice(first + i), self._rows) or MatchedDraws())
                with preserve_random_state(), torch.enable_grad():
                    apart = apart + self._loss(as_output(half), first + i, draws=parts[-1]) * factors[i]
        draws = MatchedDraws(MatchedDraws.of_parts(parts))
        with preserve_random_state(), torch.enable_grad():
            together = self._loss(as_output(leaves), first, number, draws)
            is_matched = all(map(draws.is_like, parts))
        if refusal := self._refusal(together):
            return refusal
        if not is_matched:
            self._is_comparable = False
            logger.warning(
                "%s draws other random numbers for a batch than for its microbatches, so their losses cannot be "
                "compared. Draw with torch, one row for each row of the batch, or make sure that the loss is %s.",
                self._steps.where,
                self._described,
            )
            return None
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        expected, found = (
            torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True) for loss in (together, apart)
        )
        norm = _norm(expected)
        difference = _norm([ours - theirs for ours, theirs in zip(found, expected, strict=True)])
        if math.isfinite(norm):  # infinite gradients are the user's: one process would have them, too
            self._largest = max(self._largest, norm)
        dtypes = [value.dtype for value in (together, *trained)]
        tolerance = max(_TOLERANCE, _TOLERANCE_EPS * max(torch.finfo(dtype).eps for dtype in dtypes))
        if not math.isfinite(norm) or difference <= max(tolerance * norm, _ROUNDING * self._largest):
            return None
        differ = f", and the gradients differ by {difference:.2g} (norm {norm:.2g})"
        return self._wrong(first, number, together.item(), apart.item(), differ)

    def _refusal(self, loss: Tensor) -> str | None:
        """Return an error message if a loss depends on parameters otherwise than through the network's output."""
        weights = {name: weight for name, weight in self._module.named_parameters() if weight.requires_grad}
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, retain_graph=True)
        used = [name for name, gradient in zip(weights, gradients, strict=True) if gradient is not None]
        message = (
            f"The loss of {self._steps.where} uses the parameters {', '.join(used)} outside of the network's call, "
            "but each rank has only the parameters of its stage. For weight decay, use the optimizer's weight_decay; "
            "move layers into the network; have layers return auxiliary losses, in a tuple."
        )
        return message if used else None

    def _wrong(self, first: int, number: int, whole: float, apart: float, gradients: str = "") -> str:
        name = type(self._module).__name__
        return (
            f"The pipeline would train {name} differently from one process: the loss of {self._steps.where} is not "
            f"{self._described}. For rows {first * self._size} to {(first + number) * self._size - 1} of a batch it is "
            f"{whole:.6g}, but {apart:.6g} from {number} microbatches of these rows{gradients}. "
            f"If the loss averages over something else, such as non-padding tokens or weighted classes, add a "
            f"method to {name} that returns the weight: def {_WEIGHT}(self, batch): return (batch[1] != -100).sum(). "
            "If it adds up the rows, set the strategy's option loss: sum. "
            "If it compares the rows of a batch with each other (contrastive losses), microbatches cannot compute it: "
            "use num_microbatches=1, or strategy=ddp or fsdp."
        )

    def _factors_of(self, weights: Sequence[float]) -> list[float]:
        if self._is_sum:
            return [1.0] * len(weights)
        whole = sum(weights)
        return [weight / whole if whole else 0.0 for weight in weights]

    def _loss(self, output: Any, first: int, number: int = 1, draws: MatchedDraws | None = None) -> Tensor:
        """Return the loss of some microbatches from the network's output for them."""
        rows = self._slice(first, number)
        part = rows_of(self._batch, self._rows, rows)
        return self._steps.loss((part, *self._rest), output, draws or self._steps.draws(rows, self._rows))

    def _slice(self, first: int, number: int = 1) -> slice:
        """Return the rows of some microbatches."""
        return slice(first * self._size, (first + number) * self._size)

    @property
    def _described(self) -> str:
        if self._is_sum:
            return "the sum of its microbatches' losses (loss=sum)"
        by = "rows" if self._weigh is None else f"{_WEIGHT}(batch)"
        return f"the mean of its microbatches' losses, weighted by {by}"


def is_checked(step: int) -> bool:
    """Return whether to check the losses of a step.

    Args:
        step: Number of steps before this one, the same on all ranks.
    """
    return step < _FIRST_STEPS or step % _EVERY_STEPS == 0


def _leaves(values: Iterable[Tensor]) -> list[Tensor]:
    return [value.detach().requires_grad_(value.is_floating_point()) for value in values]


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.float().square().sum()) for tensor in tensors))
