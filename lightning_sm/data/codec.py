"""A batch as a small header and raw bytes in a slot of shared memory.

The header is JSON, ``["lsm-batch", version, bytes used, tree]``. In the tree null, booleans, strings and ordinary
numbers stand for themselves; everything else is a list whose first item says what it is (see ``_Encoder`` and
``_Decoder``). Tensors and arrays are a dtype, a shape and an offset into the slot. Nothing is pickled, and decoding
checks every number before it is used, because a message comes from another host.
"""

from __future__ import annotations

import base64
import json
import math
import re
import reprlib
import struct
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from lightning_sm.data import batch_types
from lightning_sm.data.collate import Arena, Leaf
from lightning_sm.errors import BatchTooLargeError, BatchTypeError, WireError

__all__ = ["MAX_DEPTH", "Arena", "decode", "encode"]

MAX_DEPTH = 64
"""How deep containers may be nested in a batch."""

_FORMAT, _VERSION = "lsm-batch", 1
_MAX_DIMENSIONS = 64
_MAX_DTYPE_LEVELS = 8
_INT64 = 2**63
# About 10 s of encoding; far more than a batch has when its numbers are in tensors, and where an explosion of shared
# containers must end.
_MAX_OBJECTS = 2**22
# Larger bytes travel beside the header: base64 costs a third more, and every copy of the header costs again.
_MAX_INLINE_BYTES = 128
# Headers with lists of file names differ from batch to batch; remembering only small ones bounds the cache to a few MB.
_MAX_CACHED_HEADER = 16 * 1024

# What torch has depends on its version. Quantized dtypes are missing on purpose: their scale is elsewhere.
_DTYPE = re.compile(r"bool|bfloat16|b?complex\d+|float\d+(_\w+)?|u?int\d+|bits\w+")
_DTYPES = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype) and _DTYPE.fullmatch(name)}
_NAMES_OF_DTYPES = {dtype: name for name, dtype in _DTYPES.items()}
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUV]\d{1,9}|[<>|=][mM]8(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_TO_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False)


def encode(batch: Any, arena: Arena) -> bytes:
    """Put a batch into a slot and return the header from which ``decode`` rebuilds it.

    Tensors and arrays that lie in the slot already stay where they are. Views that share memory share it in the slot as
    well, unless that took more room than separate copies. Dense strides are kept; others become contiguous.

    Args:
        batch: What the collate function returned.
        arena: The slot; the bytes to send with the header are its first ``arena.used``.

    Raises:
        BatchTypeError: The batch holds something that cannot be sent; the message names its path.
        BatchTooLargeError: The slot is too small.
    """
    encoder = _Encoder()
    tree = encoder.node(batch)
    arena.place(encoder.leaves)
    return _TO_JSON.encode([_FORMAT, _VERSION, arena.used, tree]).encode("ascii")


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


class _Attribute(str):
    __slots__ = ()


class _Encoder:
    """Turns a batch into nodes and lists the leaves, whose offsets are filled in when all of them are known."""

    def __init__(self) -> None:
        self._path: list[Any] = []
        self._containers: list[Any] = []
        self._indices: dict[int, int] = {}
        self._remembered: list[Any] = []
        self.leaves: list[Leaf] = []
        self._num_objects = 0

    def node(self, obj: Any) -> Any:
        self._num_objects += 1
        encode_kind = _ENCODERS.get(type(obj))
        return self._other(obj) if encode_kind is None else encode_kind(self, obj)

    def _plain(self, obj: Any) -> Any:
        return obj

    def _int(self, obj: int) -> Any:
        return obj if -_INT64 <= obj < _INT64 else ["i", hex(obj)]

    def _float(self, obj: float) -> Any:
        return obj if math.isfinite(obj) else ["f", struct.pack("<d", obj).hex()]

    def _complex(self, obj: complex) -> Any:
        return ["c", struct.pack("<dd", obj.real, obj.imag).hex()]

    def _str(self, obj: str) -> Any:
        try:
            obj.encode()
        except UnicodeEncodeError:
            # JSON would join two lone surrogates to one character.
            return ["s", obj.encode("utf-8", "surrogatepass").hex()]
        return obj

    def _bytes(self, obj: bytes) -> Any:
        if len(obj) <= _MAX_INLINE_BYTES:
            return ["b", base64.b64encode(obj).decode("ascii")]
        return self._once(obj, self._large_bytes)

    def _large_bytes(self, obj: bytes) -> Any:
        address = np.frombuffer(obj, np.uint8).ctypes.data
        return self._leaf(Leaf(["B", 0, len(obj)], obj, address, len(obj), len(obj)))

    def _list(self, obj: Any) -> Any:
        return [_SEQUENCES[type(obj)], *self._children(obj, enumerate(obj))]

    def _set(self, obj: Any) -> Any:
        return [_SETS[type(obj)], *self._children(obj, ((item, self._key(item)) for item in obj))]

    def _dict(self, obj: Any) -> Any:
        # All keys before all values, as in decoding: both number what they remember in this order.
        keys = self._children(obj, ((key, self._key(key)) for key in obj))
        values = self._children(obj, obj.items())
        return ["o" if type(obj) is OrderedDict else "d", *chain.from_iterable(zip(keys, values, strict=True))]

    def _key(self, key: Any) -> Any:
        if not _is_key(key):
            self._fail(f"holds the key {reprlib.repr(key)} of type {type(key).__qualname__}, which cannot be sent.")
        return key

    def _range(self, obj: Any) -> Any:
        bounds = ((_Attribute(name), getattr(obj, name)) for name in ("start", "stop", "step"))
        return [type(obj).__name__, *self._children(obj, bounds)]

    def _any_tensor(self, obj: torch.Tensor) -> Any:
        is_dense = obj.layout == torch.strided and not obj.is_nested
        return self._once(obj, self._tensor) if is_dense else self._other(obj)

    def _tensor(self, obj: torch.Tensor) -> Any:
        if obj.device.type != "cpu" or obj.dtype not in _NAMES_OF_DTYPES or obj.dim() > _MAX_DIMENSIONS:
            kind = f"{obj.dtype} on {obj.device} with {obj.dim()} dimensions"
            self._fail(f"is a tensor that cannot be sent ({kind}). Dequantize it or move it to the CPU in collate_fn.")
        flags = (obj.requires_grad and obj.is_leaf) + 2 * isinstance(obj, torch.nn.Parameter)
        shape, strides, itemsize = list(obj.shape), obj.stride(), obj.element_size()
        size = span = obj.numel() * itemsize
        node = ["t", 0, _NAMES_OF_DTYPES[obj.dtype], shape, None, flags]
        if size and not obj.is_contiguous():
            node[4] = list(strides)
            span = itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
        if obj.is_conj() or obj.is_neg():
            span = 0
        return self._leaf(Leaf(node, obj, obj.data_ptr(), span, size, min(itemsize, 8)))

    def _array(self, obj: Any) -> Any:
        return self._once(obj, self._new_array)

    def _new_array(self, obj: npt.NDArray[Any]) -> Any:
        shape, strides = list(obj.shape), [step if n > 1 else 0 for n, step in zip(obj.shape, obj.strides, strict=True)]
        node, span = ["a", 0, self._dtype(obj.dtype), shape, None], obj.nbytes
        if not obj.dtype.itemsize:
            self._fail(f"is an array of dtype {obj.dtype}, which has no bytes.")
        if obj.size and not obj.flags.c_contiguous:
            node[4] = strides
            span = obj.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            span = span if min(strides) >= 0 else 0
        return self._leaf(Leaf(node, obj, obj.__array_interface__["data"][0], span, obj.nbytes))

    def _dtype(self, dtype: Any, level: int = 0) -> Any:
        if dtype.names is not None and level < _MAX_DTYPE_LEVELS:
            fields = []
            for name in dtype.names:
                field, offset = dtype.fields[name][:2]
                base, shape = field.subdtype or (field, ())
                fields.append([name, self._dtype(base, level + 1), offset, list(shape)])
            return [dtype.itemsize, *fields]
        if dtype.names is None and _ARRAY_DTYPE.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
            return dtype.str
        return self._fail(f"is a NumPy object of dtype {dtype}, which cannot be sent. Convert it in collate_fn.")

    def _other(self, obj: Any) -> Any:
        cls = type(obj)
        if (known := batch_types.type_of_object(obj)) is not None:
            return self._once(obj, lambda obj: self._registered(known, obj))
        if isinstance(obj, np.generic):
            return ["n", self._dtype(obj.dtype), obj.tobytes()[: obj.dtype.itemsize].hex()]
        name = batch_types.class_name(cls)
        if isinstance(obj, Enum) and obj.name in cls.__members__:
            return ["e", name, obj.name]
        fields = batch_types.field_names(cls)
        if fields is None or "<locals>" in name:
            self._fail(f"is a {name.replace(':', '.')}, which cannot be sent. {batch_types.advice(cls)}")
        values = zip(fields, obj, strict=True) if isinstance(obj, tuple) else ((x, self._field(obj, x)) for x in fields)
        return ["x", name, fields, self._children(obj, ((_Attribute(field), value) for field, value in values))]

    def _field(self, obj: Any, name: str) -> Any:
        try:
            return getattr(obj, name)
        except AttributeError:
            return self._fail(f"has no value in its field {name}.")

    def _registered(self, known: batch_types.BatchType, obj: Any) -> Any:
        try:
            parts = known.to_parts(obj)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            raise BatchTypeError(f"{self._where()} cannot be taken apart as a {known.name}: {message}") from error
        return ["p", known.name, *self._children(obj, [(_Attribute("parts"), parts)])]

    def _once(self, obj: Any, encode_new: Callable[[Any], Any]) -> Any:
        if (index := self._indices.get(id(obj))) is not None:
            return ["r", index]
        node = encode_new(obj)
        # Kept: a freed part of a registered type would pass its id on to the next object.
        self._indices[id(obj)] = len(self._remembered)
        self._remembered.append(obj)
        return node

    def _children(self, container: Any, items: Iterable[tuple[Any, Any]]) -> list[Any]:
        if len(self._containers) >= MAX_DEPTH:
            contains_itself = any(container is parent for parent in self._containers)
            self._fail("contains itself." if contains_itself else f"is nested deeper than {MAX_DEPTH} levels.")
        if self._num_objects > _MAX_OBJECTS:
            raise BatchTooLargeError(f"A batch has more than {_MAX_OBJECTS} objects. Make tensors of its numbers.")
        self._containers.append(container)
        nodes = []
        for step, value in items:
            self._path.append(step)
            nodes.append(self.node(value))
            self._path.pop()
        self._containers.pop()
        return nodes

    def _leaf(self, leaf: Leaf) -> Any:
        if leaf.size:
            self.leaves.append(leaf)
        return leaf.node

    def _where(self) -> str:
        return "batch" + "".join(map(_step, self._path))

    def _fail(self, what: str) -> NoReturn:
        raise BatchTypeError(f"{self._where()} {what}")


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
        dtype = _DTYPES.get(name) if type(name) is str else None
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
    valid = type(lengths) is list and all(type(length) is int and 0 <= length < _INT64 for length in lengths)
    if not valid or len(lengths) > _MAX_DIMENSIONS:
        raise WireError(f"A shape or stride is impossible: {reprlib.repr(lengths)}.")
    return lengths


def _measure(shape: Any, strides: Any, unit: int, itemsize: int) -> tuple[int, int]:
    """Return how many elements an array has, and its distance from first to last byte in the unit of its strides."""
    count = math.prod(_lengths(shape))
    if math.prod([length or 1 for length in shape]) * itemsize >= _INT64:
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
    if type(description) is str and _ARRAY_DTYPE.fullmatch(description):
        make: Any = description
    elif type(description) is list and description and level < _MAX_DTYPE_LEVELS:
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


def _is_key(key: Any, level: int = 0) -> bool:
    if type(key) is tuple:
        return level < MAX_DEPTH and all(_is_key(item, level + 1) for item in key)
    return type(key) in _KEYS or isinstance(key, Enum) or (isinstance(key, np.generic) and not isinstance(key, np.void))


def _keys(keys: list[Any]) -> list[Any]:
    if not all(map(_is_key, keys)) or len(set(keys)) < len(keys):
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


def _step(step: Any) -> str:
    if isinstance(step, _Attribute):
        return f".{step}"
    return f"[{json.dumps(step, ensure_ascii=False)}]" if type(step) is str else f"[{reprlib.repr(step)}]"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_FROM_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _parse(header: bytes) -> tuple[int, Any]:
    try:
        message = _FROM_JSON.decode(header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"The header of a batch is not JSON: {reprlib.repr(str(error))}.") from error
    name, version, used, tree = _fields(message, 4)
    if name != _FORMAT:
        raise WireError("The header of a batch does not say that it is one.")
    if version != _VERSION or type(used) is not int or not 0 <= used < _INT64:
        raise WireError(
            f"The batch has format {reprlib.repr(version)} (this is {_VERSION}), {reprlib.repr(used)} bytes."
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
_KEYS = frozenset({str, bytes, int, float, bool, complex, type(None)})
_SEQUENCES: dict[type, str] = {list: "l", tuple: "u", torch.Size: "size"}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_ENCODERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    type(None): _Encoder._plain,
    bool: _Encoder._plain,
    int: _Encoder._int,
    float: _Encoder._float,
    complex: _Encoder._complex,
    str: _Encoder._str,
    bytes: _Encoder._bytes,
    range: _Encoder._range,
    slice: _Encoder._range,
    dict: _Encoder._dict,
    defaultdict: _Encoder._dict,
    OrderedDict: _Encoder._dict,
    np.ndarray: _Encoder._array,
    np.memmap: _Encoder._array,
    torch.Tensor: _Encoder._any_tensor,
    torch.nn.Parameter: _Encoder._any_tensor,
    **dict.fromkeys(_SEQUENCES, _Encoder._list),
    **dict.fromkeys(_SETS, _Encoder._set),
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
