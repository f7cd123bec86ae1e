"""Gradients that a schedule has computed, passed through Lightning's own order of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# DDP's default: large enough for the network, small enough to be sent while the next one is filled.
_BUCKET_BYTES = 25 * 1024 * 1024


class _Deliver(torch.autograd.Function):
    """A loss whose backward delivers existing gradients, times the factor by which Lightning scales the loss."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, deliver: Callable[[Tensor], None]) -> Tensor:
        ctx.deliver = deliver
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        ctx.deliver(scale)
        return torch.zeros_like(scale), None, None


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
        """Return a loss whose ``backward`` adds the gradients to those that have accumulated.

        Args:
            value: The loss, a scalar.
            after: Called with the parameters once the gradients are added.
        """

        def deliver(scale: Tensor) -> None:
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                if gradient is None:
                    continue
                gradient.mul_(scale.to(gradient.dtype))
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            self._gradients.clear()
            after(self._parameters)

        anchor = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
        delivered: Tensor = _Deliver.apply(anchor, value, deliver)
        return delivered


def average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, size: int) -> None:
    """Average gradients over the replicas of a stage.

    A parameter without gradient counts as 0, as the others may have one: all ranks must send the same.

    Args:
        parameters: The stage's parameters.
        group: The ranks with the same stage in all replicas.
        size: Their number.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    pending = []
    for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        means = torch.split(flat.div_(size), [gradient.numel() for gradient in bucket])
        for gradient, mean in zip(bucket, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def clip_by_norm(parameters: Sequence[Tensor], max_norm: float, group: dist.ProcessGroup) -> None:
    """Clip gradients by the norm of all stages' gradients.

    Args:
        parameters: This rank's parameters.
        max_norm: Highest norm.
        group: The ranks of the replica.
    """
    owned = [parameter for parameter in parameters if parameter.grad is not None]
    squared = torch.nn.utils.get_total_norm([parameter.grad for parameter in owned]).square()  # type: ignore[misc]
    squared = squared.to(parameters[0].device)  # that of no gradients at all is on the CPU
    dist.all_reduce(squared, group=group)
    torch.nn.utils.clip_grads_with_norm_(owned, max_norm, squared.sqrt())


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of gradients of one dtype."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket: list[Tensor] = []
        num_bytes = 0
        for gradient in (gradient for gradient in gradients if gradient.dtype == dtype):
            bucket.append(gradient)
            num_bytes += gradient.nbytes
            if num_bytes >= _BUCKET_BYTES:
                yield bucket
                bucket = []
                num_bytes = 0
        if bucket:
            yield bucket
