"""The difference between two builds of a batch, bit for bit. Pure functions, without torch; see ``batch.format``.

What does not belong to the batch is not compared: where a leaf lies in its slot, the bytes between leaves, which leaves
share memory, the order of a set.
"""

from __future__ import annotations

import base64
import json
import re
import reprlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_sm.errors import WireError

_TENSOR_BITS = re.compile(r"[a-z]+(\d+)")
# x87 extended precision: 10 bytes, and padding of any content.
_EXTENDED_BYTES = 10
_HAS_EXTENDED = np.finfo(np.longdouble).nmant == 63  # noqa: PLR2004  # the mantissa of x87


class BatchBuild(NamedTuple):
    """A batch as a worker built it: the header from ``encode``, and the bytes of its leaves, uint8."""

    structure: bytes
    data: npt.NDArray[np.uint8]


class BatchDifference(NamedTuple):
    """A part of a batch that differs between two builds.

    Attributes:
        path: Its place, ``batch["label"]``; with the position of the first element that differs, if it is an array.
        texts: What each build has there.
        is_inexact: Whether both have floating-point or complex numbers of the same type and shape there.
        rows: Positions of the samples in the batch that differ; empty: unknown.
        num_different: Number of elements that differ.
        num_elements: Number of elements.
    """

    path: str
    texts: tuple[str, str]
    is_inexact: bool = False
    rows: tuple[int, ...] = ()
    num_different: int = 1
    num_elements: int = 1


def difference(first: BatchBuild, second: BatchBuild, num_samples: int) -> BatchDifference | None:
    """Return the gravest difference: the first that is not of floating-point numbers, or else the first; None: equal.

    NaN equals NaN of the same bits; 0.0 and -0.0 are different floating-point numbers.

    Args:
        first: One build.
        second: The other.
        num_samples: Samples in the batch. Arrays and lists of this length have an item for each sample.

    Raises:
        WireError: A build is malformed.
    """
    # An arena fills the space between leaves with zeros, so equal builds have equal bytes.
    if first.structure == second.structure and np.array_equal(first.data, second.data):
        return None
    inexact = None
    try:
        for found in _differences(_BuildReader(first).root(), _BuildReader(second).root(), "batch", (), num_samples):
            if not found.is_inexact:
                return found
            inexact = inexact or found
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, struct.error, RecursionError) as error:
        raise WireError(f"a batch is malformed: {type(error).__name__}: {error}") from error
    return inexact


class _Part(NamedTuple):
    """A part of each element of an array: its field, its bytes, and whether they are of a floating-point number."""

    field: str
    start: int
    size: int
    is_inexact: bool


class _Array(NamedTuple):
    """A tensor, array or NumPy scalar.

    Attributes:
        text: What it is, for messages.
        description: Everything about it that must be equal, besides its elements.
        dtype: The NumPy dtype of the elements; None: NumPy has none.
        items: The elements, each as one opaque item: this works for every dtype, also for what NumPy has none for.
        parts: What is compared of each element.
    """

    text: str
    description: str
    dtype: Any
    items: npt.NDArray[Any]
    parts: list[_Part]

    @property
    def key(self) -> Any:
        """Equal for equal ones."""
        return self.description, self.items.tobytes()

    def elements(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the elements, of shape (elements, bytes of one)."""
        raw = np.ascontiguousarray(self.items).reshape(-1).view(np.uint8)
        return raw.reshape(-1, self.items.itemsize)


class _Value(NamedTuple):
    """A value without parts that are compared by themselves.

    Attributes:
        kind: Name of its type.
        text: What it is, for messages.
        content: Equal for equal values of this kind.
    """

    kind: str
    text: str
    content: Any

    @property
    def key(self) -> Any:
        """Equal for equal ones."""
        return self.kind, self.content


class _Container(NamedTuple):
    """A list, dict or object.

    Attributes:
        kind: Which of these.
        text: What it is, for messages.
        own: What must be equal besides the children: the keys of a dict, the class of an object.
        steps: The places of the children: numbers, or parts of a path.
        children: The children.
    """

    kind: str
    text: str
    own: Any
    steps: Sequence[int | str]
    children: list[Any]

    @property
    def frame(self) -> Any:
        """What must be equal besides the children."""
        return self.kind, self.own, self.steps

    @property
    def key(self) -> Any:
        """Equal for equal ones."""
        return self.kind, self.own, tuple(_part(child).key for child in self.children)


_BatchPart: TypeAlias = _Array | _Value | _Container

_SEQUENCES = {"l": "list", "u": "tuple", "deque": "deque"}
# An object whose attributes are notes beside the data: MONAI's MetaTensor has ids of Python objects there.
_TENSOR_WITH_NOTES = "tensor_with_attributes"


class _BuildReader:
    """The parts of a build: references become what they refer to, and scalars of JSON stay as they are.

    Args:
        build: The build.
    """

    def __init__(self, build: BatchBuild) -> None:
        self._build = build
        self._remembered: list[Any] = []  # in the order in which ``encode`` numbers them

    def root(self) -> Any:
        """Return the batch."""
        return self._read(json.loads(self._build.structure)[3])

    def _read(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        kind, *items = node
        if kind == "r":
            return self._remembered[items[0]]
        read = _READERS.get(kind)
        found: Any = self._collection(kind, items) if read is None else read(self, *items)
        if kind in ("t", "a", "B", "A", "p") or (kind == "x" and found.kind == _TENSOR_WITH_NOTES):
            self._remembered.append(found)
        return found

    def _collection(self, kind: str, items: list[Any]) -> _BatchPart:
        length = items.pop(0) if kind == "deque" else None
        children = [self._read(item) for item in items]
        if kind in _SEQUENCES:
            more = "" if kind != "deque" else f" (maxlen={length})"
            text = f"a {_SEQUENCES[kind]} of length {len(items)}{more}"
            return _Container(kind, text, length, range(len(items)), children)
        if kind in ("set", "frozenset"):
            members = _listed(sorted(map(_key_text, children)))
            key = sorted(repr(_part(child).key) for child in children)
            return _Value(kind, f"a {kind} of {len(items)} items: {members}", key)
        parts = [_part(child) for child in children]
        return _Value(kind, f"{kind}({', '.join(one.text for one in parts)})", [one.key for one in parts])

    def _bytes(self, offset: int, length: int) -> bytes:
        return self._build.data[offset : offset + length].tobytes()

    def _tensor(self, offset: int, name: str, shape: list[int], strides: list[int] | None, flags: int) -> _Array:
        item_bytes = _tensor_item_bytes(name)
        more = f" with flags {flags}" if flags else ""
        text = f"a tensor of {name}, shape {tuple(shape)}{more}"
        part = _Part("", 0, item_bytes, is_inexact="float" in name or "complex" in name)
        steps = None if strides is None else [step * item_bytes for step in strides]
        dtype = np.dtype(name) if hasattr(np, name) else None
        return _Array(text, text, dtype, self._items(offset, item_bytes, shape, steps), [part])

    def _numpy_array(self, offset: int, described: Any, shape: list[int], strides: list[int] | None) -> _Array:
        dtype = _array_dtype(described)
        text = f"an array of {dtype}, shape {tuple(shape)}"
        return _Array(text, text, dtype, self._items(offset, dtype.itemsize, shape, strides), _parts(dtype))

    def _items(self, offset: int, item_bytes: int, shape: list[int], strides: Any) -> npt.NDArray[Any]:
        return np.ndarray(shape, f"V{item_bytes}", self._build.data, offset if 0 not in shape else 0, strides)

    def _mapping(self, name: str, items: Sequence[Any]) -> _Container:
        keys = [self._read(key) for key in items[::2]]
        children = [self._read(value) for value in items[1::2]]
        text = f"{name} with the keys {_listed(map(_key_text, keys))}"
        steps = [f"[{json.dumps(key, ensure_ascii=False) if type(key) is str else _key_text(key)}]" for key in keys]
        return _Container(name, text, [_part(key).key for key in keys], steps, children)

    def _registered(self, name: str, parts: Any) -> _Container:
        return _Container("p", f"an object of {name}", name, [".parts"], [self._read(parts)])

    def _instance(self, name: str, fields: Any, base: Any, names: list[str], values: list[Any]) -> _Container:
        kind = _TENSOR_WITH_NOTES if type(base) is list and base[0] in ("t", "p") else "x"
        children = [self._read(item) for item in (base, *values)]
        return _Container(kind, f"an object of {name}", (name, fields), ["", *(f".{each}" for each in names)], children)


def _numpy_scalar(described: Any, content: str) -> _BatchPart:
    dtype = _array_dtype(described)
    description = f"a NumPy scalar of {dtype}"
    if not dtype.itemsize:  # empty text, of which NumPy has no items
        return _Value(description, repr(""), content)
    raw = bytes.fromhex(content).ljust(dtype.itemsize, b"\0")
    items = np.frombuffer(raw, f"V{len(raw)}").reshape(())
    found = _Array("", description, dtype, items, _parts(dtype))
    return found._replace(text=_element_text(found, raw, found.parts[0]))


# What reads the kinds of nodes that are no plain collections of others.
_READERS: dict[str, Callable[..., _BatchPart]] = {
    "i": lambda _, digits: _Value("int", _short(digits), digits),
    "f": lambda _, bits: _Value("float", repr(struct.unpack("<d", bytes.fromhex(bits))[0]), bits),
    "c": lambda _, bits: _Value("complex", repr(complex(*struct.unpack("<dd", bytes.fromhex(bits)))), bits),
    "s": lambda _, code: _value(bytes.fromhex(code).decode("utf-8", "surrogatepass")),
    "b": lambda _, code: _value(base64.b64decode(code)),
    "e": lambda _, *names: _Value("enum", ".".join(names), names),
    "n": lambda _, dtype, content: _numpy_scalar(dtype, content),
    "t": _BuildReader._tensor,
    "a": _BuildReader._numpy_array,
    "B": lambda reader, *place: _value(reader._bytes(*place)),
    "A": lambda reader, *place: _value(bytearray(reader._bytes(*place))),
    "d": lambda reader, *items: reader._mapping("a dict", items),
    "o": lambda reader, *items: reader._mapping("an OrderedDict", items),
    "default": lambda reader, factory, *items: reader._mapping(f"a defaultdict of {factory}", items),
    "p": _BuildReader._registered,
    "x": _BuildReader._instance,
}


def _part(value: Any) -> _BatchPart:
    """Return a part that a reader has returned; a scalar of JSON as a value."""
    if isinstance(value, (_Array, _Value, _Container)):
        return value
    content = struct.pack("<d", value).hex() if type(value) is float else value
    return _Value(type(value).__name__, _short(value), content)


def _differences(
    first: Any, second: Any, path: str, rows: tuple[int, ...], num_samples: int
) -> Iterator[BatchDifference]:
    """Yield the differences of two parts, which are ``rows`` of the batch or (empty) any part of it."""
    one, two = _part(first), _part(second)
    if isinstance(one, _Array) and isinstance(two, _Array):
        yield from _array_differences(one, two, path, rows, num_samples)
    elif isinstance(one, _Container) and isinstance(two, _Container) and one.frame == two.frame:
        has_rows = one.kind in _SEQUENCES and len(one.children) == num_samples and not rows
        for place, (step, child, other) in enumerate(zip(one.steps, one.children, two.children, strict=True)):
            child_path = path + (f"[{step}]" if isinstance(step, int) else step)
            child_rows = (place,) if has_rows else rows
            for found in _differences(child, other, child_path, child_rows, num_samples):
                yield found._replace(is_inexact=True) if place and one.kind == _TENSOR_WITH_NOTES else found
    elif isinstance(one, _Value) and isinstance(two, _Value) and one.kind == two.kind:
        if one.content != two.content:
            yield BatchDifference(path, (one.text, two.text), one.kind in ("float", "complex"), rows)
    else:
        yield BatchDifference(path, (one.text, two.text), rows=rows)


def _array_differences(
    one: _Array, two: _Array, path: str, rows: tuple[int, ...], num_samples: int
) -> Iterator[BatchDifference]:
    if one.description != two.description:
        yield BatchDifference(path, (one.description, two.description), rows=rows)
        return
    shape = one.items.shape
    first, second = one.elements(), two.elements()
    for part in one.parts:
        columns = slice(part.start, part.start + part.size)
        places = np.flatnonzero(np.any(first[:, columns] != second[:, columns], axis=1))
        if not len(places):
            continue
        index = [int(position) for position in np.unravel_index(places[0], shape)] if shape else []
        if shape and shape[0] == num_samples and not rows:
            rows = tuple(np.unique(places // (len(first) // shape[0])).tolist())
        yield BatchDifference(
            path + (f"[{', '.join(map(str, index))}]" if index else "") + part.field,
            _distinct(one, part, *(each[places[0]].tobytes() for each in (first, second))),
            is_inexact=part.is_inexact,
            rows=rows,
            num_different=len(places),
            num_elements=len(first),
        )


def _tensor_item_bytes(name: str) -> int:
    """Return the bytes of an element of a torch dtype: its name has their number of bits, ``bits1x8`` those of 8."""
    found = _TENSOR_BITS.match(name)
    return 1 if found is None else max(1, int(found[1]) // 8)


def _array_dtype(description: Any) -> Any:
    """Return the NumPy dtype that a header describes."""
    if type(description) is str:
        return np.dtype(description)
    item_bytes, *fields = description
    make: Any = {
        "names": [name for name, *_ in fields],
        "formats": [(_array_dtype(item), tuple(shape)) for _, item, _, shape in fields],
        "offsets": [offset for _, _, offset, _ in fields],
        "itemsize": item_bytes,
    }
    return np.dtype(make)


def _parts(dtype: Any, field: str = "", start: int = 0) -> list[_Part]:
    """Return the parts of an element that have a meaning: what is between fields has none."""
    if dtype.names is not None:
        parts = []
        for name in dtype.names:
            item, offset = dtype.fields[name][:2]
            parts += _parts(item, f'{field}["{name}"]', start + offset)
        return parts
    base, shape = dtype.subdtype or (dtype, ())
    if base.names is not None:
        number = int(np.prod(shape))
        return [
            part
            for position in range(number)
            for part in _parts(base, f"{field}[{position}]", start + position * base.itemsize)
        ]
    is_inexact = base.kind in "fc"
    if _HAS_EXTENDED and base.char in "gG":
        half = np.dtype(np.longdouble).itemsize
        starts = range(start, start + dtype.itemsize, half)
        return [_Part(field, each, _EXTENDED_BYTES, is_inexact) for each in starts]
    return [_Part(field, start, dtype.itemsize, is_inexact)]


# Texts for messages


def _element_text(array: _Array, raw: bytes, part: _Part) -> str:
    if array.dtype is None or array.dtype.names is not None or not raw:
        return f"0x{raw[part.start : part.start + part.size][::-1].hex()}"
    return _short(np.frombuffer(raw, array.dtype)[0].item())


def _distinct(array: _Array, part: _Part, first: bytes, second: bytes) -> tuple[str, str]:
    """Return texts of two elements, with their bits if they look the same."""
    texts = _element_text(array, first, part), _element_text(array, second, part)
    if texts[0] != texts[1]:
        return texts
    return f"{texts[0]} (0x{first[::-1].hex()})", f"{texts[1]} (0x{second[::-1].hex()})"


def _value(value: Any) -> _Value:
    return _Value(type(value).__name__, _short(value), value)


def _key_text(value: Any) -> str:
    """Return the text of a key of a dict, or of a member of a set, with the items of a tuple."""
    part = _part(value)
    return f"({', '.join(map(_key_text, part.children))})" if isinstance(part, _Container) else part.text


def _listed(texts: Iterable[str]) -> str:
    shown = list(texts)
    return f"[{', '.join(shown[:_NUM_SHOWN])}{', ...' if len(shown) > _NUM_SHOWN else ''}]"


def _short(value: Any) -> str:
    return _REPR.repr(value)


_NUM_SHOWN = 20
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
