"""An exchange of values among all ranks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def of_all_ranks(value: T, group: Any = None) -> list[T]:
    """Return the value of each rank, or of those in a group; without process groups, only this rank's value.

    A collective call of these ranks.

    Args:
        value: The value of this rank.
        group: The process group; None for all ranks.
    """
    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group)
    return values
