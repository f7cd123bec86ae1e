"""The learning rate schedule of the example models: linear warmup, then half a cosine down to zero."""

from __future__ import annotations

import math
from functools import partial

from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# Share of all steps in which the learning rate rises.
_WARMUP_FRACTION = 0.2


def with_schedule(optimizer: Optimizer, num_steps: float) -> OptimizerLRSchedulerConfig:
    """Give an optimizer a schedule that advances after every batch, in the form that ``configure_optimizers`` returns.

    Args:
        optimizer: The optimizer, set to the highest learning rate of the run.
        num_steps: Number of optimizer steps over all hosts and epochs, or infinity for a constant learning rate.
    """
    # torch's OneCycleLR has this shape too, but its checkpoint stores the total number of steps and a step beyond it
    # raises an error. A run that resumes with more epochs or fewer hosts would always fail.
    scheduler = LambdaLR(optimizer, partial(learning_rate_factor, num_steps=num_steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learning_rate_factor(step: int, num_steps: float) -> float:
    """Compute the factor of the learning rate at a step.

    Args:
        step: Number of optimizer steps taken so far.
        num_steps: Number of optimizer steps of the whole run, or infinity for a constant factor.

    Returns:
        A number from 0 to 1; 0 after the last step.
    """
    if math.isinf(num_steps):
        return 1.0
    if step >= num_steps:
        return 0.0
    num_warmup_steps = max(1, round(_WARMUP_FRACTION * num_steps))
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))
