"""A header and the bytes of a slot become a batch again; nothing in either is trusted. See ``batch_format``."""

from __future__ import annotations

import base64
import json
import math
import reprlib
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from lightning_sm.data.batch import types as batch_types
from lightning_sm.data.batch.format import (
    ARRAY_DTYPE,
    DTYPES,
    FORMAT,
    INT64,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_DTYPE_LEVELS,
    VERSION,
    is_key,
)
from lightning_sm.errors import BatchTypeError, WireError

# Headers with lists of file names differ from batch to batch; remembering only small ones bounds the cache to a few MB.
_MAX_CACHED_HEADER = 16 * 1024


def decode(header: bytes | memoryview, data: npt.NDArray[np.uint8]) -> Any:
    """Rebuild a batch; its tensors and arrays are views of ``data`` and keep that very object alive.

    Args:
        header: What ``encode`` returned, from anywhere: nothing in it is trusted.
        data: The slot: contiguous uint8 with one dimension, at least as long as what was encoded.

    Returns:
        The batch. Memory taken besides ``data`` is proportional to the header, plus copies of at most ``data``'s size.

    Raises:
        WireError: The message is broken.
        BatchTypeError: The message names a class that this process has neither imported nor registered.
    """
    raw = bytes(header)
    used, tree = (_parse_cached if len(raw) <= _MAX_CACHED_HEADER else _parse)(raw)
    if used > data.nbytes:
        raise WireError(f"The batch has {used} bytes, but only {data.nbytes} arrived.")
    if data.flags.writeable:
        return _Decoder(data, used).node(tree, 0)
    with warnings.catch_warnings():
        # torch has no read-only tensors; whoever passes read-only memory knows that writing to them is a fault.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return _Decoder(data, used).node(tree, 0)


class _Decoder:
    """Turns nodes into objects. Every method checks what it takes from its node before it uses it."""

    def __init__(self, data: npt.NDArray[np.uint8], used: int) -> None:
        # A view of an array keeps alive only what that array is a view of; a view of a memoryview keeps ``data``.
        self._memory = data.data
        self._used = used
        self._remembered: list[Any] = []
        self._num_copied = 0

    def node(self, node: Any, depth: int) -> Any:
        if type(node) is not list:
            if type(node) is dict:
                raise WireError("The header holds a JSON object where only lists have a meaning.")
            return node
        decode_kind = _DECODERS.get(node[0]) if node and type(node[0]) is str else None
        if decode_kind is None or depth > MAX_DEPTH:
            what = f"deeper than {MAX_DEPTH} levels" if decode_kind else "of an unknown kind"
            raise WireError(f"The header holds a node {what}: {reprlib.repr(node)}.")
        return decode_kind(self, node, depth + 1)

    def _nodes(self, nodes: list[Any], depth: int) -> list[Any]:
        return [self.node(node, depth) for node in nodes]

    def _scalar(self, node: list[Any], depth: int) -> Any:
        kind, text = _fields(node, 2)
        if type(text) is not str:
            raise WireError(f"A scalar is not written as a string: {reprlib.repr(node)}.")
        try:
            return _SCALARS[kind](text)
        except (ValueError, struct.error) as error:
            raise WireError(f"A scalar cannot be read: {reprlib.repr(node)}.") from error

    def _list(self, node: list[Any], depth: int) -> Any:
        return self._nodes(node[1:], depth)

    def _tuple(self, node: list[Any], depth: int) -> Any:
        return tuple(self._nodes(node[1:], depth))

    def _size(self, node: list[Any], depth: int) -> Any:
        return torch.Size(_lengths(node[1:]))

    def _set(self, node: list[Any], depth: int) -> Any:
        items = _keys(self._nodes(node[1:], depth))
        return set(items) if node[0] == "set" else frozenset(items)

    def _dict(self, node: list[Any], depth: int) -> Any:
        if len(node) % 2 == 0:
            raise WireError("A dictionary has a key without a value.")
        items = zip(_keys(self._nodes(node[1::2], depth)), self._nodes(node[2::2], depth), strict=True)
        return dict(items) if node[0] == "d" else OrderedDict(items)

    def _range(self, node: list[Any], depth: int) -> Any:
        kind, *bounds = _fields(node, 4)
        values = self._nodes(bounds, depth)
        if kind == "slice":
            return slice(*values)
        if not all(type(value) is int for value in values) or values[2] == 0:
            raise WireError(f"A range has impossible bounds: {reprlib.repr(node)}.")
        return range(*values)

    def _bytes(self, node: list[Any], depth: int) -> Any:
        _, offset, length = _fields(node, 3)
        self._check_place(offset, length, 1)
        self._num_copied += length
        if self._num_copied > self._used:
            raise WireError("The header asks for more copies of the data than the data has bytes.")
        return self._remember(bytes(self._memory[offset : offset + length]))

    def _tensor(self, node: list[Any], depth: int) -> Any:
        _, offset, name, shape, strides, flags = _fields(node, 6)
        dtype = DTYPES.get(name) if type(name) is str else None
        if dtype is None or type(flags) is not int or flags not in range(4):
            raise WireError(
                f"A tensor of an impossible kind, or of one that torch {torch.__version__} lacks: {reprlib.repr(name)}."
            )
        count, span = _measure(shape, strides, 1, dtype.itemsize)
        if count:
            self._check_place(offset, span * dtype.itemsize, min(dtype.itemsize, 8))
            flat = torch.frombuffer(self._memory, dtype=dtype, count=span, offset=offset)
            tensor = flat.view(shape) if strides is None else flat.as_strided(shape, strides)
        else:
            # Not empty(dtype=dtype): for some dtypes that warns that they are experimental.
            tensor = torch.empty(0, dtype=torch.uint8).view(dtype).view(shape)
        if flags & 1 and not (dtype.is_floating_point or dtype.is_complex):
            raise WireError(f"A tensor of dtype {dtype} cannot require gradients.")
        if flags & 2:
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        return self._remember(tensor.requires_grad_() if flags & 1 else tensor)

    def _array(self, node: list[Any], depth: int) -> Any:
        _, offset, description, shape, strides = _fields(node, 5)
        dtype = _array_dtype(description)
        count, span = _measure(shape, strides, dtype.itemsize, dtype.itemsize)
        if not dtype.itemsize:
            raise WireError(f"An array of dtype {dtype}, which has no bytes.")
        memory: Any = bytearray()
        if count:
            self._check_place(offset, span, 1)
            # Not ndarray(buffer=memoryview): it would look through the memoryview, at ``data``'s own base.
            memory = np.frombuffer(self._memory, np.uint8, span, offset)
        try:
            array: Any = np.ndarray(shape, dtype, memory, 0, strides if count else None)
        except (ValueError, TypeError) as error:
            raise WireError(f"NumPy cannot make an array of a message: {error}.") from error
        return self._remember(array)

    def _numpy_scalar(self, node: list[Any], depth: int) -> Any:
        _, description, text = _fields(node, 3)
        dtype = _array_dtype(description)
        try:
            raw = bytearray.fromhex(text)
            if len(raw) != dtype.itemsize:
                raise WireError(f"A NumPy scalar of dtype {dtype} has {len(raw)} bytes.")
            return np.ndarray((), dtype, raw)[()] if raw else dtype.type()
        except (ValueError, TypeError, SystemError) as error:  # SystemError: a character beyond Unicode
            raise WireError(f"A NumPy scalar cannot be read: {error}.") from error

    def _again(self, node: list[Any], depth: int) -> Any:
        _, index = _fields(node, 2)
        if type(index) is not int or not 0 <= index < len(self._remembered):
            raise WireError(f"The header refers to object {reprlib.repr(index)} of {len(self._remembered)}.")
        return self._remembered[index]

    def _enum(self, node: list[Any], depth: int) -> Any:
        _, name, member = _fields(node, 3)
        cls = _imported_class(name)
        if not issubclass(cls, Enum) or type(member) is not str or member not in cls.__members__:
            raise BatchTypeError(f"{name} has no member {reprlib.repr(member)} here, but it has on the data host.")
        return cls.__members__[member]

    def _object(self, node: list[Any], depth: int) -> Any:
        _, name, fields, values = _fields(node, 4)
        cls = _imported_class(name)
        if type(values) is not list or type(fields) is not list or len(fields) != len(values):
            raise WireError(f"An object has not one value for each field: {reprlib.repr(node)}.")
        if batch_types.field_names(cls) != fields:
            raise BatchTypeError(f"{name} has other fields here than on the data host: {reprlib.repr(fields)}.")
        children = self._nodes(values, depth)
        try:
            if issubclass(cls, tuple):
                return tuple.__new__(cls, children)
            return batch_types.rebuild_dataclass(cls, dict(zip(fields, children, strict=True)))
        except Exception as error:  # a field may be a descriptor of the user's
            raise WireError(f"A {name} cannot be put together: {type(error).__name__}: {error}.") from error

    def _registered(self, node: list[Any], depth: int) -> Any:
        _, name, parts = _fields(node, 3)
        known = batch_types.type_of_name(name) if type(name) is str else None
        if known is None:
            raise BatchTypeError(
                f"A batch holds a {reprlib.repr(name)}, which this process has neither imported nor registered. Import "
                "its module, or call register_batch_type(), in the training script."
            )
        children = self.node(parts, depth)
        try:
            return self._remember(known.from_parts(children))
        except Exception as error:  # the function may be the user's
            raise WireError(f"A {name} cannot be put together: {type(error).__name__}: {error}.") from error

    def _remember(self, obj: Any) -> Any:
        self._remembered.append(obj)
        return obj

    def _check_place(self, offset: Any, length: Any, alignment: int) -> None:
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0 or offset % alignment:
            raise WireError(f"The header names the impossible place {reprlib.repr([offset, length])}.")
        if length > self._used - offset:
            raise WireError(f"The header places {length} bytes at {offset}, but the data has {self._used}.")


def _fields(node: Any, count: int) -> list[Any]:
    if type(node) is not list or len(node) != count:
        raise WireError(f"A node does not have {count} items: {reprlib.repr(node)}.")
    return node


def _lengths(lengths: Any) -> Any:
    valid = type(lengths) is list and all(type(length) is int and 0 <= length < INT64 for length in lengths)
    if not valid or len(lengths) > MAX_DIMENSIONS:
        raise WireError(f"A shape or stride is impossible: {reprlib.repr(lengths)}.")
    return lengths


def _measure(shape: Any, strides: Any, unit: int, itemsize: int) -> tuple[int, int]:
    """Return how many elements an array has, and its distance from first to last byte in the unit of its strides."""
    count = math.prod(_lengths(shape))
    if math.prod([length or 1 for length in shape]) * itemsize >= INT64:
        raise WireError(f"A shape has more elements than can be counted: {reprlib.repr(shape)}.")
    if strides is None or not count:
        return count, count * unit
    if len(_lengths(strides)) != len(shape):
        raise WireError(f"Shape {reprlib.repr(shape)} and strides {reprlib.repr(strides)} differ in length.")
    span = unit + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    if count * unit > span:
        # A stride of 0 would make a terabyte out of one element as soon as somebody copies it.
        raise WireError(f"The elements of shape {reprlib.repr(shape)} overlap in strides {reprlib.repr(strides)}.")
    return count, span


def _array_dtype(description: Any, level: int = 0) -> Any:
    if type(description) is str and ARRAY_DTYPE.fullmatch(description):
        make: Any = description
    elif type(description) is list and description and level < MAX_DTYPE_LEVELS:
        make = {"names": [], "formats": [], "offsets": [], "itemsize": description[0]}
        for field in description[1:]:
            name, item, offset, shape = _fields(field, 4)
            base, shape = _array_dtype(item, level + 1), tuple(_lengths(shape))
            make["names"].append(name)
            make["formats"].append((base, shape) if shape else base)
            make["offsets"].append(offset)
    else:
        raise WireError(f"A NumPy dtype is impossible: {reprlib.repr(description)}.")
    try:
        return np.dtype(make)
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"A NumPy dtype is impossible: {reprlib.repr(description)}: {error}.") from error


def _keys(keys: list[Any]) -> list[Any]:
    if not all(map(is_key, keys)) or len(set(keys)) < len(keys):
        raise WireError("A dictionary or set has a key that is impossible or repeated.")
    return keys


def _imported_class(name: Any) -> type:
    cls = batch_types.find_class(name) if type(name) is str else None
    if cls is None:
        raise BatchTypeError(
            f"A batch holds a {reprlib.repr(name)}, a class that this process has not imported. Import it at the top "
            "of the training script, or call register_batch_type()."
        )
    return cls


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_FROM_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _parse(header: bytes) -> tuple[int, Any]:
    try:
        message = _FROM_JSON.decode(header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"The header of a batch is not JSON: {reprlib.repr(str(error))}.") from error
    name, version, used, tree = _fields(message, 4)
    if name != FORMAT:
        raise WireError("The header of a batch does not say that it is one.")
    if version != VERSION or type(used) is not int or not 0 <= used < INT64:
        raise WireError(
            f"The batch has format {reprlib.repr(version)} (this is {VERSION}), {reprlib.repr(used)} bytes."
        )
    return used, tree


# Batches of a loader mostly have equal headers. What is cached is only read: decoding makes every object anew.
_parse_cached = lru_cache(maxsize=16)(_parse)

_SCALARS: dict[str, Callable[[str], Any]] = {
    "i": lambda text: int(text, 16),
    "f": lambda text: struct.unpack("<d", bytes.fromhex(text))[0],
    "c": lambda text: complex(*struct.unpack("<dd", bytes.fromhex(text))),
    "s": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "b": lambda text: base64.b64decode(text, validate=True),
}
_DECODERS: dict[str, Callable[[_Decoder, list[Any], int], Any]] = {
    **dict.fromkeys(_SCALARS, _Decoder._scalar),
    "l": _Decoder._list,
    "u": _Decoder._tuple,
    "size": _Decoder._size,
    "set": _Decoder._set,
    "frozenset": _Decoder._set,
    "d": _Decoder._dict,
    "o": _Decoder._dict,
    "range": _Decoder._range,
    "slice": _Decoder._range,
    "B": _Decoder._bytes,
    "t": _Decoder._tensor,
    "a": _Decoder._array,
    "n": _Decoder._numpy_scalar,
    "r": _Decoder._again,
    "e": _Decoder._enum,
    "x": _Decoder._object,
    "p": _Decoder._registered,
}
