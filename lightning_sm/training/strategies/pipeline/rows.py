"""Functions that cut the rows of a batch (dimension 0) into microbatches."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sm.errors import StrategyError

_Plain = (str, bytes, int, float, bool, type(None))


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
        numbers = ", ".join(map(str, sorted(lengths)))
        found = f"tensors of {numbers} rows (dimension 0)" if lengths else "no tensor with rows"
        raise StrategyError(
            f"A pipeline cuts batches into microbatches along dimension 0, but the batch ({type(batch).__name__}) has "
            f"{found}. Return tensors with one row per sample; keep what does not depend on the sample in the "
            "LightningModule."
        )
    return lengths.pop()


def rows_of(batch: Any, rows: int, part: slice) -> Any:
    """Return some rows of a batch in the same structure.

    Lists with one string or number per row, such as those that ``default_collate`` makes from strings, are cut, too.

    Args:
        batch: The batch.
        rows: Its number of rows.
        part: The rows to return.
    """

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[part] if value.ndim else value
        if len(value) == rows and all(isinstance(item, _Plain) for item in value):
            return value[part]
        items = [rows_of(item, rows, part) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    return apply_to_collection(batch, (Tensor, list, tuple), cut)


def same_tensors(batch: Any) -> Any:
    """Return a batch with the same tensors in new lists and mappings, which keep what a step takes out of its own."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor)


def versions_of(batch: Any) -> list[int]:
    """Return torch's version of each tensor in a batch, which changes when the tensor is changed in place."""
    return [tensor._version for tensor in tensors_of(batch)]


def num_microbatches(rows: int, wanted: int) -> int:
    """Return the largest possible number of equal microbatches up to ``wanted``: schedules need equal shapes."""
    return max(number for number in range(1, min(rows, wanted) + 1) if rows % number == 0)
