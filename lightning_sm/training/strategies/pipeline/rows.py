"""The tensors of a batch, and their number of rows (dimension 0)."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sm.errors import StrategyError


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists, mappings or dataclasses, nested in any way."""
    found: list[Tensor] = []
    apply_to_collection(values, Tensor, found.append)
    return found


def num_rows(batch: Any) -> int:
    """Return the length of dimension 0 of a batch's tensors.

    Args:
        batch: The batch.

    Raises:
        StrategyError: The batch has no tensor with rows, or its tensors differ in length.
    """
    lengths = {len(tensor) for tensor in tensors_of(batch) if tensor.ndim}
    if len(lengths) != 1 or 0 in lengths:
        found = f"tensors of {', '.join(map(str, sorted(lengths)))} rows" if lengths else "no tensor with rows"
        raise StrategyError(
            f"In a pipeline, the tensors of a batch must have one row per sample (dimension 0), but the batch "
            f"({type(batch).__name__}) has {found}. Keep what does not depend on the sample in the LightningModule."
        )
    return lengths.pop()
