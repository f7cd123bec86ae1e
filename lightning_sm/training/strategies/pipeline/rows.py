"""The rows of a batch, which are cut into microbatches along dimension 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_sm.errors import StrategyError

_Plain = (str, bytes, int, float, bool, type(None))


def num_rows(batch: Any) -> int:
    """Return the length of dimension 0 of a batch's tensors.

    Args:
        batch: Tensors in tuples, lists, mappings or dataclasses, nested in any way.

    Raises:
        StrategyError: The batch has no tensor with rows, or its tensors differ in length.
    """
    lengths = {len(tensor) for tensor in tensors_of(batch) if tensor.ndim}
    if len(lengths) != 1 or 0 in lengths:
        numbers = ", ".join(map(str, sorted(lengths)))
        found = f"tensors of {numbers} rows (dimension 0)" if lengths else "no tensor with rows"
        raise StrategyError(
            f"A pipeline cuts batches into microbatches along dimension 0, but the batch ({type(batch).__name__}) has "
            f"{found}. Return tensors with one row for each sample; what does not depend on the sample belongs in "
            "the LightningModule."
        )
    return lengths.pop()


def rows_of(batch: Any, rows: int, part: slice) -> Any:  # noqa: PLR0911  # one for each structure
    """Return some rows of a batch, in the same structure.

    A list of one text or number per row, such as ``default_collate`` makes of texts, is cut, too.

    Args:
        batch: The batch.
        rows: Its number of rows.
        part: The rows.
    """
    if isinstance(batch, Tensor):
        return batch[part] if batch.ndim else batch
    if isinstance(batch, (list, tuple)):
        if len(batch) == rows and all(isinstance(item, _Plain) for item in batch):
            return batch[part]
        items = [rows_of(item, rows, part) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, dict):
        # Copy first, to keep what a subclass has besides items, such as a default factory.
        taken = batch.copy()
        taken.update({key: rows_of(value, rows, part) for key, value in batch.items()})
        return taken
    if isinstance(batch, Mapping):
        return type(batch)({key: rows_of(value, rows, part) for key, value in batch.items()})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **{name: rows_of(value, rows, part) for name, value in fields.items()})
    return batch


def num_microbatches(rows: int, wanted: int) -> int:
    """Return the largest number of equal microbatches up to ``wanted``: the shapes of a schedule are fixed."""
    return max(number for number in range(1, min(rows, wanted) + 1) if rows % number == 0)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in the order of its structure.

    Args:
        batch: Tensors in tuples, lists, mappings or dataclasses, nested in any way.
    """
    if isinstance(batch, Tensor):
        yield batch
        return
    items: Iterable[Any] = ()
    if isinstance(batch, (list, tuple)):
        items = batch
    elif isinstance(batch, Mapping):
        items = batch.values()
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    for item in items:
        yield from tensors_of(item)
