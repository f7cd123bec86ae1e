"""Convert a batch to a small header and raw bytes in a slot of shared memory. ``format`` describes the header."""

from __future__ import annotations

import base64
import json
import math
import reprlib
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from lightning_sm.data.batch import format as batch_format
from lightning_sm.data.batch import instances
from lightning_sm.data.batch import types as batch_types
from lightning_sm.data.batch.arena import Arena, Leaf
from lightning_sm.data.batch.class_names import class_name, is_hidden
from lightning_sm.errors import BatchTooLargeError, BatchTypeError

# About 10 s of encoding. A batch whose numbers are in tensors has far fewer objects. A shared container is encoded as
# often as the batch refers to it, which could take all memory without this limit.
_MAX_OBJECTS = 2**22
# Larger bytes objects are sent in the slot: in the header, base64 makes them a third larger, and the header is copied.
_MAX_INLINE_BYTES = 128

_TO_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False)


def encode(batch: Any, arena: Arena) -> bytes:
    """Copy a batch to a slot and return the header from which ``decode`` rebuilds it.

    Tensors and arrays that lie in the slot already are not copied. Views that share memory also share it in the slot,
    unless separate copies need less room. Dense strides are kept; other layouts become contiguous.

    Args:
        batch: What the collate function returned.
        arena: The slot; its first ``arena.used`` bytes belong to the header.

    Raises:
        BatchTypeError: The batch contains an object that cannot be sent; the message has its path.
        BatchTooLargeError: The slot is too small.
    """
    encoder = _BatchEncoder()
    tree = encoder.node(batch)
    arena.place(encoder.leaves)
    header = _TO_JSON.encode([batch_format.FORMAT, batch_format.VERSION, arena.used, tree]).encode("ascii")
    if (num_lists := header.count(b"[")) > batch_format.MAX_LISTS:
        raise BatchTooLargeError(
            f"A batch has {num_lists} lists and opening brackets in strings; {batch_format.MAX_LISTS} are allowed. "
            "Convert numbers to tensors, and long strings to bytes."
        )
    return header


class _Attribute(str):
    """An attribute in a path; without a name, the value of an object that extends a builtin type."""

    __slots__ = ()


class _Record(NamedTuple):
    """The value of a named tuple."""

    fields: list[str]
    values: tuple[Any, ...]


class _BatchEncoder:
    """The encoder of one batch: converts it to nodes, and lists the leaves, whose nodes get offsets at the end."""

    def __init__(self) -> None:
        self._path: list[Any] = []
        self._containers: list[Any] = []
        self._indices: dict[int, int] = {}
        self._remembered: list[Any] = []
        self._layouts: dict[type, instances.Layout] = {}
        self.leaves: list[Leaf] = []
        self._num_objects = 0

    def node(self, obj: Any) -> Any:
        self._num_objects += 1
        encode_kind = _ENCODERS.get(type(obj))
        return self._other(obj) if encode_kind is None else encode_kind(self, obj)

    def _plain(self, obj: Any) -> Any:
        return obj

    def _int(self, obj: int) -> Any:
        return obj if -batch_format.INT64 <= obj < batch_format.INT64 else ["i", hex(obj)]

    def _float(self, obj: float) -> Any:
        return obj if math.isfinite(obj) else ["f", struct.pack("<d", obj).hex()]

    def _complex(self, obj: complex) -> Any:
        return ["c", struct.pack("<dd", obj.real, obj.imag).hex()]

    def _str(self, obj: str) -> Any:
        try:
            obj.encode()
        except UnicodeEncodeError:
            # JSON would combine two lone surrogates into one character.
            return ["s", obj.encode("utf-8", "surrogatepass").hex()]
        return obj

    def _bytes(self, obj: bytes) -> Any:
        if len(obj) <= _MAX_INLINE_BYTES:
            return ["b", base64.b64encode(obj).decode("ascii")]
        return self._once(obj, self._large_bytes)

    def _bytearray(self, obj: bytearray) -> Any:
        return self._once(obj, self._large_bytes)

    def _large_bytes(self, obj: Any) -> Any:
        address = np.frombuffer(obj, np.uint8).ctypes.data
        return self._leaf(Leaf(["B" if type(obj) is bytes else "A", 0, len(obj)], obj, address, len(obj), len(obj)))

    def _list(self, obj: Any) -> Any:
        return [_SEQUENCES[type(obj)], *self._children(obj, enumerate(obj))]

    def _record(self, obj: _Record) -> Any:
        return ["u", *self._children(obj, zip(map(_Attribute, obj.fields), obj.values, strict=True))]

    def _set(self, obj: Any) -> Any:
        return [_SETS[type(obj)], *self._children(obj, ((item, self._key(item)) for item in obj))]

    def _deque(self, obj: deque[Any]) -> Any:
        return ["deque", obj.maxlen, *self._children(obj, enumerate(obj))]

    def _dict(self, obj: Any) -> Any:
        return ["d", *self._items(obj)]

    def _ordered_dict(self, obj: OrderedDict[Any, Any]) -> Any:
        layout = instances.layout_of(OrderedDict)
        if layout is not None and instances.attributes(obj, layout):
            return self._instance(obj, layout)
        return ["o", *self._items(obj)]

    def _default_dict(self, obj: defaultdict[Any, Any]) -> Any:
        name = next((name for name, kind in batch_format.FACTORIES.items() if kind is obj.default_factory), None)
        return self._dict(obj) if name is None else ["default", name, *self._items(obj)]

    def _items(self, obj: Any) -> Iterable[Any]:
        # All keys before all values, as in decoding: both number the remembered objects in this order.
        keys = self._children(obj, ((key, self._key(key)) for key in obj))
        values = self._children(obj, obj.items())
        return chain.from_iterable(zip(keys, values, strict=True))

    def _key(self, key: Any) -> Any:
        if not batch_format.is_key(key):
            self._fail(f"has the key {reprlib.repr(key)} of type {type(key).__qualname__}, which cannot be sent.")
        return key

    def _range(self, obj: Any) -> Any:
        bounds = ((_Attribute(name), getattr(obj, name)) for name in ("start", "stop", "step"))
        return [type(obj).__name__, *self._children(obj, bounds)]

    def _any_tensor(self, obj: torch.Tensor) -> Any:
        layout = instances.layout_of(type(obj)) if vars(obj) else None
        return self._bare_tensor(obj) if layout is None else self._once(obj, lambda obj: self._instance(obj, layout))

    def _bare_tensor(self, obj: torch.Tensor) -> Any:
        is_dense = obj.layout == torch.strided and not obj.is_nested
        return self._once(obj, self._tensor) if is_dense else self._other(obj)

    def _tensor(self, obj: torch.Tensor) -> Any:
        if (
            obj.device.type != "cpu"
            or obj.dtype not in batch_format.NAMES_OF_DTYPES
            or obj.dim() > batch_format.MAX_DIMENSIONS
        ):
            kind = f"{obj.dtype} on {obj.device} with {obj.dim()} dimensions"
            self._fail(f"is a tensor that cannot be sent ({kind}). Dequantize it or move it to the CPU in collate_fn.")
        self._check_gradient(obj)
        flags = batch_format.REQUIRES_GRAD if obj.requires_grad else 0
        if isinstance(obj, torch.nn.Parameter):
            flags |= batch_format.IS_PARAMETER
        itemsize = obj.element_size()
        size = obj.numel() * itemsize
        span = size
        node = ["t", 0, batch_format.NAMES_OF_DTYPES[obj.dtype], list(obj.shape), None, flags]
        if size and not obj.is_contiguous():
            node[4] = list(obj.stride())
            span = itemsize * (1 + sum((n - 1) * step for n, step in zip(obj.shape, obj.stride(), strict=True)))
        if obj.is_conj() or obj.is_neg():
            span = 0  # the memory does not have the values: copy them
        address = 0
        with suppress(RuntimeError):
            address = obj.data_ptr()
        if size and not address:  # its class stands for other tensors
            self._fail("is a tensor without memory of its own, which cannot be sent. Convert it in collate_fn.")
        return self._leaf(Leaf(node, obj, address, span, size, min(itemsize, 8)))

    def _array(self, obj: Any) -> Any:
        return self._once(obj, self._new_array)

    def _new_array(self, obj: npt.NDArray[Any]) -> Any:
        node = ["a", 0, self._dtype(obj.dtype), list(obj.shape), None]
        span = obj.nbytes
        if not obj.dtype.itemsize:
            self._fail(f"is an array of dtype {obj.dtype}, which has no bytes.")
        if obj.size and not obj.flags.c_contiguous:
            strides = [step if n > 1 else 0 for n, step in zip(obj.shape, obj.strides, strict=True)]
            node[4] = strides
            span = obj.itemsize + sum((n - 1) * step for n, step in zip(obj.shape, strides, strict=True))
            if min(strides) < 0:
                span = 0  # the memory starts before the array's address: copy the array
        return self._leaf(Leaf(node, obj, obj.__array_interface__["data"][0], span, obj.nbytes))

    def _dtype(self, dtype: Any, level: int = 0) -> Any:
        if dtype.names is not None and dtype.type is np.void and level < batch_format.MAX_DTYPE_LEVELS:
            fields = []
            for name in dtype.names:
                field, offset = dtype.fields[name][:2]
                base, shape = field.subdtype or (field, ())
                fields.append([name, self._dtype(base, level + 1), offset, list(shape)])
            return [dtype.itemsize, *fields]
        if dtype.names is None and batch_format.ARRAY_DTYPE.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
            return dtype.str
        return self._fail(f"is a NumPy object of dtype {dtype}, which cannot be sent. Convert it in collate_fn.")

    def _other(self, obj: Any) -> Any:
        cls = type(obj)
        if cls in self._layouts:
            return self._instance(obj, self._layouts[cls])
        if isinstance(obj, torch.Tensor):
            self._check_gradient(obj)
        if (converter := batch_types.converter_of(obj)) is not None:
            return self._once(obj, lambda obj: self._registered(obj, *converter))
        if isinstance(obj, np.generic) and cls is obj.dtype.type:
            return ["n", self._dtype(obj.dtype), obj.tobytes()[: obj.dtype.itemsize].hex()]
        if isinstance(obj, Enum) and obj.name in cls.__members__:
            return ["e", class_name(cls), obj.name]
        layout = instances.layout_of(cls)
        if layout is None or is_hidden(cls):
            self._fail(f"is a {class_name(cls).replace(':', '.')}, which cannot be sent. {batch_types.advice(cls)}")
        if layout.base is torch.Tensor:
            return self._once(obj, lambda obj: self._instance(obj, layout))
        self._layouts[cls] = layout
        return self._instance(obj, layout)

    def _instance(self, obj: Any, layout: instances.Layout) -> Any:
        """Encode the plain value of an object and its attributes."""
        base: Any = None
        if layout.base is torch.Tensor:
            base = self._bare_tensor(instances.plain_value(obj, layout.base))
        elif layout.base is not None:
            plain = instances.plain_value(obj, layout.base)
            if layout.base is tuple and layout.fields is not None:
                plain = _Record(layout.fields, plain)
            (base,) = self._children(obj, [(_Attribute(), plain)])
        values = instances.attributes(obj, layout)
        if not all(type(name) is str for name in values):
            self._fail(f"has attributes whose names are not strings: {reprlib.repr(list(values))}.")
        if missing := sorted(layout.required - set(values)):
            self._fail(f"has no value in its field {missing[0]}.")
        nodes = self._children(obj, ((_Attribute(name), value) for name, value in values.items())) if values else []
        return ["x", class_name(type(obj)), layout.fields, base, list(values), nodes]

    def _check_gradient(self, obj: torch.Tensor) -> None:
        if obj.requires_grad and not obj.is_leaf:
            self._fail(
                "is a tensor that requires gradients and was computed from others, which cannot be sent: the "
                "computation stays on the data host. Call detach() on it, or compute it within torch.no_grad()."
            )

    def _registered(self, obj: Any, name: str, to_parts: Callable[[Any], Any]) -> Any:
        try:
            parts = to_parts(obj)
        except Exception as error:
            message = f"to_parts() of {name} failed: {type(error).__name__}: {error}"
            raise BatchTypeError(f"{self._where()}: {message}") from error
        return ["p", name, *self._children(obj, [(_Attribute("parts"), parts)])]

    def _once(self, obj: Any, encode_new: Callable[[Any], Any]) -> Any:
        if (index := self._indices.get(id(obj))) is not None:
            return ["r", index]
        node = encode_new(obj)
        # The list keeps the object: a part of a registered type could be freed, and another object get its id.
        self._indices[id(obj)] = len(self._remembered)
        self._remembered.append(obj)
        return node

    def _children(self, container: Any, items: Iterable[tuple[Any, Any]]) -> list[Any]:
        if len(self._containers) >= batch_format.MAX_DEPTH:
            contains_itself = any(container is parent for parent in self._containers)
            self._fail(
                "contains itself." if contains_itself else f"is nested deeper than {batch_format.MAX_DEPTH} levels."
            )
        if self._num_objects > _MAX_OBJECTS:
            raise BatchTooLargeError(f"A batch has more than {_MAX_OBJECTS} objects. Convert its numbers to tensors.")
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


def _step(step: Any) -> str:
    if isinstance(step, _Attribute):
        return f".{step}" if step else ""
    return f"[{json.dumps(step, ensure_ascii=False)}]" if type(step) is str else f"[{reprlib.repr(step)}]"


_SEQUENCES: dict[type, str] = {list: "l", tuple: "u", torch.Size: "size"}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_ENCODERS: dict[type, Callable[[_BatchEncoder, Any], Any]] = {
    type(None): _BatchEncoder._plain,
    bool: _BatchEncoder._plain,
    int: _BatchEncoder._int,
    float: _BatchEncoder._float,
    complex: _BatchEncoder._complex,
    str: _BatchEncoder._str,
    bytes: _BatchEncoder._bytes,
    _Record: _BatchEncoder._record,
    range: _BatchEncoder._range,
    slice: _BatchEncoder._range,
    bytearray: _BatchEncoder._bytearray,
    dict: _BatchEncoder._dict,
    OrderedDict: _BatchEncoder._ordered_dict,
    defaultdict: _BatchEncoder._default_dict,
    deque: _BatchEncoder._deque,
    np.ndarray: _BatchEncoder._array,
    np.memmap: _BatchEncoder._array,
    torch.Tensor: _BatchEncoder._any_tensor,
    torch.nn.Parameter: _BatchEncoder._any_tensor,
    **dict.fromkeys(_SEQUENCES, _BatchEncoder._list),
    **dict.fromkeys(_SETS, _BatchEncoder._set),
}
