"""The values of ``self.log``, reduced over ranks that have different numbers of samples."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from lightning_sm._lightning import ResultMetric


class ExactResultMetric(ResultMetric):
    """A logged value whose mean and sum over the ranks are those of one rank with all their samples.

    Lightning's own class expects batches of equal sizes on all ranks: it takes the mean of their batch sizes as an
    integer, and the plain mean of what is logged in a step. Values without ``sync_dist``, or of a ``sync_dist_group``,
    and metrics of torchmetrics stay as they are.

    Attributes:
        weight: Weight of this rank's batch, see ``plan.samples.Tail``.
    """

    weight: ClassVar[float] = 1.0

    def update(self, value: Any, batch_size: int) -> None:
        """Add a value.

        Args:
            value: The value: a tensor, or a metric of torchmetrics.
            batch_size: Weight of the value within the values of this rank.
        """
        weight = self.weight if self._is_weighted else 1.0
        if weight == 0.0:
            super().update(torch.zeros_like(value), 0)
        elif weight == 1.0 or not (self.meta.on_step and self.meta.is_mean_reduction):
            super().update(value, batch_size)
        else:
            value = value.to(torch.promote_types(value.dtype, self.value.dtype))
            of_epoch = self.value + value * batch_size
            super().update(value * weight, batch_size)
            if self.meta.on_epoch:
                self.value = of_epoch

    def compute(self) -> torch.Tensor:
        """Return the value of the epoch."""
        if not (self.is_tensor and self.meta.is_mean_reduction):
            return super().compute()
        total = self.meta.sync(self.value.clone())  # it is reduced in place
        # A mean of integers would be rounded down.
        count = self.meta.sync(self.cumulated_batch_size.to(total.dtype))
        return torch.div(total, count)

    @property
    def _is_weighted(self) -> bool:
        sync, meta = self.meta.sync, self.meta
        is_reduced = self.is_tensor and sync.should and not sync.rank_zero_only and sync.group is None
        # The largest and the smallest value are the same, however often a sample repeats.
        return is_reduced and not (meta.is_max_reduction or meta.is_min_reduction)
