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
        inputs: The inputs of this rank's stage, for each microbatch.
    """

    def __init__(self, stage: Stage, replica: Replica, after: Callable[[], None]) -> None:
        self._stage = stage
        self._replica = replica
        self._after = after
        self._outputs: list[tuple[Tensor, ...]] = []
        self.inputs: list[tuple[Tensor, ...]] = []

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
        return as_output(_Attached.apply(self, *leaves))

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Run the backward passes; a collective call within the replica. ``attach`` makes autograd call it.

        Args:
            gradients: The gradients of the network's outputs for the whole batch; used on the last rank.
        """
        given: Sequence[Any] = self._cut(gradients) if self._replica.is_last else self._outputs
        with self._replica.together():
            self._replica.relay(given, self._run_backward, is_backward=True)
        self._after()

    def _run_forward(self, _: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = as_tuple(self._stage(*inputs))
        self.inputs.append(inputs)
        self._outputs.append(outputs)
        return outputs

    def _run_backward(self, number: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        pairs = zip(self._outputs[number], gradients, strict=True)
        trained = [(output, gradient) for output, gradient in pairs if gradient is not None]
        if trained:
            torch.autograd.backward([output for output, _ in trained], [gradient for _, gradient in trained])
        return tuple(value.grad for value in self.inputs[number])

    def _cut(self, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
        """Return the gradients of each microbatch's outputs."""
        cut = [
            [gradient] * len(parts)
            if gradient is None or len(parts) == 1
            else torch.split(gradient, [len(part) for part in parts])
            for gradient, parts in zip(gradients, zip(*self._outputs, strict=True), strict=True)
        ]
        return list(zip(*cut, strict=True))


class _Attached(torch.autograd.Function):
    """The identity function, whose backward pass runs the backward passes of a step."""

    @staticmethod
    def forward(ctx: Any, passes: StepPasses, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        copies = [value.detach() for value in values]
        ctx.mark_non_differentiable(*(copies[i] for i, value in enumerate(values) if not value.requires_grad))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.passes.backward(gradients)
        return (None, *(None for _ in gradients))


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
