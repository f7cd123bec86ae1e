"""Batches as pickles in a slot of shared memory, with the memory of tensors and arrays beside them, not copied again.

A batch is what any worker of ``DataLoader`` may return. Its pickle (protocol 5) lies behind the memory that it refers
to; the structure says where both are.
"""

from __future__ import annotations

import io
import pickle
import struct
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from lightning_sm.data.batch.arena import Arena
from lightning_sm.errors import BatchTooLargeError, BatchTypeError, WireError

# Start and size: of the pickle first, then of each buffer.
_PLACE = struct.Struct("<QQ")

# Smaller buffers stay in the pickle: a place and a copy of their own would cost more than they save.
_MIN_BUFFER_BYTES = 256

# A tensor travels with the whole storage that it is a view of, so that tensors that share memory still do, unless the
# storage is so many times larger.
_MAX_STORAGE_FACTOR = 2

# What pickle raises for objects that have no name, or that cannot be pickled at all.
_CANNOT_PICKLE = (pickle.PicklingError, AttributeError, TypeError)

_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

# The dtypes that NumPy has, too.
NUMPY_DTYPES = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)


def pickle_batch(batch: Any, arena: Arena) -> bytes:
    """Copy a batch to a slot, and return the structure from which ``unpickle_batch`` rebuilds it.

    Tensors that lie in the slot already are not copied.

    Args:
        batch: What the collate function returned.
        arena: The slot.

    Raises:
        BatchTypeError: Something in it cannot be pickled.
        BatchTooLargeError: The slot has no room for it.
    """
    used = arena.used
    try:
        try:
            return _pickle(batch, arena, _BatchPickler)
        except _CANNOT_PICKLE:  # it may be of a class that has no name here, which takes twice as long
            arena.reset(used)
            return _pickle(batch, arena, _ByValuePickler)
    except BatchTooLargeError:
        raise
    except Exception as error:
        raise BatchTypeError(
            f"A batch cannot be pickled: {error}. Data hosts send what the collate function returns, as workers of "
            "DataLoader do: return tensors, arrays, and objects that pickle accepts."
        ) from error


def _pickle(batch: Any, arena: Arena, pickler: type[pickle.Pickler]) -> bytes:
    file = io.BytesIO()
    places: list[tuple[int, int]] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        size = raw.nbytes
        if size < _MIN_BUFFER_BYTES:
            return True
        array = np.frombuffer(raw, np.uint8)
        start = arena.offset_of(array.ctypes.data, size)
        if start is None:
            arena.allocate(size)[:] = array
            start = arena.used - size
        places.append((start, size))
        return False

    pickler(file, protocol=5, buffer_callback=take).dump(batch)
    head = file.getbuffer()
    arena.allocate(head.nbytes)[:] = np.frombuffer(head, np.uint8)
    return b"".join(_PLACE.pack(*place) for place in [(arena.used - head.nbytes, head.nbytes), *places])


def unpickle_batch(structure: bytes, data: npt.NDArray[np.uint8]) -> Any:
    """Rebuild a batch. Its large tensors and arrays are views of ``data``, and keep that object itself alive.

    Only for batches of this job's own data hosts: a pickle can do anything, and nothing here checks who sent it. The
    trainer's end of gRPC has: it takes no message of a server that has not proved the token (``grpc_client._confirm``).

    Args:
        structure: What ``pickle_batch`` returned.
        data: The bytes of the slot: writable, uint8 with one dimension.

    Raises:
        WireError: The structure does not fit the bytes.
    """
    memory = data.data  # its slices keep ``data`` alive; those of an array would keep only what that is a view of
    parts = []
    try:
        for start, size in _PLACE.iter_unpack(structure):
            if start + size > data.nbytes:
                raise WireError(f"A part of a batch lies at bytes {start} to {start + size} of {data.nbytes}.")
            parts.append(memory[start : start + size])
    except struct.error as error:
        raise WireError(f"The structure of a batch has {len(structure)} bytes.") from error
    if not parts:
        raise WireError("The structure of a batch is empty.")
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # see above


class _Reducer:
    """How tensors and storages are pickled: their memory is an array, which NumPy leaves out of band."""

    def __init__(self) -> None:
        self._arrays: dict[int, npt.NDArray[Any]] = {}  # by address: all of a storage

    def reduce(self, obj: Any) -> Any:
        """Return how an object is pickled; ``NotImplemented``: as it says itself."""
        if type(obj) is torch.Tensor:
            if _is_plain(obj):
                return self._reduce_tensor(obj)
            return _reduce_sparse(obj) if obj.layout in _SPARSE_LAYOUTS and not obj.requires_grad else NotImplemented
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return _storage_of, (self._array_of(obj),)
        if isinstance(obj, torch.storage.TypedStorage):
            untyped = obj._untyped_storage
            if untyped.device.type == "cpu":
                return _typed_storage_of, (self._array_of(untyped), obj.dtype)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        size, own = storage.nbytes(), tensor.nbytes
        address = storage.data_ptr()
        if size == own and address not in self._arrays and tensor.dtype in NUMPY_DTYPES and tensor.is_contiguous():
            array = self._arrays[address] = tensor.numpy()
            return torch.from_numpy, (array,)
        if size > _MAX_STORAGE_FACTOR * own:
            with suppress(NotImplementedError):  # of a dtype that torch cannot copy, such as int4
                tensor = tensor.clone(memory_format=torch.preserve_format)
                storage = tensor.untyped_storage()
        layout = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return _tensor_of, (self._array_of(storage), *layout)

    def _array_of(self, storage: torch.UntypedStorage) -> npt.NDArray[Any]:
        address = storage.data_ptr()
        if address not in self._arrays or not address:  # all empty storages have none
            array: npt.NDArray[Any] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._arrays[address] = array
        return self._arrays[address]


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    """Return how a sparse tensor is pickled.

    Not as torch does it: what that rebuilds stays in memory until the next ``torch.load``, which checks all of it.
    """
    if tensor.layout is torch.sparse_coo:
        return _coo_of, (tensor._indices(), tensor._values(), tuple(tensor.shape), tensor.is_coalesced())
    is_by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = tensor.crow_indices() if is_by_row else tensor.ccol_indices()
    plain = tensor.col_indices() if is_by_row else tensor.row_indices()
    return _compressed_of, (compressed, plain, tensor.values(), tuple(tensor.shape), tensor.layout)


class _BatchPickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduce = _Reducer().reduce

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object that is not built in is pickled."""
        return self._reduce(obj)


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type information
    """Sends back by value what has come by value, as the classes of a script that the data host has not run.

    The trainer finds its own classes again: cloudpickle knows them by a number.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduce = _Reducer().reduce

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object that is not built in is pickled."""
        reduced = self._reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than a view of bytes."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


def _storage_of(array: npt.NDArray[Any]) -> torch.UntypedStorage:
    return torch.from_numpy(array).untyped_storage()


def _typed_storage_of(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.storage.TypedStorage:
    make: Any = torch.storage.TypedStorage
    storage: torch.storage.TypedStorage = make(wrap_storage=_storage_of(array), dtype=dtype, _internal=True)
    return storage


def _tensor_of(
    array: npt.NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    # A view: where algorithms are to be deterministic, torch.empty() fills, and does not for every dtype.
    new: Any = torch.empty(0, dtype=torch.uint8).view(dtype)
    tensor: torch.Tensor = new.set_(_storage_of(array), offset, shape, stride)
    return tensor


def _coo_of(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool) -> torch.Tensor:
    make: Any = torch.sparse_coo_tensor
    tensor: torch.Tensor = make(indices, values, shape, check_invariants=False, is_coalesced=is_coalesced)
    return tensor


def _compressed_of(
    compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    make: Any = torch.sparse_compressed_tensor
    tensor: torch.Tensor = make(compressed, plain, values, shape, layout=layout, check_invariants=False)
    return tensor
