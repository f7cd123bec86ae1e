"""Batches survive the way through a header and a slot of shared memory."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import math
import struct
import sys
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from lightning_sm.data import batch_types
from lightning_sm.data.arena import Arena
from lightning_sm.data.batch_types import register_batch_type
from lightning_sm.data.decoding import decode
from lightning_sm.data.encoding import encode
from lightning_sm.errors import BatchTooLargeError, BatchTypeError, WireError


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
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{type(value).__name__}-{value!r}"[:40])
def test_scalar_is_unchanged(value):
    """A scalar arrives with its type and its exact value."""
    received = send([value])[0]
    assert type(received) is type(value)
    assert received == value
    assert repr(received) == repr(value)


def test_nan_keeps_its_bits():
    """A NaN arrives as the same NaN, in Python and in NumPy."""
    payload = struct.unpack("<d", bytes.fromhex("0100000000f8ff7f"[:16]))[0]
    received = send([payload, np.float32("nan")])
    assert struct.pack("<d", received[0]) == struct.pack("<d", payload)
    assert np.isnan(received[1])


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
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_container_is_unchanged(value):
    """A container arrives with its type, its order and its items' types."""
    received = send(value)
    assert type(received) is type(value)
    assert received == value
    assert repr(received) == repr(value) or isinstance(value, set | frozenset)


def test_defaultdict_becomes_a_dictionary():
    """The default factory of a defaultdict is code, and stays behind."""
    assert type(send(defaultdict(list, a=[1]))) is dict


def test_dataclass_is_rebuilt_without_its_constructor():
    """A dataclass gets its fields, frozen or slotted, and __init__ does not run."""
    box = copy.copy(Box(torch.ones(2)))
    object.__setattr__(box, "label", "from the wire")
    received = send({"boxes": [box, Slotted(5)]})["boxes"]
    assert received[0].label == "from the wire"
    assert received[0].corners.tolist() == [1, 1]
    assert received[1].x == 5


def every_dtype():
    """Yield every dtype of torch that the codec knows, with some tensor of it."""
    names = sorted(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))
    for name in dict.fromkeys(str(getattr(torch, name)).removeprefix("torch.") for name in names):
        if not name.startswith("q"):
            dtype = getattr(torch, name)
            raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
            yield name, raw.view(dtype).view(3, 4)


@pytest.mark.parametrize(
    ("name", "tensor"), list(every_dtype()), ids=lambda value: value if isinstance(value, str) else " "
)
def test_every_dtype_arrives_bit_for_bit(name, tensor):
    """Tensors of every dtype that lives in CPU memory arrive with dtype, shape and bytes."""
    scalar, empty, transposed, gappy = tensor[1, 1], tensor[:0], tensor.t(), tensor[:, ::2]
    tensors = [tensor, scalar, empty, transposed]
    if tensor.element_size() == 1:
        tensors.append(gappy)
    for sent, received in zip(tensors, send(tensors), strict=True):
        assert received.dtype == sent.dtype
        assert received.shape == sent.shape
        assert raw_bytes(received) == raw_bytes(sent)
    if name not in ("bcomplex32",):
        received = send([gappy])[0]
        assert received.is_contiguous()
        assert raw_bytes(received) == raw_bytes(gappy)


def raw_bytes(tensor):
    """Return the bytes of a tensor's elements in their logical order."""
    rows = tensor.detach()
    if not rows.numel():
        return b""
    itemsize = rows.element_size()
    flat = torch.empty(0, dtype=torch.uint8).set_(rows.untyped_storage()).numpy()
    strides = [step * itemsize for step in rows.stride()]
    view = np.lib.stride_tricks.as_strided(
        flat[rows.storage_offset() * itemsize :], (*rows.shape, itemsize), (*strides, 1), writeable=False
    )
    return view.tobytes()


def test_strides_are_kept_when_dense_and_dropped_when_not():
    """Channels-last and transposed tensors keep their strides, as clone() does; views with gaps become contiguous."""
    image = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    steps, expanded, flipped = torch.arange(10)[::3], torch.ones(1).expand(1000), np.arange(4)[::-1]
    arena = Arena(make_slot())
    received = decode(encode([image, steps, expanded, flipped], arena), np.frombuffer(arena._memory, np.uint8))
    assert received[0].stride() == image.stride()
    assert torch.equal(received[0], image)
    assert received[1].tolist() == [0, 3, 6, 9]
    assert received[2].is_contiguous()
    assert received[2].sum() == 1000
    assert received[3].tolist() == [3, 2, 1, 0]
    assert arena.used < 2 * 3 * 4 * 5 * 4 + 4 * 8 + 4000 + 4 * 8 + 4 * 64


def test_lazy_conjugation_and_negation_are_carried_out():
    """A tensor that is to be conjugated or negated on its next use arrives with its real values."""
    value = torch.tensor([1 + 2j, 3 - 4j])
    conj, imag = send([value.conj(), value.conj().imag])
    assert conj.tolist() == [1 - 2j, 3 + 4j]
    assert imag.tolist() == [-2.0, 4.0]
    assert not conj.is_conj()


def test_gradient_flags_of_leaves_are_restored():
    """A leaf or parameter requires gradients again; what was computed arrives detached."""
    leaf, parameter = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.tensor(3), requires_grad=False)
    received = send([leaf, leaf * 2, parameter, frozen])
    assert [tensor.requires_grad for tensor in received] == [True, False, True, False]
    assert [type(tensor) for tensor in received] == [type(x) for x in (leaf, leaf, parameter, parameter)]
    assert all(tensor.is_leaf for tensor in received)


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


@pytest.mark.parametrize(("name", "tensor"), list(quietly(sparse_and_nested).items()))
def test_sparse_and_nested_tensors_arrive(name, tensor):
    """Sparse and nested tensors keep layout, shape, values and flags, and nothing warns."""
    torch.set_warn_always(True)
    try:
        received = send(tensor)
    finally:
        torch.set_warn_always(False)
    assert received.layout == tensor.layout
    assert received.is_nested == tensor.is_nested
    assert received.requires_grad == tensor.requires_grad
    if tensor.is_nested:
        pairs = zip(received.unbind(), tensor.unbind(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        return
    assert torch.equal(received.detach().to_dense(), tensor.detach().to_dense())
    if tensor.layout == torch.sparse_coo:
        assert received.is_coalesced() == tensor.is_coalesced()
        assert received.sparse_dim() == tensor.sparse_dim()


def test_jagged_tensors_keep_their_common_raggedness():
    """Two jagged tensors that could be added on the data host can be added on the trainer."""
    first = quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    received = send([first, first * 2])
    assert (received[0] + received[1]).values().tolist() == [3.0] * 5


def test_packed_sequence_arrives():
    """A packed sequence can be unpacked on the trainer."""
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    received = send(packed)
    assert type(received) is PackedSequence
    assert torch.equal(pad_packed_sequence(received)[0], pad_packed_sequence(packed)[0])


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


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_array_arrives(array):
    """An array arrives with its dtype, byte order included, its shape and its values."""
    received = send({"x": array})["x"]
    assert type(received) is np.ndarray
    assert received.dtype == array.dtype
    assert received.shape == array.shape
    assert received.tobytes() == array.tobytes()


def test_structured_scalar_and_memmap_arrive(tmp_path):
    """One record of a structured array, and an array mapped from a file, arrive by value."""
    mapped = np.memmap(tmp_path / "x", np.int32, "w+", shape=(3,))
    record, received = send([np.ones(1, STRUCTURED)[0], mapped])
    assert record["b"].tolist() == [1, 1]
    assert type(received) is np.ndarray


def test_same_object_stays_one_object():
    """What occurs twice in a batch is sent once and is one object again."""
    tensor, array, text = torch.ones(3), np.ones(3), b"x" * 500
    arena = Arena(make_slot())
    received = decode(encode([tensor, array, text, [tensor, array, text]], arena), np.frombuffer(arena._memory, "u1"))
    assert all(received[index] is received[3][index] for index in range(3))
    assert arena.used <= 64 + 64 + 500


def test_long_keys_do_not_disturb_references():
    """Long bytes as keys, which are remembered like tensors, do not change what a reference refers to."""
    tensor, key = torch.ones(3), b"k" * 500
    received = send({"a": tensor, key: tensor, ("b", key): {key: key}})
    assert received["a"] is received[key]
    assert received["a"].tolist() == [1, 1, 1]
    assert received["b", key] == {key: key}


def test_views_of_one_memory_stay_views_of_one_memory():
    """Views that overlap share memory on the trainer too, and cost no more bytes than what they cover."""
    base = torch.arange(100.0)
    even, odd = base[::2], base[1::2]
    arena = Arena(make_slot())
    received = decode(
        encode({"base": base, "part": base[10:20], "numpy": base.numpy()[90:]}, arena),
        np.frombuffer(arena._memory, np.uint8),
    )
    assert arena.used == 400
    received["base"].zero_()
    assert received["part"].sum() == 0
    assert received["numpy"].sum() == 0
    received = send([even, odd, base.expand(2, 100), base[50:]])
    assert received[0].tolist() == even.tolist()
    assert received[1].tolist() == odd.tolist()
    assert received[2].tolist() == [base.tolist()] * 2
    received[3].fill_(-1)
    assert received[1].tolist() == [*range(1, 50, 2), *[-1] * 25]


def test_views_far_apart_are_sent_without_what_lies_between():
    """Two views whose union has gaps do not bring the gaps along."""
    base = torch.arange(1000)
    arena = Arena(make_slot())
    encode([base[::100], base[1::100]], arena)
    assert arena.used <= 2 * 128


def test_equal_batches_have_equal_headers():
    """The header does not depend on where the tensors happened to lie, so that it can be recognised."""
    first, second = torch.ones(3), torch.ones(4)
    low, high = sorted((torch.ones(3), torch.ones(3)), key=torch.Tensor.data_ptr)
    assert encode([low, high], Arena(make_slot())) == encode([high, low], Arena(make_slot()))
    assert encode([first, second], Arena(make_slot())) == encode([first.clone(), second], Arena(make_slot()))


def test_leaves_in_the_slot_are_not_copied():
    """What the collate function put into the slot stays where it is, also when only a part of it is sent."""
    arena = Arena(make_slot())
    arena.allocate(100)
    tensor = torch.frombuffer(arena.allocate(4000), dtype=torch.float32).view(10, 100)
    before = arena.used
    received = decode(encode([tensor, tensor[2:]], arena), np.frombuffer(arena._memory, np.uint8))
    assert arena.used == before
    assert received[0].data_ptr() == tensor.data_ptr()
    assert received[1].data_ptr() == tensor[2:].data_ptr()


def test_misaligned_memory_is_copied():
    """A tensor that starts in the middle of a number of the slot, or elsewhere, gets a proper place."""
    arena = Arena(make_slot())
    inside = torch.from_numpy(arena.allocate(41)[1:].view(np.float32))
    outside = np.zeros(41, np.uint8)
    views = [torch.from_numpy(outside[1:].view(np.float32)), torch.from_numpy(outside)]
    received = decode(encode([inside, *views], arena), np.frombuffer(arena._memory, np.uint8))
    assert [tensor.tolist() for tensor in received] == [[0] * 10, [0] * 10, [0] * 41]
    assert received[0].data_ptr() % 4 == 0
    assert received[1].data_ptr() % 4 == 0


def test_decoding_copies_nothing():
    """Tensors and arrays are views of the received memory, writable in both directions without warnings."""
    arena = Arena(make_slot())
    head = encode([torch.zeros(4), np.zeros(4)], arena)
    data = make_slot(arena.used)
    tensor, array = decode(head, data)
    tensor[0] = 1
    array[0] = 2
    assert bytes(data[:4]) == struct.pack("f", 1)
    assert bytes(data[64:72]) == struct.pack("d", 2)


def test_read_only_memory_can_be_decoded():
    """Memory that may not be written decodes to the same values, without a warning."""
    arena = Arena(make_slot())
    head = encode([torch.ones(4), np.ones(4)], arena)
    tensor, array = decode(memoryview(head), np.frombuffer(bytes(arena._memory), np.uint8))
    assert tensor.sum() == array.sum() == 4
    assert not array.flags.writeable


VIEWS = {
    "tensor": lambda batch: batch["tensor"],
    "slice": lambda batch: batch["tensor"][1:],
    "detached": lambda batch: batch["tensor"].detach(),
    "numpy of tensor": lambda batch: batch["tensor"][1:].numpy()[1:],
    "graph": lambda batch: (torch.ones(4, requires_grad=True) * batch["tensor"]).sum(),
    "array": lambda batch: batch["array"],
    "slice of array": lambda batch: batch["array"][1:],
    "asarray of array": lambda batch: np.asarray(batch["array"].view(np.int64)),
    "tensor of array": lambda batch: torch.from_numpy(batch["array"])[1:],
    "sparse": lambda batch: batch["sparse"],
    "nested": lambda batch: batch["nested"],
    "component": lambda batch: batch["nested"].unbind()[0],
}


@pytest.mark.parametrize("is_view", [True, False], ids=["view", "owner"])
@pytest.mark.parametrize("name", VIEWS)
def test_slot_lives_as_long_as_any_view_of_it(name, is_view):
    """The slot's finalizer runs when the last view of any kind is gone, and not before."""
    source = {"tensor": torch.ones(4), "array": np.ones(4), "sparse": torch.eye(2).to_sparse()}
    source["nested"] = quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    arena = Arena(make_slot())
    head = encode(source, arena)
    data = make_slot(arena.used) if is_view else Slot(arena.used, np.uint8)
    data[:] = np.frombuffer(arena._memory, np.uint8)[: arena.used]
    finalizer = weakref.finalize(data, lambda: None)
    kept = VIEWS[name](decode(head, data))
    del data
    assert finalizer.alive
    del kept
    assert not finalizer.alive


def test_batches_with_equal_headers_share_nothing():
    """The cache of headers hands out no object twice."""
    arena = Arena(make_slot())
    head = encode({"a": [1, {"b": (2, [3])}], "t": torch.ones(1)}, arena)
    data = np.frombuffer(arena._memory, np.uint8)
    first, second = decode(head, data), decode(head, data)
    first["a"][1]["b"][1].append(4)
    first["a"].clear()
    first["t"].resize_(1)
    assert second["a"] == [1, {"b": (2, [3])}]
    assert decode(head, data)["a"] == [1, {"b": (2, [3])}]


Stranger = namedtuple("Stranger", "x")
Stranger.__module__ = "module_that_nobody_imported"

REFUSED = {
    'batch["meta"][3].y': {"meta": [0, 1, 2, Point(1, Opaque())]},
    "batch": Opaque(),
    'batch["a\\"b"]': {'a"b': Opaque()},
    "batch[(1, 2)].corners[0]": {(1, 2): Box([Opaque()])},
    "batch[0]": [Counter("a")],
    "batch[1]": [0, lambda: None],
    "batch[2]": [0, 0, np.array([object()])],
    "batch[3]": [0, 0, 0, np.zeros(2, [("o", object)])],
    "batch[4]": [0, 0, 0, 0, np.ma.array([1])],
    "batch[5]": [0] * 5 + [np.zeros(2, [])],
    "batch[6]": [0] * 6 + [torch.empty(2, device="meta")],
    "batch[7]": [0] * 7 + [type("MyTensor", (torch.Tensor,), {})([1])],
    "batch[8]": [0] * 8 + [Point],
    "batch[9]": [0] * 9 + [bytearray(3)],
}


@pytest.mark.parametrize("path", REFUSED)
def test_unknown_leaf_is_named(path):
    """What cannot be sent is an error that names its path."""
    with pytest.raises(BatchTypeError) as caught:
        send(REFUSED[path])
    assert str(caught.value).startswith(f"{path} ")
    assert BatchTypeError(str(caught.value)).args == caught.value.args


def test_error_says_what_to_do():
    """The message names the type, and says how to send it anyway; for an image it says how to convert it."""
    with pytest.raises(BatchTypeError, match=r"test_codec\.Opaque.*register_batch_type\(\).*collate_fn"):
        send([Opaque()])
    image = type("Image", (), {"__module__": "PIL.Image"})
    with pytest.raises(BatchTypeError, match=r"PIL\.Image\.Image.*PILToTensor"):
        send([image()])
    quantized = quietly(lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    with pytest.raises(BatchTypeError, match="Dequantize"):
        send([quantized])


def test_local_class_is_refused_by_the_sender():
    """A class that no other process can find is an error where it is sent."""

    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(BatchTypeError, match="Local"):
        send(Local(1))


def test_missing_field_is_an_error():
    """A dataclass without a value in one of its fields is an error that names the field."""
    empty = object.__new__(Slotted)
    with pytest.raises(BatchTypeError, match=r"batch\[0\] has no value in its field x"):
        send([empty])


@pytest.mark.parametrize("key", [Opaque(), frozenset(), (1, [Opaque][0])])
def test_unknown_key_is_an_error(key):
    """A key that is neither a scalar nor a tuple of scalars is an error that names the dictionary."""
    with pytest.raises(BatchTypeError, match=r'batch\["x"\] holds the key'):
        send({"x": {key: 1}})


def test_cycles_and_depth_are_errors():
    """A container that contains itself, and nesting beyond 64 levels, are errors; 64 levels pass."""
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(BatchTypeError, match=r'batch\[1\]\["again"\].* contains itself'):
        send(cycle)
    deep: Any = torch.ones(1)
    for _ in range(64):
        deep = [deep]
    received = send(deep)
    for _ in range(64):
        received = received[0]
    assert received.tolist() == [1]
    with pytest.raises(BatchTypeError, match="nested deeper than 64"):
        send([deep])
    deep = {(1, b"x"): math.inf}
    for _ in range(62):
        deep = [deep]
    assert "inf" in repr(send(deep))
    with pytest.raises(WireError, match="deeper than 64"):
        decode(header(json.loads('["l",' * 65 + '["l"]' + "]" * 65)), make_slot(0))


def test_explosion_of_shared_containers_is_an_error(monkeypatch):
    """Containers that are shared many times over end in an error instead of a header without end."""
    monkeypatch.setattr("lightning_sm.data.encoding._MAX_OBJECTS", 10_000)
    shared: list[Any] = [1]
    for _ in range(40):
        shared = [shared, shared]
    with pytest.raises(BatchTooLargeError, match="10000 objects"):
        send(shared)


def test_batch_too_large_names_both_sizes():
    """A batch that does not fit says how many bytes it needs, how many there are, and which setting to raise."""
    with pytest.raises(BatchTooLargeError, match=r"needs 4000 bytes or more, but a slot has 1024.*max_batch_bytes"):
        send(torch.ones(1000), nbytes=1024)


def test_arena_hands_out_aligned_memory_until_it_is_full():
    """Allocations start at multiples of 64, end with the slot, and begin again after a reset."""
    arena = Arena(make_slot(256))
    address = arena.allocate(1).ctypes.data
    assert arena.allocate(65).ctypes.data == address + 64
    assert arena.used == 129
    assert arena.offset_of(address + 64, 65) == 64
    assert arena.offset_of(address + 64, 66) is None
    assert arena.offset_of(address - 1, 1) is None
    assert arena.allocate(0).size == 0
    with pytest.raises(BatchTooLargeError, match="257"):
        arena.allocate(65)
    arena.reset()
    assert arena.used == 0
    assert arena.allocate(256).ctypes.data == address


class Registered:
    """A class that a test registers."""

    def __init__(self, payload):
        self.payload = payload


@pytest.fixture
def registry(monkeypatch):
    """Let a test register types of its own."""
    monkeypatch.setattr(batch_types, "_by_class", dict(batch_types._by_class))
    monkeypatch.setattr(batch_types, "_by_name", dict(batch_types._by_name))


@pytest.mark.usefixtures("registry")
def test_registered_type_arrives():
    """A registered class is taken apart and put together with the registered functions, once per object."""
    register_batch_type(Registered, lambda obj: [obj.payload], lambda parts: Registered(parts[0]))
    one = Registered(torch.ones(3))
    received = send({"a": one, "b": [one]})
    assert received["a"].payload.tolist() == [1, 1, 1]
    assert received["a"] is received["b"][0]


@pytest.mark.usefixtures("registry")
def test_registered_subclass_of_tensor_arrives():
    """A subclass of Tensor arrives as itself once it is registered."""
    cls = type("Marked", (torch.Tensor,), {})
    register_batch_type(cls, lambda obj: obj.as_subclass(torch.Tensor), lambda part: part.as_subclass(cls), name="m")
    assert type(send(torch.ones(2).as_subclass(cls))) is cls


@pytest.mark.usefixtures("registry")
def test_failing_registered_functions_are_named():
    """An error in a registered function becomes one that names the path, or the type."""
    register_batch_type(Registered, lambda obj: obj.missing, Registered, name="reg")
    with pytest.raises(BatchTypeError, match=r"batch\[0\] cannot be taken apart as a reg: AttributeError"):
        send([Registered(1)])
    register_batch_type(Registered, lambda obj: 1, lambda parts: 1 / 0, name="reg")
    with pytest.raises(WireError, match="A reg cannot be put together: ZeroDivisionError"):
        send([Registered(1)])


@pytest.mark.usefixtures("registry")
def test_registration_conflicts_are_errors():
    """A name belongs to one class, which may be defined again; what the codec sends itself cannot be registered."""
    register_batch_type(Registered, lambda obj: 1, lambda parts: 1, name="taken")
    with pytest.raises(BatchTypeError, match="'taken' belongs to"):
        register_batch_type(Opaque, lambda obj: 1, lambda parts: 1, name="taken")
    again = type("Registered", (), {"__module__": Registered.__module__})
    register_batch_type(again, lambda obj: 1, lambda parts: 2, name="taken")
    assert send([again()]) == [2]
    with pytest.raises(BatchTypeError, match="needs no registration"):
        register_batch_type(dict, dict, dict)


def test_class_that_was_not_imported_is_refused():
    """A class, member or registered type that this process lacks is an error, and nothing is imported for it."""
    assert "wsgiref.simple_server" not in sys.modules
    with pytest.raises(BatchTypeError, match="has not imported"):
        send(Stranger(1))
    for tree in (
        ["x", "wsgiref.simple_server:ServerHandler", [], []],
        ["e", "wsgiref.simple_server:X", "Y"],
        ["p", "wsgiref.simple_server:ServerHandler", 1],
        ["p", "tensordict._td:TensorDict", 1],
        ["x", "os:path.join", [], []],
        ["x", "collections:OrderedDict", [], []],
        ["x", f"{__name__}:Point", ["x", "z"], [1, 2]],
        ["e", f"{__name__}:Colour", "BLUE"],
    ):
        with pytest.raises(BatchTypeError, match=r"import|other fields|no member"):
            decode(header(tree), make_slot(0))
    assert "wsgiref.simple_server" not in sys.modules


def test_main_classes_of_spawned_processes_have_the_scripts_name():
    """A class of the script is found under __main__, whatever multiprocessing calls the script in its processes."""
    cls = type("InScript", (), {"__module__": "__mp_main__"})
    assert batch_types.class_name(cls) == "__main__:InScript"


def test_known_libraries_are_used_once_imported(monkeypatch):
    """BatchEncoding needs no registration where transformers is imported, and is refused where it is not."""
    name = "transformers.tokenization_utils_base"

    class BatchEncoding:
        def __init__(self, data, n_sequences=None):
            self.data, self.n_sequences = data, n_sequences

    BatchEncoding.__module__, BatchEncoding.__qualname__ = name, "BatchEncoding"
    arena = Arena(make_slot())
    head = encode(BatchEncoding({"input_ids": torch.ones(2)}, 1), arena)
    data = np.frombuffer(arena._memory, np.uint8)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(BatchTypeError, match="neither imported nor registered"):
        decode(head, data)
    module = types.ModuleType(name)
    module.BatchEncoding = BatchEncoding
    monkeypatch.setitem(sys.modules, name, module)
    received = decode(head, data)
    assert type(received) is BatchEncoding
    assert received.data["input_ids"].tolist() == [1, 1]
    assert received.n_sequences == 1


def test_torchvision_tensors_arrive_as_themselves():
    """Images and boxes of torchvision keep their class, format and canvas."""
    tv_tensors = pytest.importorskip("torchvision.tv_tensors", reason="needs torchvision")
    boxes = tv_tensors.BoundingBoxes(torch.tensor([[0.0, 1, 2, 3]]), format="XYWH", canvas_size=(4, 5))
    image, received = send([tv_tensors.Image(torch.zeros(3, 4, 5)), boxes])
    assert type(image) is tv_tensors.Image
    assert type(received) is tv_tensors.BoundingBoxes
    assert received.format == boxes.format
    assert received.canvas_size == (4, 5)


T = ["t", 0, "float32", [2], None, 0]
BROKEN = {
    "not JSON": b"{",
    "not UTF-8": b'"\xff"',
    "not a header": b"[1, 2]",
    "other format": b'["zip", 1, 0, null]',
    "other version": header(None, version=2),
    "object": header({"a": 1}),
    "unknown node": header(["?"]),
    "empty node": header([]),
    "tag that is no string": header([["l"]]),
    "NaN": b'["lsm-batch",1,0,NaN]',
    "huge int": b'["lsm-batch",1,0,' + b"9" * 5000 + b"]",
    "too deep for JSON": b'["lsm-batch",1,0,' + b"[" * 100_000,
    "negative bytes": header(None, used=-1),
    "more bytes than there are": header(None, used=1000),
    "terabyte": header(["t", 0, "float32", [10**12], [0], 0], 64),
    "overflow": header(["t", 0, "float32", [2**32, 2**32, 2**32], None, 0], 64),
    "empty overflow": header(["t", 0, "float32", [0, 2**62, 2**62], None, 0], 64),
    "negative shape": header(["t", 0, "float32", [-1], None, 0], 64),
    "boolean shape": header(["t", 0, "float32", [True], None, 0], 64),
    "negative stride": header(["t", 0, "float32", [2], [-1], 0], 64),
    "stride too few": header(["t", 0, "float32", [2, 2], [1], 0], 64),
    "too many dimensions": header(["t", 0, "float32", [1] * 65, None, 0], 64),
    "beyond the end": header(["t", 64, "float32", [1], None, 0], 64),
    "gaps beyond the end": header(["t", 0, "float32", [2], [16], 0], 64),
    "negative offset": header(["t", -4, "float32", [1], None, 0], 64),
    "misaligned": header(["t", 2, "float32", [1], None, 0], 64),
    "fractional offset": header(["t", 0.0, "float32", [1], None, 0], 64),
    "quantized": header(["t", 0, "quint8", [1], None, 0], 64),
    "dtype that is no string": header(["t", 0, [], [1], None, 0], 64),
    "gradient of integers": header(["t", 0, "int32", [1], None, 1], 64),
    "unknown flags": header(["t", 0, "float32", [1], None, 4], 64),
    "object array": header(["a", 0, "|O8", [1], None], 64),
    "comma dtype": header(["a", 0, "i4,f4", [1], None], 64),
    "record beyond its size": header(["a", 0, [4, ["x", "<i8", 0, []]], [1], None], 64),
    "record of records": header(["a", 0, json.loads('[8,["x",' * 9 + '"<i8"' + ",0,[]]]" * 9), [1], None], 64),
    "record of nothing": header(["a", 0, [0], [10**15], None], 64),
    "array of no bytes": header(["a", 0, "<U0", [10**12], None], 64),
    "overlapping array": header(
        [
            "a",
            0,
            "<i4",
            [10**12],
            [0],
        ],
        64,
    ),
    "array beyond the end": header(["a", 60, "<i8", [1], None], 64),
    "scalar of wrong size": header(["n", "<i8", "00"]),
    "scalar that is no hex": header(["n", "<i8", 5]),
    "impossible character": header(["n", "<U1", "ffffffff"]),
    "reference to nothing": header(["r", 0]),
    "reference that is no number": header(["r", None]),
    "bytes again and again": header(["l", *[["B", 0, 64]] * 2], 64),
    "dictionary without value": header(["d", 1]),
    "repeated key": header(["d", 1, 2, 1, 3]),
    "list as key": header(["d", ["l"], 2]),
    "list in a set": header(["set", ["l"]]),
    "impossible float": header(["f", "00"]),
    "impossible int": header(["i", "x"]),
    "scalar that is no string": header(["i", 5]),
    "impossible range": header(["range", 0, 1, 0]),
    "object without values": header(["x", f"{__name__}:Point", ["x", "y"], []]),
    "sparse out of bounds": header(
        ["p", "torch.sparse_coo", ["l", ["t", 0, "int64", [1, 1], None, 0], T, ["l", 0], False, False]], 64
    ),
    "sparse size overflow": header(
        ["p", "torch.sparse_coo", ["l", ["t", 0, "int64", [2, 1], None, 0], T, ["l", 2**61, 4], False, False]], 64
    ),
    "rows that do not grow": header(
        [
            "p",
            "torch.sparse_csr",
            ["l", ["t", 0, "int64", [2], None, 0], ["t", 0, "int64", [2], None, 0], T, ["l", 1, 5], False],
        ],
        64,
    ),
    "sparse of what is no tensor": header(["p", "torch.sparse_coo", ["l", 1, T, ["l", 0], False, False]], 64),
    "nested beyond its values": header(["p", "torch.nested", ["l", T, ["l", ["l", 3]], False]], 64),
    "nested of different dimensions": header(["p", "torch.nested", ["l", T, ["l", ["l", 1], ["l", 1, 1]], False]], 64),
    "jagged of no dimension": header(
        ["p", "torch.jagged", ["l", T, ["t", 0, "int64", [2], None, 0], None, 2, False]], 64
    ),
    "jagged of scattered offsets": header(
        ["p", "torch.jagged", ["l", T, ["t", 0, "int64", [1, 1], None, 0], None, 1, False]], 64
    ),
    "jagged with a negative length": header(
        [
            "p",
            "torch.jagged",
            ["l", T, ["t", 0, "int64", [1], None, 0], ["t", 0, "int64", [1], None, 0], 1, False],
        ],
        64,
    ),
    "packed sequence of no batches": header(
        ["p", "torch.nn.utils.rnn:PackedSequence", ["l", T, ["t", 0, "int64", [2], None, 0], None, None]], 64
    ),
    "packed sequence of floats": header(["p", "torch.nn.utils.rnn:PackedSequence", ["l", T, T, None, None]], 64),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_message_is_refused(name):
    """A broken or malicious message is a WireError, and no other error."""
    with pytest.raises(WireError):
        decode(BROKEN[name], make_slot(64))


def test_jagged_lengths_and_packed_orders_are_checked():
    """Lengths that leave the values, and an order that is no permutation, are refused."""
    arena = Arena(make_slot())
    values, offsets = torch.ones(5), torch.tensor([0, 2, 5])
    jagged = torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor([2, 2]))
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    head = encode([jagged, packed], arena)
    data = np.frombuffer(arena._memory, np.uint8)
    received = decode(head, data)
    assert received[0].lengths().tolist() == [2, 2]
    received[0].lengths()[1] = 4
    with pytest.raises(WireError, match="lengths leave"):
        decode(head, data)
    received[0].lengths()[1] = 2
    received[1].sorted_indices[0] = 5
    with pytest.raises(WireError, match="not a permutation"):
        decode(head, data)
