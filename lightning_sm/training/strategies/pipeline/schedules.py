"""The schedules: orders in which a rank runs the forward and backward passes of the microbatches of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.forward import StageShapes
from lightning_sm.training.strategies.pipeline.stage import Stage

ScheduleName = Literal["gpipe", "1f1b"]
# Names in torch.distributed.pipelining.
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}
# Schedules to keep, each with the buffers of its shapes. Another one is made of known shapes without a forward pass.
_KEPT = 4


class ScheduleRunner:
    """A runner of training steps over this rank's stage.

    Args:
        stage: The stage.
        replica: The ranks of this replica.
        device: This rank's device.
        name: The schedule.
        loss: Called on the rank of the last stage with the output of a microbatch and its number; returns its share of
            the batch's loss.
    """

    def __init__(
        self,
        stage: Stage,
        replica: Replica,
        device: torch.device,
        name: ScheduleName,
        loss: Callable[[Any, int], Tensor],
    ) -> None:
        self._stage = stage
        self._replica = replica
        self._device = device
        self._name = name
        self._loss = loss
        self._schedules: OrderedDict[Hashable, Any] = OrderedDict()
        self._shapes: dict[Hashable, StageShapes] = {}

    def knows(self, microbatches: int, shapes: Hashable) -> bool:
        """Return whether ``learn`` was called for the key; the same on all ranks of a replica.

        Args:
            microbatches: Number of microbatches.
            shapes: Key for the shapes of the activations.
        """
        return (microbatches, shapes) in self._shapes

    def learn(self, microbatches: int, shapes: Hashable, found: StageShapes) -> None:
        """Keep the shapes that a trial has found.

        Args:
            microbatches: Number of microbatches.
            shapes: Key for the shapes of the activations.
            found: Those of this rank's stage.
        """
        self._shapes[microbatches, shapes] = found

    def step(self, inputs: tuple[Any, ...], microbatches: int, shapes: Hashable) -> Any:
        """Run forward and backward passes, which leave the sum of the microbatches' gradients in ``.grad``.

        Args:
            inputs: The network's inputs for the whole batch on the first rank, else nothing.
            microbatches: Number of microbatches; it divides the rows of the batch.
            shapes: Key for the shapes of the activations, which ``learn`` was called for.

        Returns:
            The network's output for the whole batch on the last rank, else None.
        """
        schedule = self._schedule(microbatches, shapes)
        # The schedule splits only tensors. Give it the microbatches' numbers, by which the loss finds its rows.
        target = torch.arange(microbatches) if self._replica.is_last else None
        with torch.enable_grad():
            return schedule.step(*inputs, target=target, return_outputs=self._replica.is_last)

    def _schedule(self, microbatches: int, shapes: Hashable) -> Any:
        # Imported here, so that scripts with another strategy need not wait 0.2 s for it.
        from torch.distributed.pipelining import PipelineStage  # noqa: PLC0415
        from torch.distributed.pipelining.schedules import get_schedule_class  # noqa: PLC0415

        key = (microbatches, shapes)
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        num_stages = len(self._replica.ranks)
        # The stage objects, not the modules, hold the shapes of the activations.
        stage = PipelineStage(
            self._stage,
            self._replica.position,
            num_stages,
            self._device,
            input_args=self._shapes[key].inputs,
            output_args=self._shapes[key].outputs,
            group=self._replica.group,
        )
        # 1F1B needs a microbatch for each stage.
        name = self._name if microbatches >= num_stages else "gpipe"
        self._schedules[key] = get_schedule_class(SCHEDULES[name])(
            stage, microbatches, loss_fn=lambda output, i: self._loss(output, int(i)), scale_grads=False
        )
        if len(self._schedules) > _KEPT:
            self._schedules.popitem(last=False)
        return self._schedules[key]
