"""Pipeline schedules: the order in which a rank runs the forward and backward passes of a step's microbatches."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sm.training.strategies.pipeline.exchange import Replica
from lightning_sm.training.strategies.pipeline.forward import StageShapes, try_out
from lightning_sm.training.strategies.pipeline.loss import StepLoss
from lightning_sm.training.strategies.pipeline.stage import Stage

logger = logging.getLogger(__name__)

# The names in torch.distributed.pipelining, in lower case.
ScheduleName = Literal["gpipe", "1f1b"]


class ScheduleRunner:
    """A runner of training steps on this rank's stage.

    Args:
        stage: The stage.
        replica: The ranks of this replica.
        name: The schedule.
        loss: The loss of a step, used on the rank of the last stage.
    """

    def __init__(self, stage: Stage, replica: Replica, name: ScheduleName, loss: StepLoss) -> None:
        self._stage = stage
        self._replica = replica
        self._name = name
        self._loss = loss
        self._shapes: dict[Hashable, StageShapes] = {}
        # The latest schedule, with buffers for its shapes. Others are rebuilt from _shapes, without a forward pass.
        self._schedule: Any = None
        self._key: Hashable = None

    def step(self, inputs: tuple[Tensor, ...], microbatches: int) -> Any:
        """Run the forward and backward passes, and sum the microbatches' gradients in ``.grad``.

        A collective call within the replica.

        Args:
            inputs: The network's inputs for the whole batch. Shapes must match on all ranks; only the first rank uses
                the values.
            microbatches: Number of microbatches, a divisor of the number of rows in the batch.

        Returns:
            The network's output for the whole batch on the last rank, else None.
        """
        key = (microbatches, *((tuple(value.shape), value.dtype) for value in inputs))
        if key not in self._shapes:
            first = tuple(value[: len(value) // microbatches] for value in inputs)
            self._shapes[key] = try_out(self._stage, self._replica, first, self._loss.try_out)
            changing = self._shapes[key].changing
            if changing and microbatches > 1 and len(self._shapes) == 1 and 0 in self._replica.ranks:
                logger.warning(
                    "Layers change their buffers in each forward pass (%s), and each microbatch is a forward pass. "
                    "BatchNorm, for example, computes statistics of microbatches; GroupNorm and LayerNorm keep none.",
                    ", ".join(changing),
                )
        if key != self._key:
            self._schedule, self._key = self._make(microbatches, self._shapes[key]), key
        # The schedule splits only tensors, so the target holds the microbatches' indices, by which the loss finds rows.
        target = torch.arange(microbatches) if self._replica.is_last else None
        stage_inputs = inputs if self._replica.is_first else ()
        with torch.enable_grad(), self._replica.alone():
            return self._schedule.step(*stage_inputs, target=target, return_outputs=self._replica.is_last)

    def _make(self, microbatches: int, shapes: StageShapes) -> Any:
        # Import here, so that scripts with other strategies do not wait 0.2 s for this import.
        from torch.distributed.pipelining import PipelineStage  # noqa: PLC0415
        from torch.distributed.pipelining.schedules import get_schedule_class  # noqa: PLC0415

        num_stages = len(self._replica.ranks)
        # Make a new PipelineStage, because it holds the shapes of the activations.
        stage = PipelineStage(
            self._stage,
            self._replica.position,
            num_stages,
            self._replica.device,
            input_args=shapes.inputs,
            output_args=shapes.outputs,
            group=self._replica.group,
        )
        # 1F1B needs at least one microbatch per stage.
        name = self._name if microbatches >= num_stages else "gpipe"
        schedule = get_schedule_class(name)(stage, max(microbatches, num_stages), self._loss, scale_grads=False)
        # Set it here: torch 2.10 can run fewer microbatches than stages, but its constructor refuses them.
        schedule._n_microbatches = microbatches
        return schedule
