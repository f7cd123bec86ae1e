"""Rebuild a batch from its header and the bytes of a slot. Nothing in either is trusted. See ``format``."""

from __future__ import annotations

import base64
import json
import math
import reprlib
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from lightning_sm.data.batch import format as batch_format
from lightning_sm.data.batch import instances
from lightning_sm.data.batch import types as batch_types
from lightning_sm.data.batch.class_names import find_class
from lightning_sm.errors import BatchTypeError, WireError

# Headers with lists of file names differ from batch to batch. Caching only small headers limits the cache to a few MB.
_MAX_CACHED_HEADER = 16 * 1024


def decode(header: bytes, data: npt.NDArray[np.uint8]) -> Any:
    """Rebuild a batch. Its tensors and arrays are views of ``data``, and keep that object itself alive.

    Args:
        header: What ``encode`` returned, from any process: nothing in it is trusted.
        data: The slot: writable, contiguous uint8 with one dimension, at least as long as the encoded data.

    Returns:
        The batch. Besides ``data`` it needs memory in proportion to the header, plus copies of at most ``data``'s size.

    Raises:
        WireError: The message is malformed.
        BatchTypeError: The message names a class that this process has neither imported nor registered.
    """
    parse = _parse_cached if len(header) <= _MAX_CACHED_HEADER else _parse
    used, tree = parse(header)
    if used > data.nbytes:
        raise WireError(f"The batch has {used} bytes, but only {data.nbytes} arrived.")
    return _Decoder(data, used).node(tree, 0)


class _Decoder:
    """The decoder of one batch: converts nodes to objects. Every method checks the items of its node before use."""

    def __init__(self, data: npt.NDArray[np.uint8], used: int) -> None:
        # A view of ``data`` itself would keep alive only the array's base. A view of a memoryview keeps ``data`` alive.
        self._memory = data.data
        self._used = used
        self._remembered: list[Any] = []
        self._layouts: dict[str, tuple[type, instances.Layout]] = {}
        self._num_copied = 0

    def node(self, node: Any, depth: int) -> Any:
        if type(node) is not list:
            if type(node) is dict:
                raise WireError("The header has a JSON object where only lists are allowed.")
            return node
        decode_kind = _DECODERS.get(node[0]) if node and type(node[0]) is str else None
        if decode_kind is None or depth > batch_format.MAX_DEPTH:
            what = f"deeper than {batch_format.MAX_DEPTH} levels" if decode_kind else "of an unknown kind"
            raise WireError(f"The header has a node {what}: {reprlib.repr(node)}.")
        return decode_kind(self, node, depth + 1)

    def _nodes(self, nodes: list[Any], depth: int) -> list[Any]:
        return [self.node(node, depth) for node in nodes]

    def _scalar(self, node: list[Any], depth: int) -> Any:
        kind, text = _fields(node, 2)
        if type(text) is not str:
            raise WireError(f"A scalar is not a string: {reprlib.repr(node)}.")
        try:
            return _SCALARS[kind](text)
        except (ValueError, struct.error) as error:
            raise WireError(f"A scalar cannot be parsed: {reprlib.repr(node)}.") from error

    def _list(self, node: list[Any], depth: int) -> Any:
        return self._nodes(node[1:], depth)

    def _tuple(self, node: list[Any], depth: int) -> Any:
        return tuple(self._nodes(node[1:], depth))

    def _size(self, node: list[Any], depth: int) -> Any:
        return torch.Size(_lengths(node[1:]))

    def _set(self, node: list[Any], depth: int) -> Any:
        items = _keys(self._nodes(node[1:], depth))
        return set(items) if node[0] == "set" else frozenset(items)

    def _deque(self, node: list[Any], depth: int) -> Any:
        maxlen = node[1] if len(node) > 1 else -1
        if maxlen is not None and (type(maxlen) is not int or not max(len(node) - 2, 0) <= maxlen < batch_format.INT64):
            raise WireError(f"A deque has an invalid maximum length: {reprlib.repr(maxlen)}.")
        return deque(self._nodes(node[2:], depth), maxlen)

    def _dict(self, node: list[Any], depth: int) -> Any:
        items = self._items(node[1:], depth)
        return items if node[0] == "d" else OrderedDict(items)

    def _default_dict(self, node: list[Any], depth: int) -> Any:
        name = node[1] if len(node) > 1 else 0
        if type(name) is not str or name not in batch_format.FACTORIES:
            raise WireError(f"A defaultdict has an invalid default factory: {reprlib.repr(name)}.")
        return defaultdict(batch_format.FACTORIES[name], self._items(node[2:], depth))

    def _items(self, nodes: list[Any], depth: int) -> dict[Any, Any]:
        if len(nodes) % 2:
            raise WireError("A dictionary has a key without a value.")
        return dict(zip(_keys(self._nodes(nodes[::2], depth)), self._nodes(nodes[1::2], depth), strict=True))

    def _range(self, node: list[Any], depth: int) -> Any:
        kind, *bounds = _fields(node, 4)
        values = self._nodes(bounds, depth)
        if kind == "slice":
            return slice(*values)
        if not all(type(value) is int for value in values) or values[2] == 0:
            raise WireError(f"A range has invalid bounds: {reprlib.repr(node)}.")
        return range(*values)

    def _bytes(self, node: list[Any], depth: int) -> Any:
        _, offset, length = _fields(node, 3)
        self._check_place(offset, length, 1)
        self._num_copied += length
        if self._num_copied > self._used:
            raise WireError("The bytes objects of the header have more bytes than the data.")
        kind = bytes if node[0] == "B" else bytearray
        return self._remember(kind(self._memory[offset : offset + length]))

    def _tensor(self, node: list[Any], depth: int) -> Any:
        _, offset, name, shape, strides, flags = _fields(node, 6)
        dtype = batch_format.DTYPES.get(name) if type(name) is str else None
        if dtype is None:
            raise WireError(f"A tensor has a dtype that torch {torch.__version__} does not have: {reprlib.repr(name)}.")
        if type(flags) is not int or not 0 <= flags <= batch_format.REQUIRES_GRAD | batch_format.IS_PARAMETER:
            raise WireError(f"A tensor has invalid flags: {reprlib.repr(flags)}.")
        count, span = _measure(shape, strides, 1, dtype.itemsize)
        if count:
            self._check_place(offset, span * dtype.itemsize, min(dtype.itemsize, 8))
            flat = torch.frombuffer(self._memory, dtype=dtype, count=span, offset=offset)
            tensor = flat.view(shape) if strides is None else flat.as_strided(shape, strides)
        else:
            # empty(dtype=dtype) would warn that some dtypes are experimental.
            tensor = torch.empty(0, dtype=torch.uint8).view(dtype).view(shape)
        if flags & batch_format.IS_PARAMETER:
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        if flags & batch_format.REQUIRES_GRAD:
            if not (dtype.is_floating_point or dtype.is_complex):
                raise WireError(f"A tensor of dtype {dtype} cannot require gradients.")
            tensor.requires_grad_()
        return self._remember(tensor)

    def _array(self, node: list[Any], depth: int) -> Any:
        _, offset, description, shape, strides = _fields(node, 5)
        dtype = _array_dtype(description)
        count, span = _measure(shape, strides, dtype.itemsize, dtype.itemsize)
        if not dtype.itemsize:
            raise WireError(f"An array has dtype {dtype}, which has no bytes.")
        memory: Any = bytearray()
        if count:
            self._check_place(offset, span, 1)
            # ndarray(buffer=memoryview) would keep alive only the base of ``data``.
            memory = np.frombuffer(self._memory, np.uint8, span, offset)
        try:
            array: Any = np.ndarray(shape, dtype, memory, 0, strides if count else None)
        except (ValueError, TypeError) as error:
            raise WireError(f"NumPy cannot create an array: {error}.") from error
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
            raise WireError(f"A NumPy scalar cannot be parsed: {error}.") from error

    def _again(self, node: list[Any], depth: int) -> Any:
        _, index = _fields(node, 2)
        if type(index) is not int or not 0 <= index < len(self._remembered):
            raise WireError(
                f"The header refers to object {reprlib.repr(index)}, but has {len(self._remembered)} so far."
            )
        return self._remembered[index]

    def _enum(self, node: list[Any], depth: int) -> Any:
        _, name, member = _fields(node, 3)
        cls = _imported_class(name)
        if not issubclass(cls, Enum) or type(member) is not str or member not in cls.__members__:
            raise BatchTypeError(
                f"{name} has a member {reprlib.repr(member)} on the data host, but not here. Use the same code "
                "on all hosts."
            )
        return cls.__members__[member]

    def _instance(self, node: list[Any], depth: int) -> Any:
        _, name, fields, base, names, values = _fields(node, 6)
        cls, layout = self._layout(name)
        if layout.fields != fields:
            raise BatchTypeError(
                f"{name} has the fields {reprlib.repr(layout.fields)} in this process, but {reprlib.repr(fields)} on "
                "the data host. Use the same code on all hosts."
            )
        if type(names) is not list or type(values) is not list or len(names) != len(values):
            raise WireError(f"An object does not have one value for each attribute: {reprlib.repr(node)}.")
        if names and (not all(type(attribute) is str for attribute in names) or len(set(names)) < len(names)):
            raise WireError(f"The attributes of an object have invalid or repeated names: {reprlib.repr(names)}.")
        if layout.required and (missing := sorted(layout.required - set(names))):
            raise WireError(f"A {name} has no value in its field {missing[0]}.")
        # A reference would let a short message copy the same value again and again.
        value: Any = None if type(base) is list and base[:1] == ["r"] else self.node(base, depth)
        if not _has_type(value, layout.base) or (layout.base is tuple and len(value) != len(fields or value)):
            raise WireError(f"A {name} has an invalid value: {reprlib.repr(base)}.")
        children = dict(zip(names, self._nodes(values, depth), strict=True))
        try:
            obj = instances.rebuild(cls, layout, value, children)
        except Exception as error:  # what torch, or a metaclass, says
            raise WireError(f"A {name} cannot be rebuilt: {type(error).__name__}: {error}.") from error
        return self._remember(obj) if layout.base is torch.Tensor else obj

    def _layout(self, name: Any) -> tuple[type, instances.Layout]:
        """Return the class of a name, which this process has imported, and how its objects are stored."""
        if type(name) is not str or name not in self._layouts:
            cls = _imported_class(name)
            layout = None if batch_types.maker_of(name) else instances.layout_of(cls)
            if layout is None:
                raise BatchTypeError(
                    f"A batch contains a {name} by its attributes, but in this process the class is registered, or "
                    "cannot be rebuilt from them. Import the same code, and call register_batch_type(), on all hosts."
                )
            self._layouts[name] = (cls, layout)
        return self._layouts[name]

    def _registered(self, node: list[Any], depth: int) -> Any:
        _, name, parts = _fields(node, 3)
        from_parts = batch_types.maker_of(name) if type(name) is str else None
        if from_parts is None:
            raise BatchTypeError(
                f"A batch contains a {reprlib.repr(name)}, which this process has neither imported nor registered. "
                "Import its module, or call register_batch_type(), in the training script."
            )
        children = self.node(parts, depth)
        try:
            return self._remember(from_parts(children))
        except Exception as error:  # the function may be the user's
            raise WireError(f"from_parts() of {name} failed: {type(error).__name__}: {error}.") from error

    def _remember(self, obj: Any) -> Any:
        self._remembered.append(obj)
        return obj

    def _check_place(self, offset: Any, length: Any, alignment: int) -> None:
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0 or offset % alignment:
            raise WireError(f"The header has the invalid position {reprlib.repr([offset, length])}.")
        if length > self._used - offset:
            raise WireError(f"The header places {length} bytes at {offset}, but the data has {self._used}.")


def _fields(node: Any, count: int) -> list[Any]:
    if type(node) is not list or len(node) != count:
        raise WireError(f"A node does not have {count} items: {reprlib.repr(node)}.")
    return node


def _lengths(lengths: Any) -> Any:
    valid = type(lengths) is list and all(
        type(length) is int and 0 <= length < batch_format.INT64 for length in lengths
    )
    if not valid or len(lengths) > batch_format.MAX_DIMENSIONS:
        raise WireError(f"A shape or stride is invalid: {reprlib.repr(lengths)}.")
    return lengths


def _measure(shape: Any, strides: Any, unit: int, itemsize: int) -> tuple[int, int]:
    """Return the number of elements of an array, and the length from first to last byte in the unit of its strides."""
    count = math.prod(_lengths(shape))
    if math.prod([length or 1 for length in shape]) * itemsize >= batch_format.INT64:
        raise WireError(f"A shape has too many elements: {reprlib.repr(shape)}.")
    if strides is None or not count:
        return count, count * unit
    if len(_lengths(strides)) != len(shape):
        raise WireError(f"Shape {reprlib.repr(shape)} and strides {reprlib.repr(strides)} differ in length.")
    span = unit + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    if count * unit > span:
        # With a stride of 0, one element would become a terabyte when the batch is copied.
        raise WireError(f"The elements of shape {reprlib.repr(shape)} overlap in strides {reprlib.repr(strides)}.")
    return count, span


def _array_dtype(description: Any, level: int = 0) -> Any:
    if type(description) is str and batch_format.ARRAY_DTYPE.fullmatch(description):
        make: Any = description
    elif type(description) is list and description and level < batch_format.MAX_DTYPE_LEVELS:
        make = {"names": [], "formats": [], "offsets": [], "itemsize": description[0]}
        for field in description[1:]:
            name, item, offset, shape = _fields(field, 4)
            base = _array_dtype(item, level + 1)
            make["names"].append(name)
            make["formats"].append((base, tuple(shape)) if _lengths(shape) else base)
            make["offsets"].append(offset)
    else:
        raise WireError(f"A NumPy dtype is invalid: {reprlib.repr(description)}.")
    try:
        return np.dtype(make)
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"A NumPy dtype is invalid: {reprlib.repr(description)}: {error}.") from error


def _keys(keys: list[Any]) -> list[Any]:
    if not all(map(batch_format.is_key, keys)) or len(set(keys)) < len(keys):
        raise WireError("A dictionary or set has an invalid or repeated key.")
    return keys


def _has_type(value: Any, base: type | None) -> bool:
    kind = type(value)
    return value is None if base is None else kind is base or (base is torch.Tensor and kind is torch.nn.Parameter)


def _imported_class(name: Any) -> type:
    cls = find_class(name) if type(name) is str else None
    if cls is None:
        raise BatchTypeError(
            f"A batch contains a {reprlib.repr(name)}, a class that this process has not imported. Import it at the "
            "top of the training script, or call register_batch_type()."
        )
    return cls


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


_FROM_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _parse(header: bytes) -> tuple[int, Any]:
    if (num_lists := header.count(b"[")) > batch_format.MAX_LISTS:
        raise WireError(f"The header of a batch has {num_lists} lists; {batch_format.MAX_LISTS} are allowed.")
    try:
        message = _FROM_JSON.decode(header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"The header of a batch is not valid JSON: {reprlib.repr(str(error))}.") from error
    name, version, used, tree = _fields(message, 4)
    if name != batch_format.FORMAT:
        raise WireError(f"The header of a batch does not start with {batch_format.FORMAT!r}.")
    if version != batch_format.VERSION:
        raise WireError(
            f"The batch has format version {reprlib.repr(version)}; this process reads version {batch_format.VERSION}."
        )
    if type(used) is not int or not 0 <= used < batch_format.INT64:
        raise WireError(f"The batch has an invalid number of bytes: {reprlib.repr(used)}.")
    return used, tree


# Batches of a loader mostly have equal headers. Decoding creates new objects, and never changes a cached header.
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
    "deque": _Decoder._deque,
    "d": _Decoder._dict,
    "o": _Decoder._dict,
    "default": _Decoder._default_dict,
    "range": _Decoder._range,
    "slice": _Decoder._range,
    "B": _Decoder._bytes,
    "A": _Decoder._bytes,
    "t": _Decoder._tensor,
    "a": _Decoder._array,
    "n": _Decoder._numpy_scalar,
    "r": _Decoder._again,
    "e": _Decoder._enum,
    "x": _Decoder._instance,
    "p": _Decoder._registered,
}
