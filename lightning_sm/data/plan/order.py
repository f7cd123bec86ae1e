"""The order of the samples of a pass, evaluated only where it is asked for. Pure rules over numbers."""

from __future__ import annotations

import hashlib
import math
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_sm.data.plan.seeds import encode_key
from lightning_sm.data.plan.splitmix import mixed

IndexArray: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]

_32 = np.uint64(32)
# With 8 rounds, orders of 5 to 7 samples are visibly not equally frequent.
_NUM_ROUNDS = 12


class Order(Protocol):
    """The sample index at each position of a pass; an array of indices is one, too."""

    def __len__(self) -> int:
        """Return the number of positions."""

    def __getitem__(self, positions: IndexArray, /) -> IndexArray:
        """Return the sample indices at some positions, int64 of the same shape."""


class SequentialOrder:
    """``range(length)``.

    Args:
        length: Number of samples.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, positions: IndexArray, /) -> IndexArray:
        """Return the sample indices at some positions: the positions."""
        return positions


class ShuffledOrder:
    """``range(length)``, shuffled: the same in every process, on every host, under every version of NumPy.

    It needs neither memory nor time before the first batch, however many samples there are: the index at each position
    is computed from the position. Positions are cells of a table with ``rows * columns >= length``, both about the
    square root of the length. In each of 12 rounds, the row moves by a hash of the column, or the column by one of the
    row: a Feistel network over two remainders (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), so a
    bijection of the table. An index that is not below the length, at most one of a row more, goes through it again
    until it is. The hash is SplitMix64's, with a key for each round from SHAKE256 over what names the pass.

    Args:
        length: Number of samples.
        seed: Seed of the run.
        epoch: Epoch of the trainer.
        pass_index: Counts passes over the same loader within one epoch.
        salt: Tells apart loaders that must not share an order.
    """

    def __init__(self, length: int, *, seed: int, epoch: int, pass_index: int = 0, salt: str = "") -> None:
        self._length = length
        name = encode_key(["lightning_sm.order", int(seed), int(epoch), int(pass_index), salt])
        keys = np.frombuffer(hashlib.shake_256(name).digest(8 * _NUM_ROUNDS), "<u8")
        self._keys = keys.astype(np.uint64).reshape(-1, 2)
        root = math.isqrt(length)
        num_rows = root + (root * root < length)
        self._rows = np.uint64(num_rows)
        self._columns = np.uint64(-(-length // max(1, num_rows)))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, positions: IndexArray, /) -> IndexArray:
        """Return the sample indices at some positions."""
        values = self._permute(positions.astype(np.uint64))
        while (outside := np.flatnonzero(values >= self._length)).size:
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64)

    def _permute(self, cells: _Words) -> _Words:
        row, column = np.divmod(cells, self._columns)
        for first, second in self._keys:
            row = _move(row, column, first, self._rows)
            column = _move(column, row, second, self._columns)
        return row * self._columns + column


def _move(value: _Words, by: _Words, key: np.uint64, size: np.uint64) -> _Words:
    """Add a keyed hash of one array to the other, modulo a size below 2 ** 32."""
    value = value + ((mixed(by, key) >> _32) * size >> _32)  # its high half, scaled to the size
    moved: _Words = np.minimum(value, value - size)  # the difference of a value that is below the size wraps around
    return moved
