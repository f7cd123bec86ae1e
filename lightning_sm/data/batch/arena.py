"""The slot that a worker fills: allocating memory in it, and copying tensors and arrays to it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_sm.errors import BatchTooLargeError

ALIGNMENT = 64


class Leaf(NamedTuple):
    """Memory of a tensor or array, and the header node that gets its offset."""

    node: list[Any]
    owner: Any
    address: int
    span: int  # bytes from the first to the last
    size: int  # bytes of all elements: less than the span if there are gaps, more if elements overlap
    alignment: int = 1


class Arena:
    """A slot of shared memory that is filled from the front, batch after batch.

    Args:
        buffer: The slot: writable, contiguous uint8 with one dimension.

    Attributes:
        used: Bytes of the slot that are allocated.
    """

    def __init__(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._memory = buffer.data
        self._address = buffer.ctypes.data
        self._capacity = len(self._memory)
        self.used = 0

    def reset(self, used: int = 0) -> None:
        """Free all but the first ``used`` bytes."""
        self.used = used

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the next bytes of the slot, uint8 of shape (nbytes,), starting at a multiple of 64.

        Raises:
            BatchTooLargeError: The slot has no room for them.
        """
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self._capacity:
            raise BatchTooLargeError(
                f"A batch needs at least {start + nbytes} bytes, but a slot has {self._capacity}. Raise "
                "data_service.max_batch_bytes."
            )
        ctypes.memset(self._address + self.used, 0, start - self.used)  # equal batches have equal bytes
        self.used = start + nbytes
        return np.frombuffer(self._memory, np.uint8, nbytes, start) if nbytes else np.empty(0, np.uint8)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset of memory that lies in the allocated part of the slot, or None for other memory."""
        offset = address - self._address
        return offset if 0 <= offset <= self.used - nbytes else None

    def place(self, leaves: Iterable[Leaf]) -> None:
        """Copy all leaves of a batch to the slot, unless they lie there already, and write the offsets to their nodes.

        Leaves whose memory overlaps also share it in the slot, unless separate copies need less room.

        Raises:
            BatchTooLargeError: The slot has no room for them.
        """
        numbered = list(enumerate(leaves))
        # The elements of these overlap, or their order in memory is not that of the array: each gets a copy of its own.
        groups = [[item] for item in numbered if item[1].span < item[1].size]
        movable = [item for item in numbered if item[1].span >= item[1].size]
        end = 0
        for number, leaf in sorted(movable, key=lambda item: item[1].address):
            if leaf.address < end:
                groups[-1].append((number, leaf))
            else:
                groups.append([(number, leaf)])
            end = max(end, leaf.address + leaf.span)
        # In the order of the batch, not of the addresses: then batches of equal shapes have equal headers.
        for group in sorted(groups, key=lambda group: min(number for number, _ in group)):
            self._place_together([leaf for _, leaf in group])

    def _place_together(self, group: list[Leaf]) -> None:
        start = group[0].address
        size = sum(leaf.size for leaf in group)
        span = max(leaf.address + leaf.span for leaf in group) - start
        offset = self.offset_of(start, span)
        aligned = all(((offset or 0) + leaf.address - start) % leaf.alignment == 0 for leaf in group)
        if aligned and group[0].size <= span <= size:
            if offset is None:
                self.allocate(span)
                offset = self.used - span
                # It releases the GIL, and copies the memory of torch, NumPy and bytes objects alike.
                ctypes.memmove(self._address + offset, start, span)
            for leaf in group:
                leaf.node[1] = offset + leaf.address - start
        elif len(group) > 1:
            for leaf in group:
                self._place_together([leaf])
        else:
            self._copy(group[0])

    def _copy(self, leaf: Leaf) -> None:
        view = self.allocate(leaf.size)
        leaf.node[1] = self.used - leaf.size
        leaf.node[4] = None  # the copy is contiguous
        owner = leaf.owner
        if not isinstance(owner, torch.Tensor):
            np.copyto(np.ndarray(owner.shape, owner.dtype, view), owner)
            return
        # As bytes where possible: torch cannot copy integers of fewer than eight bits.
        source = owner.detach().view(torch.uint8) if owner.element_size() == 1 else owner.detach()
        torch.frombuffer(view, dtype=source.dtype).view(source.shape).copy_(source)
