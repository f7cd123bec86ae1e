"""The backward passes of a training step, which run when ``backward`` is called on the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sm.training.strategies.pipeline.exchange import Replica, wait_for
from lightning_sm.training.strategies.pipeline.forward import cut, run_forward
from lightning_sm.training.strategies.pipeline.random_state import stage_stream
from lightning_sm.training.strategies.pipeline.relay import relay
from lightning_sm.training.strategies.pipeline.stage import Stage, as_output, as_tuple


class StepPasses:
    """The passes of a training step through this rank's stage: all forward passes at first, and later all backward.

    In between, the last rank has the network's output for the whole batch, from which it computes any loss. So this
    rank holds the activations of all microbatches until their backward passes.

    Args:
        stage: This rank's stage.
        replica: The ranks of this replica.
        after: Called after the backward passes.

    Attributes:
        node: The node in the autograd graph of a loss that runs the backward passes; None before ``attach``.
    """

    def __init__(self, stage: Stage, replica: Replica, after: Callable[[], None]) -> None:
        self._stage = stage
        self._replica = replica
        self._after = after
        self._outputs: list[tuple[Tensor, ...]] = []
        self._inputs: list[tuple[Tensor, ...]] = []
        self.node: Any = None

    @property
    def received(self) -> list[Tensor]:
        """The tensors that this rank's stage got from the previous one; on the first rank, the network's inputs."""
        return [value for inputs in self._inputs for value in inputs]

    def forward(self, inputs: Sequence[Tensor], number: int) -> Any:
        """Run the forward passes; a collective call within the replica.

        Args:
            inputs: The network's inputs; used on the first rank.
            number: Number of microbatches.

        Returns:
            The network's output for the whole batch on the last rank, None on the others.
        """
        microbatches = cut([value.detach() for value in inputs], number)
        with stage_stream(self._replica.position):
            return run_forward(self._replica, microbatches, self._run_forward)

    def attach(self, value: Any) -> Any:
        """Return the same tensors, such that ``backward`` on them runs the backward passes of all microbatches.

        All ranks of the replica must call ``backward``, but only the gradients of the last rank count.

        Args:
            value: The network's output; on ranks without it, the loss.
        """
        # Cut the last rank off its stage's graphs, whose backward passes run one by one, like those of other ranks.
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in as_tuple(value)]
        attached = _Attached.apply(self._run_all_backward, *leaves)
        self.node = next((tensor.grad_fn for tensor in attached if tensor.requires_grad), None)
        return as_output(attached)

    def _run_forward(self, _: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = as_tuple(self._stage(*inputs))
        self._inputs.append(inputs)
        self._outputs.append(outputs)
        return outputs

    def _run_all_backward(self, gradients: Sequence[Tensor | None]) -> None:
        given: Sequence[Any] = self._cut(gradients) if self._replica.is_last else self._outputs
        with self._replica.together():
            relay(self._replica, given, self._run_backward, is_backward=True)
        self._after()

    def _run_backward(self, number: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        outputs = [
            (output, gradient)
            for output, gradient in zip(self._outputs[number], gradients, strict=True)
            if gradient is not None
        ]
        if outputs:
            torch.autograd.backward([output for output, _ in outputs], [gradient for _, gradient in outputs])
        return tuple(value.grad for value in self._inputs[number])

    def _cut(self, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
        """Return the gradients of each microbatch's outputs."""
        number = len(self._outputs)
        cut: list[Sequence[Tensor | None]] = []
        for gradient, parts in zip(gradients, zip(*self._outputs, strict=True), strict=True):
            if gradient is None or number == 1:
                cut.append([gradient] * number)
            else:
                cut.append(gradient.split([len(part) for part in parts]))
        return list(zip(*cut, strict=True))


class _Attached(torch.autograd.Function):
    """The identity, whose backward pass calls a function with the gradients."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[[Sequence[Tensor | None]], None], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.run = backward
        ctx.set_materialize_grads(False)
        results = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(
            *(result for value, result in zip(values, results, strict=True) if not value.requires_grad)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.run(gradients)
        return (None,) * (1 + len(gradients))


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
    wait_for(sent)
