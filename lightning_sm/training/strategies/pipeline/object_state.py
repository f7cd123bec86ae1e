"""A digest of an object, which differs once the object has been changed in place."""

from __future__ import annotations

import hashlib
import pickle
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

_MAX_BYTES = 4 << 20  # what takes longer to read than a step can wait is not looked at


def object_state(value: object) -> bytes | None:
    """Return a digest of all that an object refers to; None: it cannot be told.

    Tensors count by their versions and arrays by their bytes.

    Args:
        value: Any object.
    """
    digest = _Digest()
    try:
        _DigestPickler(digest, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # noqa: BLE001  # any code of the object's own may run here
        return None
    return digest.digest()


class _TooLargeError(Exception):
    """The object has more bytes than are looked at."""


class _Digest:
    """A file that keeps a digest of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._num_bytes = 0

    def write(self, data: Any) -> None:
        """Add bytes."""
        self._num_bytes += memoryview(data).nbytes
        if self._num_bytes > _MAX_BYTES:
            raise _TooLargeError
        self._hash.update(data)

    def digest(self) -> bytes:
        """Return the digest."""
        return self._hash.digest()


class _DigestPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return tuple, ([id(obj), 0 if obj.is_inference() else obj._version],)
        if isinstance(obj, np.ndarray) and obj.nbytes > _MAX_BYTES:
            raise _TooLargeError
        if isinstance(obj, (nn.Module, FunctionType)):
            return tuple, ([id(obj), obj._update_count if isinstance(obj, Metric) else 0],)
        return NotImplemented
