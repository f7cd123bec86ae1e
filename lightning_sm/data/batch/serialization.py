"""Batches pickled into a slot of shared memory, with tensors and arrays out of band, so that they are not copied again.

A batch is anything that a ``DataLoader`` worker may return. The slot holds the memory of the batch's tensors and
arrays, then the pickle (protocol 5). The structure lists where each of these parts is.
"""

from __future__ import annotations

import io
import pickle
import struct
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.script_classes import without_changes
from lightning_sm.errors import BatchTooLargeError, BatchTypeError, WireError

# An entry of the structure: the start and size of a part. The first entry is the pickle's, the others the buffers'.
_PLACE = struct.Struct("<QQ")

# Smaller buffers stay in the pickle: storing them out of band would cost more than it saves.
_MIN_BUFFER_BYTES = 256

# Send a tensor's whole storage, so that tensors that share it still do on arrival, unless the storage is more than
# this many times as large as the tensor, and no earlier tensor of the batch has sent it.
_MAX_STORAGE_FACTOR = 2

# Raised by pickle for objects that it cannot find by name, or cannot pickle at all.
_CANNOT_PICKLE = (pickle.PicklingError, AttributeError, TypeError)

_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

# The dtypes that NumPy also has.
NUMPY_DTYPES = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)


def pickle_batch(batch: Any, arena: Arena) -> bytes:
    """Copy a batch to a slot, and return the structure from which ``unpickle_batch`` rebuilds it.

    Tensors that are already in the slot are not copied.

    Args:
        batch: The result of the collate function.
        arena: The slot.

    Raises:
        BatchTypeError: Part of the batch cannot be pickled.
        BatchTooLargeError: The batch does not fit into the slot.
    """
    used = arena.used
    try:
        try:
            return _pickle(batch, arena, _BatchPickler)
        except _CANNOT_PICKLE:  # pickling by value takes twice as long, but needs no names
            arena.used = used
            return _pickle(batch, arena, _ByValuePickler)
    except BatchTooLargeError:
        raise
    except Exception as error:
        raise BatchTypeError(
            f"A batch cannot be pickled: {error}. Like DataLoader workers, data hosts pickle what the collate "
            "function returns. It must return tensors, arrays, and objects that pickle accepts."
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
    """Rebuild a batch. Its large tensors and arrays are views of ``data``, and keep ``data`` itself alive.

    Pass only batches from this job's data hosts: unpickling can run any code, and nothing here checks the sender. The
    gRPC client rejects messages from servers that have not proved that they know the token (``grpc_client._confirm``).

    Args:
        structure: The result of ``pickle_batch``.
        data: The bytes of the slot, as a writable, one-dimensional uint8 array.

    Raises:
        WireError: The structure does not match the bytes.
    """
    memory = data.data  # slices of this keep ``data`` alive; slices of ``data`` itself would keep only its base
    parts = []
    try:
        for start, size in _PLACE.iter_unpack(structure):
            if start + size > data.nbytes:
                raise WireError(f"Part of a batch is at bytes {start} to {start + size} of only {data.nbytes}.")
            parts.append(memory[start : start + size])
    except struct.error as error:
        raise WireError(f"The structure of a batch has an invalid size: {len(structure)} bytes.") from error
    if not parts:
        raise WireError("The structure of a batch is empty.")
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  # see above


class _Reducer:
    """A mixin for picklers that turns tensors and storages into NumPy arrays, which pickle out of band."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrays: dict[int, npt.NDArray[Any]] = {}  # whole storages, by address

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduced value of an object that is not a builtin, or ``NotImplemented`` to leave it to pickle."""
        if type(obj) is torch.Tensor:
            if is_plain(obj):
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
        size, used = storage.nbytes(), tensor.nbytes
        address = storage.data_ptr()
        if size == used and address not in self._arrays and tensor.dtype in NUMPY_DTYPES and tensor.is_contiguous():
            array = self._arrays[address] = tensor.numpy()
            return torch.from_numpy, (array,)
        if size > _MAX_STORAGE_FACTOR * used and address not in self._arrays:
            with suppress(NotImplementedError):  # torch cannot copy some dtypes, such as int4
                tensor = tensor.clone(memory_format=torch.preserve_format)
                storage = tensor.untyped_storage()
        layout = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return _tensor_of, (self._array_of(storage), *layout)

    def _array_of(self, storage: torch.UntypedStorage) -> npt.NDArray[Any]:
        address = storage.data_ptr()
        if address not in self._arrays or not address:  # all empty storages have address 0
            array: npt.NDArray[Any] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._arrays[address] = array
        return self._arrays[address]


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    """Return the reduced value of a sparse tensor.

    Torch's own value would keep every rebuilt tensor in memory until the next ``torch.load``, which checks them all.
    """
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        make = partial(torch.sparse_coo_tensor, check_invariants=False, is_coalesced=tensor.is_coalesced())
        return make, (tensor._indices(), tensor._values(), shape)
    is_by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = tensor.crow_indices() if is_by_row else tensor.ccol_indices()
    plain = tensor.col_indices() if is_by_row else tensor.row_indices()
    make = partial(torch.sparse_compressed_tensor, layout=tensor.layout, check_invariants=False)
    return make, (compressed, plain, tensor.values(), shape)


class _BatchPickler(_Reducer, pickle.Pickler):
    """A pickler for batches whose classes have names."""


class _ByValuePickler(_Reducer, cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no type information
    """A pickler for batches with classes of a script that the data host has not run."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduced value of an object that is not a builtin."""
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return without_changes(cloudpickle.Pickler.reducer_override(self, obj))
        return reduced


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is just a view of bytes."""
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
    # Make a view: with deterministic algorithms, torch.empty() fills new memory, which not every dtype supports.
    new: Any = torch.empty(0, dtype=torch.uint8).view(dtype)
    tensor: torch.Tensor = new.set_(_storage_of(array), offset, shape, stride)
    return tensor
