"""The slot that a worker fills: what is allocated in it, and what is copied there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_sm.errors import BatchTooLargeError

_ALIGNMENT = 64


class Leaf(NamedTuple):
    """Memory of a tensor or array, and the node that waits for its offset."""

    node: list[Any]
    owner: Any
    address: int
    span: int  # from its first to its last byte
    size: int  # of its elements: less than the span when there are gaps, more when they overlap
    alignment: int = 1


class Arena:
    """A slot of shared memory that is filled from the front, batch after batch.

    Args:
        buffer: The slot: writable, contiguous uint8 with one dimension.
    """

    def __init__(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._memory = buffer.data
        self._address = buffer.ctypes.data
        self._capacity = len(self._memory)
        self._used = 0

    @property
    def used(self) -> int:
        """How many bytes of the slot the batch takes."""
        return self._used

    def reset(self, used: int = 0) -> None:
        """Forget what was allocated, before the next batch is made.

        Args:
            used: How many of the first bytes stay allocated.
        """
        self._used = used

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the next bytes of the slot, starting at a multiple of 64.

        Args:
            nbytes: How many bytes.

        Raises:
            BatchTooLargeError: The slot has no room for them.
        """
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self._capacity:
            raise BatchTooLargeError(
                f"A batch needs {start + nbytes} bytes or more, but a slot has {self._capacity}. Raise max_batch_bytes."
            )
        self._used = start + nbytes
        return np.frombuffer(self._memory, np.uint8, nbytes, start) if nbytes else np.empty(0, np.uint8)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return where memory lies in the allocated part of the slot, or None when it lies elsewhere.

        Args:
            address: The memory's first byte.
            nbytes: How many bytes it has.
        """
        offset = address - self._address
        return offset if 0 <= offset <= self._used - nbytes else None

    def _store(self, address: int, nbytes: int) -> int:
        """Copy memory into the slot and return its offset there.

        Args:
            address: The memory's first byte; whoever calls keeps its owner alive.
            nbytes: How many bytes to copy.

        Raises:
            BatchTooLargeError: The slot has no room for them.
        """
        self.allocate(nbytes)
        offset = self._used - nbytes
        # Releases the GIL, and does not care whether the memory belongs to torch, NumPy or a bytes object.
        ctypes.memmove(self._address + offset, address, nbytes)
        return offset

    def place(self, leaves: Iterable[Leaf]) -> None:
        """Find a place for every leaf and write it into the leaf's node. What lies in the slot already stays there.

        Leaves whose memory overlaps share it in the slot as well, unless separate copies took less room.

        Args:
            leaves: All leaves of a batch.

        Raises:
            BatchTooLargeError: The slot has no room for them.
        """
        numbered = list(enumerate(leaves))
        groups = [[item] for item in numbered if item[1].span < item[1].size]
        end = 0
        movable = (item for item in numbered if item[1].span >= item[1].size)
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
        start, size = group[0].address, sum(leaf.size for leaf in group)
        span = max(leaf.address + leaf.span for leaf in group) - start
        offset = self.offset_of(start, span)
        aligned = all(((offset or 0) + leaf.address - start) % leaf.alignment == 0 for leaf in group)
        if aligned and group[0].size <= span <= size:
            offset = self._store(start, span) if offset is None else offset
            for leaf in group:
                leaf.node[1] = offset + leaf.address - start
        elif len(group) > 1:
            for leaf in group:
                self._place_together([leaf])
        else:
            self._copy(group[0])

    def _copy(self, leaf: Leaf) -> None:
        view = self.allocate(leaf.size)
        leaf.node[1], leaf.node[4] = self._used - leaf.size, None
        owner = leaf.owner
        if not isinstance(owner, torch.Tensor):
            np.copyto(np.ndarray(owner.shape, owner.dtype, view), owner)
            return
        # As bytes where possible: torch cannot copy its integers of less than eight bits.
        source = owner.detach().view(torch.uint8) if owner.element_size() == 1 else owner.detach()
        torch.frombuffer(view, dtype=source.dtype).view(source.shape).copy_(source)
