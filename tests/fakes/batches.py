"""Batches of every kind that the data service sends, and their way through a header and a slot."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import warnings
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.decode import decode
from lightning_sm.data.batch.encode import encode


class Slot(np.ndarray):
    """What a ring hands out: an array whose end of life is watched."""


class Point(NamedTuple):
    """A named tuple that the trainer has imported."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Box:
    """A dataclass whose __init__ must not run on the trainer."""

    corners: Any
    label: Any = "cat"

    def __post_init__(self):
        if self.label == "from the wire":
            raise AssertionError("__init__ ran")


@dataclasses.dataclass
class Slotted:
    """A dataclass without a dictionary."""

    __slots__ = ("x",)
    x: Any


class Strict:
    """A base class all of whose methods fail while ``armed``: none may run on the trainer."""

    armed = False

    def __new__(cls, *args, **options):
        cls._fail()
        return super().__new__(cls, *args, **options)

    def __init__(self, *args, **options):
        self._fail()
        if not isinstance(self, (int, float, str, tuple, frozenset)):
            super().__init__(*args, **options)

    @classmethod
    def _fail(cls, *_args):
        if Strict.armed:
            raise AssertionError(f"code of {cls.__name__} ran")

    def __setattr__(self, name, value):
        self._fail()
        super().__setattr__(name, value)

    def __setstate__(self, state):
        self._fail()


class Number(Strict, int):
    """A number with attributes."""


class Ratio(Strict, float):
    """A fraction with attributes."""


class Text(Strict, str):  # noqa: SLOT000
    """A text with attributes."""


class Record(Strict, dict):
    """A dictionary with attributes, whose items are set by its own method."""

    def __setitem__(self, key, value):
        self._fail()
        super().__setitem__(key, value)


class Ordered(Strict, OrderedDict):
    """An ordered dictionary whose items are set by its own method."""

    def __setitem__(self, key, value):
        self._fail()
        super().__setitem__(key, value)


class Defaults(Strict, defaultdict):
    """A dictionary with default values and attributes."""


class Items(Strict, list):
    """A list with attributes."""

    def extend(self, values):
        self._fail()
        super().extend(values)


class Window(Strict, deque):
    """A deque with attributes."""


class Pair(Strict, tuple):  # noqa: SLOT001
    """A tuple with attributes."""


class Labels(Strict, set):
    """A set with attributes."""


class FrozenLabels(Strict, frozenset):
    """A frozen set with attributes."""


class NamedPoint(Point):
    """A named tuple that has attributes, too."""


class WithSlots(dict):
    """A dictionary with a slot beside its attributes."""

    __slots__ = ("__dict__", "__hidden", "empty", "unit")

    def __init__(self, items, hidden):
        super().__init__(items)
        self.__hidden = hidden
        self.unit = "mm"
        self.more = [hidden]

    @property
    def hidden(self):
        """The private slot."""
        return self.__hidden

    def __repr__(self):
        return f"{dict(self)} {self.__hidden} {self.unit} {self.more} {hasattr(self, 'empty')}"


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is a dictionary, too, as the outputs of transformers' models are."""

    logits: Any = None

    def __post_init__(self):
        self["logits"] = self.logits


class Volume(torch.Tensor):
    """A tensor with metadata, in the shape of MONAI's: attributes, properties, and functions of torch of its own."""

    armed = False

    @staticmethod
    def __new__(cls, data, meta=None):
        if cls.armed:
            raise AssertionError("__new__ ran")
        return torch.as_tensor(data).as_subclass(cls)

    def __init__(self, data, meta=None):
        super().__init__()
        self._meta = {} if meta is None else meta
        self._applied_operations = []
        self._is_batch = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Copy the metadata to results."""
        if cls.armed:
            raise AssertionError(f"{func} ran")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Volume) and isinstance(args[0], Volume):
            vars(result).update(vars(args[0]))
        return result

    @property
    def meta(self):
        """The metadata."""
        return self._meta

    @meta.setter
    def meta(self, meta):
        raise AssertionError("a property ran")


class Colour(enum.Enum):
    """An enumeration that the trainer has imported."""

    RED = 1


class Opaque:
    """A class that nobody registered."""


def make_slot(nbytes=1 << 20):
    """Return page-aligned memory as an object whose end can be watched."""
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes].view(Slot)


def send(batch, nbytes=1 << 20):
    """Return what arrives: the batch, decoded from a copy of the slot's used bytes."""
    arena = Arena(make_slot(nbytes))
    header = encode(batch, arena)
    received = make_slot(arena.used)
    received[:] = np.frombuffer(arena._memory, np.uint8)[: arena.used]
    return decode(header, received)


def header(tree, used=0, version=1):
    """Return a hand-written header."""
    return json.dumps(["lsm-batch", version, used, tree]).encode()


def quietly(make):
    """Return what ``make`` returns, without torch's advice about prototypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


SCALARS = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    -(2**64),
    10**4000,
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    "",
    "a\x00ü😀",
    "\ud800",
    "\ud83d\ude00",
    b"",
    b"\x00\xff",
    b"x" * 1000,
    1 + 2j,
    complex(-0.0, math.inf),
    range(3, 9, 2),
    slice(None, 4, None),
    Colour.RED,
    torch.Size([2, 3]),
    np.float32(0.1),
    np.int8(-3),
    np.bool_(True),
    np.str_(""),
    np.str_("ü"),
    np.bytes_(b"ab"),
    np.datetime64("2024-02-29T01:02:03", "ms"),
    np.timedelta64(5, "D"),
    np.complex64(1j),
    Path("/data/a b.nii"),
    PurePosixPath("x"),
    PureWindowsPath("c:/x"),
    date(2024, 2, 29),
    time(1, 2, 3, 4, fold=1),
    datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
    datetime(2024, 2, 29, tzinfo=timezone.utc),
    timedelta(-1, 2, 3),
    timezone(timedelta(hours=-3)),
    timezone(timedelta(hours=1), "CET"),
    Decimal("1.50"),
    Decimal("1E+400"),
    bytearray(b""),
    bytearray(b"x" * 1000),
    torch.bfloat16,
    torch.device("cuda:1"),
]


CONTAINERS = [
    [],
    (),
    {},
    set(),
    [[1], (2, [3])],
    {"b": 1, "a": 2},
    {1: "int", 2.5: "float", None: "none", b"x": "bytes", (1, ("a", None)): "tuple", Colour.RED: "enum", "s": "str"},
    {True: 1, "True": 2},
    {np.int64(3): 1},
    OrderedDict([("z", 1), ("a", [2])]),
    {1, "a", (2, 3)},
    frozenset({b"x", None}),
    Point([1], Point(2, 3)),
    Box([1, 2], label="dog"),
    {"l": ["l", 1], "t": ["t", 0, "float32", [10], None, 0]},
    Counter("aab"),
    deque([1, [2]]),
    deque([1, 2], maxlen=3),
    deque(maxlen=0),
    defaultdict(list, b=[1], a=[]),
    UserDict(a=[1]),
    UserList([1, {"a": 2}]),
    Number(2**70),
    Ratio(-0.0),
    Text("\ud800x"),
    Record(b=1, a=[2]),
    Ordered([("z", 1), ("a", [2])]),
    Defaults(list, {"b": 1}),
    Items([1, [2]]),
    Window([1, 2], 2),
    Pair((1, [2])),
    Labels({1, "a"}),
    FrozenLabels({(1, 2)}),
    NamedPoint(1, [2]),
    WithSlots({"a": 1}, "secret"),
    Output(logits=[1]),
]


def every_dtype():
    """Yield every dtype of torch that the codec knows, with some tensor of it."""
    names = sorted(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))
    for name in dict.fromkeys(str(getattr(torch, name)).removeprefix("torch.") for name in names):
        if not name.startswith("q"):
            dtype = getattr(torch, name)
            raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
            yield name, raw.view(dtype).view(3, 4)


def sparse_and_nested():
    """Return tensors of every sparse and nested layout."""
    dense = torch.arange(16.0).view(4, 4) * torch.eye(4)
    uncoalesced = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 3))
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 5), (4, 5))
    components = [torch.rand(2, 3), torch.rand(4, 3)]
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": uncoalesced,
        "hybrid": hybrid,
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "nested": torch.nested.nested_tensor(components),
        "nested of scalars": torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)]),
        "nested of nothing": torch.nested.nested_tensor([]),
        "jagged": torch.nested.nested_tensor(components, layout=torch.jagged),
        "grad": dense.to_sparse().requires_grad_(),
    }


STRUCTURED = np.dtype({"names": ["a", "b"], "formats": ["<i4", (">f8", (2,))], "offsets": [4, 16], "itemsize": 40})
ARRAYS = [
    np.array(3.5),
    np.zeros((0, 3), np.int16),
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array([True, False]),
    np.array(["a", "üx"]),
    np.array([b"a", b"xyz"]),
    np.array(["2024-01-01", "NaT"], "datetime64[25m]"),
    np.array([1, 2], "timedelta64"),
    np.array([1j], np.complex64),
    np.arange(3, dtype=np.float16),
    np.arange(2, dtype=np.longdouble),
    np.ones(3, STRUCTURED),
    np.zeros(2, [("x", "i4"), ("y", [("z", "U3")])]),
    np.zeros(2, "V5"),
]
