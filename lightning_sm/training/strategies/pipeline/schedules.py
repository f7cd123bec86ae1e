"""The schedules: orders in which a rank runs the forward and backward passes of the microbatches of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

from lightning_sm.errors import StrategyError
from lightning_sm.training.strategies.pipeline.placement import Placement
from lightning_sm.training.strategies.pipeline.trial import StageShapes

ScheduleName = Literal["gpipe", "1f1b", "looped_bfs", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"]

# With older versions of torch, a rank's stages may wait for each other in a circle on NCCL, and a rank cannot send to
# itself on Gloo: measured with 2.9.1 and 2.11.0.
SEVERAL_STAGES_SINCE = "2.14"
# Schedules to keep, each with the buffers of its shapes. Another one is made of known shapes without a forward pass.
_KEPT = 4


@dataclass(frozen=True)
class Schedule:
    """The needs of a schedule of torch.distributed.pipelining (measured with torch 2.14.1).

    Args:
        torch_name: Its name there.
        chunks: Stages on each rank; None: any number.
        splits_backward: Whether gradients of inputs and of weights are computed apart from each other.
        is_v_shaped: Whether its laps go back and forth, see ``Placement``.
        fits: Returns whether it can run m microbatches over p ranks with v stages each, called as ``fits(m, p, v)``.
        fallback: The schedule for numbers of microbatches that it cannot run.
    """

    torch_name: str
    chunks: int | None
    splits_backward: bool = False
    is_v_shaped: bool = False
    fits: Callable[[int, int, int], bool] = lambda m, p, v: True
    fallback: ScheduleName | None = None


def _in_rounds(m: int, p: int, v: int) -> bool:
    return m % max(1, m // p) == 0


SCHEDULES: Mapping[ScheduleName, Schedule] = {
    "gpipe": Schedule("GPipe", 1),
    "1f1b": Schedule("1F1B", 1, fits=lambda m, p, v: m >= p, fallback="gpipe"),
    "looped_bfs": Schedule("LoopedBFS", None),
    "interleaved": Schedule("Interleaved1F1B", None, fits=_in_rounds, fallback="looped_bfs"),
    "interleaved_zero_bubble": Schedule(
        "InterleavedZeroBubble", None, splits_backward=True, fits=_in_rounds, fallback="looped_bfs"
    ),
    "zbv": Schedule("ZBVZeroBubble", 2, splits_backward=True, is_v_shaped=True),
    "dualpipev": Schedule(
        "DualPipeV", 2, splits_backward=True, is_v_shaped=True, fits=lambda m, p, v: m >= 2 * p, fallback="zbv"
    ),
}


def chunks_of(name: ScheduleName, stated: int | None) -> int:
    """Return the number of stages on each rank.

    Args:
        name: The schedule.
        stated: ``chunks`` of the strategy.

    Raises:
        StrategyError: The schedule does not exist, or it needs a different number of stages per rank.
    """
    if name not in SCHEDULES:
        raise StrategyError(f"schedule={name!r} is not one of {', '.join(SCHEDULES)}.")
    needed = SCHEDULES[name].chunks
    if stated is not None and (stated < 1 or needed not in (None, stated)):
        needs = "at least 1 stage" if needed is None else f"{needed} stage{'' if needed == 1 else 's'}"
        several = ", ".join(other for other, schedule in SCHEDULES.items() if schedule.chunks is None)
        raise StrategyError(
            f"The strategy has chunks={stated}, but schedule={name} needs {needs} on each rank. Remove chunks, or "
            f"choose a schedule that takes any number: {several}."
        )
    return stated or needed or 2


def schedule_for(name: ScheduleName, microbatches: int, placement: Placement) -> Schedule:
    """Return the schedule that runs a number of microbatches: the one that was chosen, or its fallback.

    Args:
        name: The schedule that was chosen.
        microbatches: Number of microbatches.
        placement: The grid of ranks.
    """
    schedule = SCHEDULES[name]
    while not schedule.fits(microbatches, placement.pipeline_size, placement.chunks) and schedule.fallback is not None:
        schedule = SCHEDULES[schedule.fallback]
    return schedule


def separate_directions(device: torch.device) -> None:
    """Let torch's schedules send activations and gradients over two communicators on CUDA.

    NCCL runs the transfers of a communicator in the order of their calls, so that schedules with several stages on a
    rank could wait for each other in a circle (torch 2.14, ``torch/distributed/config.py``).

    Args:
        device: This rank's device.
    """
    if device.type == "cuda" and is_since(SEVERAL_STAGES_SINCE):
        from torch.distributed import config  # noqa: PLC0415 - torch 2.10 has none

        config.pipeline_per_direction_p2p = True


def is_since(version: str) -> bool:
    """Return whether torch is of a version, or newer.

    Args:
        version: The version.
    """
    return bool(TorchVersion(torch.__version__) >= version)


class ScheduleRunner:
    """A runner of training steps over the stages of this rank.

    Args:
        stages: This rank's modules by the number of the stage.
        placement: The grid of ranks.
        group: The ranks of this replica.
        device: This rank's device.
        name: The schedule.
        loss: Called on the rank of the last stage with the output of a microbatch and its number; returns its share of
            the batch's loss.
    """

    def __init__(  # noqa: PLR0917  # what a step needs
        self,
        stages: Mapping[int, nn.Module],
        placement: Placement,
        group: ProcessGroup,
        device: torch.device,
        name: ScheduleName,
        loss: Callable[[Any, int], Tensor],
    ) -> None:
        self._stages = stages
        self._placement = placement
        self._group = group
        self._device = device
        self._name = name
        self._loss = loss
        self._schedules: OrderedDict[Hashable, Any] = OrderedDict()
        self._shapes: dict[Hashable, Mapping[int, StageShapes]] = {}

    def knows(self, microbatches: int, shapes: Hashable) -> bool:
        """Return whether ``learn`` was called for the key; the same on all ranks of a replica.

        Args:
            microbatches: Number of microbatches.
            shapes: Key for the shapes of the activations.
        """
        return (microbatches, shapes) in self._shapes

    def learn(self, microbatches: int, shapes: Hashable, found: Mapping[int, StageShapes]) -> None:
        """Keep the shapes that a trial has found.

        Args:
            microbatches: Number of microbatches.
            shapes: Key for the shapes of the activations.
            found: Shapes by the number of this rank's stages.
        """
        self._shapes[microbatches, shapes] = found

    def inputs_of(self, microbatches: int, shapes: Hashable) -> tuple[Tensor, ...]:
        """Return the network's inputs for a microbatch, without data, on the rank of stage 0.

        Args:
            microbatches: Number of microbatches.
            shapes: Key for the shapes of the activations.
        """
        return self._shapes[microbatches, shapes][0].inputs

    def step(self, inputs: tuple[Any, ...], microbatches: int, shapes: Hashable) -> Any:
        """Run forward and backward passes, which leave the sum of the microbatches' gradients in ``.grad``.

        Args:
            inputs: The network's inputs for the whole batch on the rank of stage 0, else nothing.
            microbatches: Number of microbatches; it divides the rows of the batch.
            shapes: Key for the shapes of the activations, which ``learn`` was called for.

        Returns:
            The network's output for the whole batch on the rank of the last stage, else None.
        """
        schedule = self._schedule(microbatches, shapes)
        is_last = self._placement.num_stages - 1 in self._stages
        # The schedule splits only tensors. Give it the microbatches' numbers, by which the loss finds its rows.
        target = torch.arange(microbatches) if is_last else None
        return schedule.step(*inputs, target=target)

    def _schedule(self, microbatches: int, shapes: Hashable) -> Any:
        # Imported here, so that scripts with another strategy need not wait 0.2 s for it.
        from torch.distributed.pipelining import PipelineStage  # noqa: PLC0415
        from torch.distributed.pipelining.schedules import (  # noqa: PLC0415
            PipelineScheduleSingle,
            get_schedule_class,
        )

        key = (microbatches, shapes)
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        schedule = schedule_for(self._name, microbatches, self._placement)
        num_stages = self._placement.num_stages
        # The stage objects, not the modules, hold the shapes of the activations.
        stages = [
            PipelineStage(
                module,
                stage,
                num_stages,
                self._device,
                input_args=self._shapes[key][stage].inputs,
                output_args=self._shapes[key][stage].outputs,
                group=self._group,
            )
            for stage, module in sorted(self._stages.items())
        ]
        kind = get_schedule_class(schedule.torch_name)
        argument = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        self._schedules[key] = kind(
            argument, microbatches, loss_fn=lambda output, i: self._loss(output, int(i)), scale_grads=False
        )
        if len(self._schedules) > _KEPT:
            self._schedules.popitem(last=False)
        return self._schedules[key]
