"""Gradients that a schedule has computed, passed through Lightning's own order of a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# DDP's default: large enough for the network, small enough to be sent while the next one is filled.
_BUCKET_BYTES = 25 * 1024 * 1024
# Copies of buckets at a time: one is sent while the next one is filled.
_IN_FLIGHT = 2


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
    pending: deque[_Sent] = deque()
    for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        if len(pending) == _IN_FLIGHT:
            pending.popleft().receive(size)
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        pending.append(_Sent(bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for sent in pending:
        sent.receive(size)


@dataclass(frozen=True)
class _Sent:
    """A bucket of gradients whose sum is on its way.

    Attributes:
        gradients: The gradients.
        flat: A copy of them, which becomes the sum.
        work: The call that sends it.
    """

    gradients: Sequence[Tensor]
    flat: Tensor
    work: Any

    def receive(self, size: int) -> None:
        """Wait for the sum, and replace the gradients by their means over so many replicas."""
        self.work.wait()
        means = torch.split(self.flat.div_(size), [gradient.numel() for gradient in self.gradients])
        for gradient, mean in zip(self.gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def total_norm(
    parameters: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the gradients of all stages, a scalar; a collective call of the replica.

    Args:
        parameters: This rank's parameters; each parameter of the model must be one rank's only.
        group: The ranks of the replica.
        device: This rank's device.
        norm_type: The p of the p-norm; may be infinite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(device)  # that of none is on the CPU
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    powers = norm.pow(norm_type)
    dist.all_reduce(powers, group=group)
    return powers.pow(1 / norm_type)


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
