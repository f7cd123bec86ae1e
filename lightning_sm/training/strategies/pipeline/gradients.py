"""The gradients that a schedule computes, held back until Lightning calls ``backward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class StepGradients:
    """The gradients of one step, set aside until Lightning calls ``backward`` on the loss.

    Lightning runs ``training_step``, then ``zero_grad``, then ``backward``. A schedule computes gradients within
    ``training_step``, so ``zero_grad`` would delete them. Use this as a context manager around the schedule.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._gradients: list[Tensor | None] = []
        self._accumulated: list[Tensor | None] = []

    def __enter__(self) -> StepGradients:
        self._accumulated = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        self._gradients = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._accumulated, strict=True):
            parameter.grad = gradient

    def loss(self, value: Tensor, after: Callable[[list[nn.Parameter]], None]) -> Tensor:
        """Return a loss whose ``backward`` adds the step's gradients to the accumulated gradients.

        Args:
            value: The loss, a scalar.
            after: Called with the parameters after the gradients have been added.
        """

        def deliver(scale: Tensor) -> None:
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                if gradient is not None:
                    gradient.mul_(scale.to(gradient.dtype))
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            self._gradients.clear()
            after(self._parameters)

        loss = value.detach().clone().requires_grad_()
        # The hook's argument is the factor by which Lightning has scaled the loss.
        loss.register_hook(deliver)  # type: ignore[no-untyped-call]
        return loss


def average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, size: int) -> None:
    """Average gradients over the replicas of a stage, in place.

    A missing gradient counts as 0: another replica may have one, and all ranks must send the same tensors.

    Args:
        parameters: The stage's parameters.
        group: The ranks with the same stage in all replicas.
        size: Number of ranks in the group.
    """
    sent = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(size)
        sent.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in sent:
        work.wait()
