"""An exchange of values among all ranks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def of_all_ranks(value: T) -> list[T]:
    """Return the value of each rank; without a process group, only this rank's. A collective call."""
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
