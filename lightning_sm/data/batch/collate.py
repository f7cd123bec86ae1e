"""A ``default_collate`` that stacks samples directly in a worker's slot.

Stacking into reused memory is several times faster than into new memory, whose pages the kernel must provide first
(25.7 MB: 3.6 ms instead of 26.5 ms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from lightning_sm.data.batch.arena import Arena


def collate_into(collate_fn: Callable[[Sequence[Any]], Any], samples: Sequence[Any], arena: Arena) -> Any:
    """Collate samples, in the arena if the collate function is ``torch.utils.data.default_collate``.

    The result is what a ``DataLoader`` worker would return, and is valid until its memory is reused. A user's collate
    function allocates its result elsewhere; ``pickle_batch`` copies it to the arena.

    Raises:
        BatchTooLargeError: The batch does not fit into the arena.
    """
    if collate_fn is not default_collate:
        return collate_fn(samples)
    # Copy torch's map for each batch: users may extend it at any time.
    collate_fn_map = dict(default_collate_fn_map)
    if collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
        collate_fn_map[torch.Tensor] = partial(_stack, arena)
    return collate(samples, collate_fn_map=collate_fn_map)


def _stack(arena: Arena, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    if _is_stackable(tensors):
        first = tensors[0]
        used = arena.used
        memory = arena.allocate(len(tensors) * first.numel() * first.element_size())
        out = torch.frombuffer(memory, dtype=first.dtype).view(len(tensors), *first.shape)
        # This raises if shapes differ or a tensor requires gradients. collate_tensor_fn below handles both.
        with suppress(RuntimeError):
            return torch.stack(tuple(tensors), 0, out=out)
        arena.used = used
    stacked: torch.Tensor = collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
    return stacked


def _is_stackable(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether ``torch.stack(out=...)`` either raises or returns the same result as without ``out``.

    The checks are cheap and make a single pass; further checks would take longer than stacking 2048 small samples.
    """
    first = tensors[0]
    dtype = first.dtype
    return (
        first.layout == torch.strided
        and not first.is_nested
        and not first.is_quantized
        and first.device.type == "cpu"
        and first.numel() > 0
        # With out=, torch casts tensors to the first one's dtype instead of promoting them to a common dtype.
        and all(type(tensor) is torch.Tensor and tensor.dtype is dtype for tensor in tensors)
    )
