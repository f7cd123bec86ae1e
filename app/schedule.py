"""The learning rate of the example models: a linear rise, then half a cosine down to zero."""

from __future__ import annotations

import math
from functools import partial

from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# The share of all steps in which the learning rate rises; then it falls to zero along a half cosine.
_WARMUP_FRACTION = 0.2


def with_schedule(optimizer: Optimizer, num_steps: float) -> OptimizerLRSchedulerConfig:
    """Combine an optimizer and its schedule, which is stepped after every batch, as ``configure_optimizers`` returns.

    Args:
        optimizer: The optimizer, with the highest learning rate of the run.
        num_steps: Number of optimizer steps over all hosts and epochs, or infinity for a constant learning rate.
    """
    # torch's OneCycleLR would do the same, but fails in the first step after the number of steps that its checkpoint
    # contains, hence in every run that resumes with more epochs or fewer hosts.
    scheduler = LambdaLR(optimizer, partial(learning_rate_factor, num_steps=num_steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learning_rate_factor(step: int, num_steps: float) -> float:
    """Compute the factor of the learning rate: a linear rise, then half a cosine down to zero.

    Args:
        step: Number of optimizer steps done.
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
