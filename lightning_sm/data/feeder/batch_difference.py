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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_sm.errors import WireError

_TENSOR_BITS = re.compile(r"[a-z]+(\d+)")
# x87 extended precision: 10 bytes, and padding of any content.
_EXTENDED_BYTES = 10
_HAS_EXTENDED = np.finfo(np.longdouble).nmant == 63  # noqa: PLR2004  # the mantissa of x87

_COMPARED_BYTES = 1 << 18

_KINDS_OF_SCALARS = {"i": "int", "f": "float", "s": "str", "b": "bytes", "c": "complex"}


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
    try:
        side = _Side.of(first)
        if first.structure == second.structure:
            other = side._replace(data=second.data)
            if _have_equal_leaves(side, other):
                return None
        else:
            other = _Side.of(second)
        inexact = None
        for found in _BuildComparison(side, other, num_samples).nodes(side.tree, other.tree, "batch", ()):
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


class _ComparedLeaf(NamedTuple):
    """A tensor, array, NumPy scalar or long bytes object.

    Attributes:
        description: Everything about it that must be equal, for messages.
        dtype: The NumPy dtype of the elements; None: NumPy has none.
        shape: Its shape.
        elements: The bytes of the elements, of shape (elements, bytes of one).
        parts: What is compared of each element.
    """

    description: str
    dtype: Any
    shape: list[int]
    elements: npt.NDArray[np.uint8]
    parts: list[_Part]


class _Side(NamedTuple):
    """One of the two builds.

    Attributes:
        tree: The nodes of its header.
        data: The bytes of its leaves.
        remembered: Nodes to which others refer, in the order of ``encode``.
    """

    tree: Any
    data: npt.NDArray[np.uint8]
    remembered: list[Any]

    @classmethod
    def of(cls, build: BatchBuild) -> _Side:
        tree = json.loads(build.structure)[3]
        return cls(tree, build.data, list(_remembered(tree)))

    def resolve(self, node: Any) -> Any:
        """Return a node, or the one to which it refers."""
        return self.remembered[node[1]] if _kind(node) == "r" else node

    def leaf(self, node: list[Any]) -> _ComparedLeaf:
        """Return the leaf of a node."""
        kind = node[0]
        if kind == "t":
            _, offset, name, shape, strides, flags = node
            item_bytes = _tensor_item_bytes(name)
            dtype = np.dtype(name) if hasattr(np, name) else None
            parts = [_Part("", 0, item_bytes, is_inexact="float" in name or "complex" in name)]
            if strides is not None:
                strides = [step * item_bytes for step in strides]
            more = f" with flags {flags}" if flags else ""
            description = f"a tensor of {name}, shape {tuple(shape)}{more}"
        else:
            _, offset, dtype_description, shape, strides = node
            dtype = _array_dtype(dtype_description)
            item_bytes = dtype.itemsize
            parts = _parts(dtype)
            description = f"an array of {dtype}, shape {tuple(shape)}"
        # As one opaque item each: this works for every dtype, and also for what NumPy has none for.
        array: Any = np.ndarray(shape, f"V{item_bytes}", self.data, offset if 0 not in shape else 0, strides)
        elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, item_bytes)
        return _ComparedLeaf(description, dtype, shape, elements, parts)

    def long_bytes(self, node: list[Any]) -> bytes:
        """Return the bytes object of a node."""
        _, offset, length = node
        return self.data[offset : offset + length].tobytes()

    def plain(self, node: Any) -> Any:
        """Return a key of a dict, or a member of a set, without references and offsets."""
        node = self.resolve(node)
        if _kind(node) in ("B", "A"):
            return ["b", base64.b64encode(self.long_bytes(node)).decode("ascii")]
        return [self.plain(item) for item in node] if type(node) is list else node

    def plain_text(self, node: Any) -> str:
        """Return ``plain`` as text that is equal only for equal keys of the same type."""
        return json.dumps(self.plain(node))


def _remembered(node: Any) -> Iterator[Any]:
    """Yield the nodes that others may refer to, in the order in which ``encode`` numbers them."""
    match node:
        case ["t" | "a" | "B" | "A", *_]:
            yield node
        case ["p", _, parts]:
            yield from _remembered(parts)
            yield node
        case ["x", _, _, base, _, [*values]]:
            for item in (base, *values):
                yield from _remembered(item)
            if _kind(base) in ("t", "p"):  # a subclass of a tensor
                yield node
        case ["d" | "o", *items] | ["default", _, *items]:
            for item in (*items[::2], *items[1::2]):
                yield from _remembered(item)
        case ["l" | "u" | "set" | "frozenset" | "slice", *items] | ["deque", _, *items]:
            for item in items:
                yield from _remembered(item)


def _have_equal_leaves(first: _Side, second: _Side) -> bool:
    """Return whether all leaves of two builds with equal headers are equal, without a look at any other node."""
    for node in first.remembered:
        if node[0] in ("B", "A"):
            if first.long_bytes(node) != second.long_bytes(node):
                return False
        elif node[0] not in ("p", "x"):
            own, other = first.leaf(node), second.leaf(node)
            if any(_different_elements(own, other, part).any() for part in own.parts):
                return False
    return True


class _BuildComparison(NamedTuple):
    first: _Side
    second: _Side
    num_samples: int

    def nodes(self, one: Any, two: Any, path: str, rows: tuple[int, ...]) -> Iterator[BatchDifference]:
        """Yield the differences of two nodes, which are ``rows`` of the batch or (empty) any part of it."""
        one, two = self.first.resolve(one), self.second.resolve(two)
        kind = _kind(one)
        if kind != _kind(two):
            yield self._different(one, two, path, rows)
        elif kind in ("t", "a"):
            yield from self._arrays(self.first.leaf(one), self.second.leaf(two), path, rows)
        elif kind == "n":
            yield from self._arrays(_scalar_leaf(one), _scalar_leaf(two), path, rows)
        elif kind in ("float", "complex"):
            if _float_bits(one) != _float_bits(two):
                yield self._different(one, two, path, rows)._replace(is_inexact=True)
        elif kind in ("l", "u"):
            yield from self._lists(one, two, path, rows)
        elif kind in ("d", "o"):
            yield from self._dicts(one, two, path, rows)
        elif kind in ("deque", "default"):
            if one[1] != two[1]:  # the maximum length, or the default factory
                yield self._different(one, two, path, rows)
                return
            compare = self._lists if kind == "deque" else self._dicts
            yield from compare(one[1:], two[1:], path, rows)
        elif kind in ("x", "p"):
            yield from self._objects(one, two, path, rows)
        elif not self._is_equal(kind, one, two):
            yield self._different(one, two, path, rows)

    def _different(self, one: Any, two: Any, path: str, rows: tuple[int, ...]) -> BatchDifference:
        return BatchDifference(path, (_text(self.first, one), _text(self.second, two)), rows=rows)

    def _is_equal(self, kind: str, one: Any, two: Any) -> bool:
        """Compare nodes without leaves of their own."""
        if kind in ("B", "A"):
            return self.first.long_bytes(one) == self.second.long_bytes(two)
        if kind in ("set", "frozenset"):
            members = sorted(map(self.first.plain_text, one[1:]))
            return members == sorted(map(self.second.plain_text, two[1:]))
        return self.first.plain_text(one) == self.second.plain_text(two)

    def _lists(self, one: list[Any], two: list[Any], path: str, rows: tuple[int, ...]) -> Iterator[BatchDifference]:
        if len(one) != len(two):
            yield self._different(one, two, path, rows)
            return
        has_rows = len(one) - 1 == self.num_samples and not rows
        for position, (child, other) in enumerate(zip(one[1:], two[1:], strict=True)):
            yield from self.nodes(child, other, f"{path}[{position}]", (position,) if has_rows else rows)

    def _dicts(self, one: list[Any], two: list[Any], path: str, rows: tuple[int, ...]) -> Iterator[BatchDifference]:
        keys = [self.first.plain_text(key) for key in one[1::2]]
        if keys != [self.second.plain_text(key) for key in two[1::2]]:
            yield self._different(one, two, path, rows)
            return
        for key, value, other in zip(one[1::2], one[2::2], two[2::2], strict=True):
            text = json.dumps(key, ensure_ascii=False) if type(key) is str else _text(self.first, key)
            yield from self.nodes(value, other, f"{path}[{text}]", rows)

    def _objects(self, one: list[Any], two: list[Any], path: str, rows: tuple[int, ...]) -> Iterator[BatchDifference]:
        """Compare objects of known classes (value and attributes), or of registered ones (their parts)."""
        if one[1] != two[1] or (one[0] == "x" and (one[2], one[4]) != (two[2], two[4])):
            yield self._different(one, two, path, rows)
        elif one[0] == "p":
            yield from self.nodes(one[2], two[2], f"{path}.parts", rows)
        else:
            yield from self.nodes(one[3], two[3], path, rows)
            # Attributes of tensors are notes beside the data: MONAI's MetaTensor has ids of Python objects there.
            is_note = _kind(one[3]) in ("t", "p")
            for name, value, other in zip(one[4], one[5], two[5], strict=True):
                for found in self.nodes(value, other, f"{path}.{name}", rows):
                    yield found._replace(is_inexact=True) if is_note else found

    def _arrays(
        self, one: _ComparedLeaf, two: _ComparedLeaf, path: str, rows: tuple[int, ...]
    ) -> Iterator[BatchDifference]:
        if one.description != two.description:
            yield BatchDifference(path, (one.description, two.description), rows=rows)
            return
        for part in one.parts:
            places = np.flatnonzero(_different_elements(one, two, part))
            if not len(places):
                continue
            index = [int(position) for position in np.unravel_index(places[0], one.shape)] if one.shape else []
            texts = [_element_text(leaf, int(places[0]), part) for leaf in (one, two)]
            if one.shape and one.shape[0] == self.num_samples and not rows:
                size = len(one.elements) // one.shape[0]
                rows = tuple(np.unique(places // size).tolist())
            yield BatchDifference(
                path + (f"[{', '.join(map(str, index))}]" if index else "") + part.field,
                _distinct(texts, one, two, int(places[0])),
                is_inexact=part.is_inexact,
                rows=rows,
                num_different=len(places),
                num_elements=len(one.elements),
            )


def _kind(node: Any) -> str:
    """Return the kind of a node; a scalar has the name of its type, in whichever way it is written."""
    if type(node) is not list:
        return type(node).__name__
    kind: str = node[0]
    return _KINDS_OF_SCALARS.get(kind, kind)


def _float_bits(node: Any) -> str:
    if type(node) is list:
        text: str = node[1]
        return text
    return struct.pack("<d", node).hex()


def _different_elements(one: _ComparedLeaf, two: _ComparedLeaf, part: _Part) -> npt.NDArray[np.bool_]:
    """Return which elements differ in a part, of shape (elements,)."""
    if part.size == one.elements.shape[1] and _has_equal_bytes(one, two):
        return np.zeros(len(one.elements), np.bool_)
    columns = slice(part.start, part.start + part.size)
    different: npt.NDArray[np.bool_] = np.any(one.elements[:, columns] != two.elements[:, columns], axis=1)
    return different


def _has_equal_bytes(one: _ComparedLeaf, two: _ComparedLeaf) -> bool:
    """Return whether all bytes are equal: in pieces that stay in the caches, and in words of 8 bytes."""
    first, second = one.elements.reshape(-1), two.elements.reshape(-1)
    for start in range(0, len(first), _COMPARED_BYTES):
        pieces: list[npt.NDArray[Any]] = [each[start : start + _COMPARED_BYTES] for each in (first, second)]
        if len(pieces[0]) % 8 == 0:
            pieces = [piece.view(np.uint64) for piece in pieces]
        if not np.array_equal(pieces[0], pieces[1]):
            return False
    return True


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


def _scalar_leaf(node: list[Any]) -> _ComparedLeaf:
    _, dtype_description, text = node
    dtype = _array_dtype(dtype_description)
    elements = np.frombuffer(bytes.fromhex(text).ljust(dtype.itemsize, b"\0"), np.uint8).reshape(1, -1)
    return _ComparedLeaf(f"a NumPy scalar of {dtype}", dtype, [], elements, _parts(dtype))


# Texts for messages


def _element_text(leaf: _ComparedLeaf, place: int, part: _Part) -> str:
    raw = leaf.elements[place].tobytes()
    if leaf.dtype is None or leaf.dtype.names is not None or not raw:
        return f"0x{raw[part.start : part.start + part.size][::-1].hex()}"
    return _short(np.frombuffer(raw, leaf.dtype)[0].item())


def _distinct(texts: Iterable[str], one: _ComparedLeaf, two: _ComparedLeaf, place: int) -> tuple[str, str]:
    """Return texts of two elements, with their bits if they look the same."""
    first, second = texts
    if first != second:
        return first, second
    bits = [leaf.elements[place].tobytes()[::-1].hex() for leaf in (one, two)]
    return f"{first} (0x{bits[0]})", f"{second} (0x{bits[1]})"


def _text(side: _Side, node: Any) -> str:
    """Return what a node stands for: scalars as Python writes them, containers by kind and size."""
    if type(node) is not list:
        return _short(node)
    to_text = _TEXTS.get(node[0])
    return f"{node[0]}{tuple(node[1:])}" if to_text is None else to_text(side, node)


def _sequence_text(_side: _Side, node: list[Any]) -> str:
    return f"a {'list' if node[0] == 'l' else 'tuple'} of length {len(node) - 1}"


def _set_text(side: _Side, node: list[Any]) -> str:
    members = _short(sorted(map(side.plain_text, node[1:])))
    return f"a {node[0]} of {len(node) - 1} items: {members}"


def _dict_text(side: _Side, node: list[Any]) -> str:
    return f"a dict with the keys {_short([side.plain(key) for key in node[1::2]])}"


def _scalar_text(_side: _Side, node: list[Any]) -> str:
    leaf = _scalar_leaf(node)
    return _element_text(leaf, 0, leaf.parts[0])


_TEXTS: dict[str, Callable[[_Side, list[Any]], str]] = {
    "t": lambda side, node: side.leaf(node).description,
    "a": lambda side, node: side.leaf(node).description,
    "n": _scalar_text,
    "B": lambda side, node: _short(side.long_bytes(node)),
    "A": lambda side, node: _short(side.long_bytes(node)),
    "i": lambda _, node: _short(node[1]),
    "f": lambda _, node: repr(struct.unpack("<d", bytes.fromhex(node[1]))[0]),
    "c": lambda _, node: repr(complex(*struct.unpack("<dd", bytes.fromhex(node[1])))),
    "s": lambda _, node: _short(bytes.fromhex(node[1]).decode("utf-8", "surrogatepass")),
    "b": lambda _, node: _short(base64.b64decode(node[1])),
    "l": _sequence_text,
    "u": _sequence_text,
    "deque": lambda _, node: f"a deque of length {len(node) - 2} (maxlen={node[1]})",
    "default": lambda side, node: f"a defaultdict of {node[1]}, {_dict_text(side, ['d', *node[2:]])}",
    "set": _set_text,
    "frozenset": _set_text,
    "d": _dict_text,
    "o": _dict_text,
    "e": lambda _, node: f"{node[1]}.{node[2]}",
    "x": lambda _, node: f"an object of {node[1]}",
    "p": lambda _, node: f"an object of {node[1]}",
}


def _short(value: Any) -> str:
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120
_REPR.maxlist = 20
