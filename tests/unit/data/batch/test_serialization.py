"""Batches of every kind are sent through a slot of shared memory, and keep it as long as they need it."""

from __future__ import annotations

import dataclasses
import enum
import struct
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.serialization import pickle_batch, unpickle_batch
from lightning_sm.errors import BatchTooLargeError, BatchTypeError, WireError


class Slot(np.ndarray):
    """A slot as a ring hands it out: an array whose lifetime is watched."""


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Box:
    """A dataclass whose ``__init__`` must not run when it arrives."""

    corners: Any

    def __post_init__(self):
        if getattr(self.corners, "arrived", False):
            raise AssertionError("__init__ ran")


class Graph:
    """An object with attributes and without ``__eq__``."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Volume(torch.Tensor):
    """A tensor with metadata, as MONAI's."""


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1


def make_slot(nbytes=1 << 20):
    """Return a slot whose lifetime can be watched."""
    return np.zeros(nbytes, np.uint8).view(Slot)


def send(batch, nbytes=1 << 20):
    """Return the batch that arrives, rebuilt from a copy of the slot's used bytes."""
    arena = Arena(make_slot(nbytes))
    structure = pickle_batch(batch, arena)
    received = make_slot(arena.used)
    received[:] = np.frombuffer(arena._memory, np.uint8)[: arena.used]
    return unpickle_batch(structure, received)


@pytest.fixture
def deterministic():
    """Use deterministic algorithms, as ``Trainer(deterministic=True)`` does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def quietly(make):
    """Return what ``make`` returns, without torch's warnings about experimental kinds of tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def assert_same(received, sent):
    """Compare two batches: types, order, dtypes, shapes, flags and values."""
    assert type(received) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert_same_tensors(received, sent)
    elif isinstance(sent, np.ndarray):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert received.tolist() == sent.tolist() if sent.dtype.hasobject else received.tobytes() == sent.tobytes()
    elif isinstance(sent, dict):
        assert list(received) == list(sent)
        for key, value in sent.items():
            assert_same(received[key], value)
    elif isinstance(sent, (list, tuple, deque)):
        assert len(received) == len(sent)
        for pair in zip(received, sent, strict=True):
            assert_same(*pair)
    elif isinstance(sent, (Graph, Box)):
        assert_same(vars(received), vars(sent))
    else:
        assert received == sent


def assert_same_tensors(received, sent):
    """Compare two tensors, of any layout."""
    flags = ("dtype", "layout", "is_nested", "is_quantized", "requires_grad", "device")
    assert [getattr(received, name) for name in flags] == [getattr(sent, name) for name in flags]
    assert {**vars(received)}.keys() == {**vars(sent)}.keys()
    if sent.is_nested:
        pairs = list(zip(received.unbind(), sent.unbind(), strict=True))
    elif sent.layout is not torch.strided:
        pairs = [(received.detach().to_dense(), sent.detach().to_dense())]
    else:
        assert received.stride() == sent.stride() or not sent.is_contiguous()
        pairs = [(received, sent)]
    for one, other in pairs:
        assert one.shape == other.shape
        assert other.is_meta or raw_bytes(one) == raw_bytes(other)


def raw_bytes(tensor):
    """Return the bytes of a tensor's elements in order, because torch cannot compare every dtype."""
    rows = tensor.detach().resolve_conj().resolve_neg()
    rows = rows.int_repr() if rows.is_quantized else rows
    itemsize, flat = rows.element_size(), torch.empty(0, dtype=torch.uint8).set_(rows.untyped_storage()).numpy()
    if not rows.numel():
        return b""
    strides = (*(step * itemsize for step in rows.stride()), 1)
    start = flat[rows.storage_offset() * itemsize :]
    return np.lib.stride_tricks.as_strided(start, (*rows.shape, itemsize), strides).tobytes()


def every_dtype():
    """Return a tensor of every torch dtype except the quantized ones, by name."""
    names = {str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)}
    found = {}
    for name in sorted(name for name in names if not name.startswith("q")):
        dtype = getattr(torch, name)
        raw = torch.arange(200 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
        found[name] = raw.view(dtype).view(20, 10)
    return found


def odd_tensors():
    """Return tensors that are more than a view of bytes, by name."""
    dense = torch.arange(256.0).view(16, 16) * torch.eye(16)
    value = torch.tensor([1 + 2j, 3 - 4j])
    labelled, frozen = torch.ones(100), torch.nn.Parameter(torch.ones(100), requires_grad=False)
    labelled.label = ["cat"]
    components = [torch.rand(20, 3), torch.rand(40, 3)]
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 3)),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "nested": torch.nested.nested_tensor(components),
        "jagged": torch.nested.nested_tensor(components, layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(torch.rand(100), 0.1, 0, torch.qint8),
        "conjugated": value.conj(),
        "negated": value.conj().imag,
        "with an attribute": labelled,
        "leaf": torch.ones(100, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(100)),
        "frozen": frozen,
        "subclass": torch.ones(100).as_subclass(Volume),
        "expanded": torch.ones(1).expand(1000),
        "with gaps": torch.arange(1000)[::3],
        "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "on no device": torch.empty(3, device="meta"),
        "packed": pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False),
    }


STRUCTURED = np.dtype({"names": ["a", "b"], "formats": ["<i4", (">f8", (2,))], "offsets": [4, 16], "itemsize": 40})
BATCHES = {
    "numbers": [None, True, 2**64, 10**4000, 0.1, -0.0, float("inf"), 1j, Decimal("1.50")],
    "texts": ["", "a\x00ü😀", "\ud800", b"x" * 5000, bytearray(b"y" * 5000), Path("/data/a b.nii")],
    "names": [Colour.RED, torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), slice(None, 4), range(3)],
    "containers": [{"b": 1, 2.5: (3, {4})}, OrderedDict(z=1, a=[2]), defaultdict(list, b=[1]), deque([1, [2]], 3)],
    "objects": [Point([1], Point(2, torch.ones(100))), Box(np.ones(100)), Graph(x=torch.ones(100), edges=[1])],
    "namespace": SimpleNamespace(a=1),
    "scalars": [np.float32(0.1), np.datetime64("2024-02-29T01:02:03", "ms"), np.str_("ü"), np.bytes_(b"ab")],
    "arrays": [
        np.array(3.5),
        np.zeros((0, 3), np.int16),
        np.arange(600, dtype=">i4").reshape(2, 300),
        np.asfortranarray(np.arange(600.0).reshape(2, 300)),
        np.arange(600)[::-2],
        np.array(["a", "üx"] * 100),
        np.array(["2024-01-01", "NaT"] * 100, "datetime64[25m]"),
        np.ones(300, STRUCTURED),
        np.array([object, None, "x"]),
    ],
    **{f"torch.{name}": [one, one[1, 1], one[:0], one.t(), one[:, ::2]] for name, one in every_dtype().items()},
    **quietly(odd_tensors),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_batch_arrives(batch):
    """Whatever a DataLoader worker may return arrives with the same types, layouts, flags and bits."""
    assert_same(quietly(lambda: send(batch)), batch)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", every_dtype())
def test_a_tensor_arrives_where_algorithms_are_deterministic(name):
    """Every dtype arrives even if PyTorch fills the memory that it allocates, which not every dtype supports."""
    sent = every_dtype()[name]
    assert raw_bytes(send(sent)) == raw_bytes(sent)


def test_objects_of_a_class_that_has_no_name_arrive():
    """A class that no module has arrives by value."""

    class Local:
        def __init__(self, x):
            self.x = x

    arena = Arena(make_slot())
    structure = pickle_batch([torch.arange(1000), Local(2)], arena)
    assert arena.used < 2 * 8000, "the slot has it once, although it was tried by name first"
    received = unpickle_batch(structure, np.frombuffer(arena._memory, np.uint8))
    assert (received[0].sum(), type(received[1]), received[1].x) == (499_500, Local, 2)


def test_a_process_keeps_the_classes_that_it_has(monkeypatch):
    """Another rank makes a class that it lacks, once; later batches change nothing in it."""

    class Local:
        number = 0

    arena = Arena(make_slot())
    structure = pickle_batch([Local()], arena)
    data = np.frombuffer(arena._memory, np.uint8)
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", weakref.WeakKeyDictionary())
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
    ((first,), (second,)) = (map(type, unpickle_batch(structure, data)) for _ in range(2))
    assert (first is Local, second is first, first.number) == (False, True, 0)
    first.number = 1
    unpickle_batch(structure, data)
    assert first.number == 1


def test_what_cannot_be_pickled_is_an_error():
    """The error gives the reason, and what to return instead."""
    arena = Arena(make_slot())
    with pytest.raises(BatchTypeError, match=r"cannot be pickled: .*lock.*return tensors, arrays, and objects"):
        pickle_batch([torch.ones(1000), threading.Lock()], arena)


@pytest.mark.parametrize("batch", [torch.ones(1000), [1] * 1000, {"x": np.ones(500)}], ids=["tensor", "list", "array"])
def test_a_batch_that_is_too_large_names_the_setting(batch):
    """If the memory or the pickle of a batch does not fit, the error names the setting."""
    with pytest.raises(BatchTooLargeError, match=r"but a slot has 1024\. Raise data_service\.max_batch_bytes"):
        send(batch, nbytes=1024)


def test_what_occurs_twice_is_one_object():
    """An object that occurs twice in a batch is sent once, and arrives as one object."""
    tensor, array = torch.ones(1000), np.ones(1000)
    arena = Arena(make_slot())
    received = unpickle_batch(
        pickle_batch([tensor, array, [tensor, array]], arena), np.frombuffer(arena._memory, np.uint8)
    )
    assert received[2][0] is received[0]
    assert received[2][1] is received[1]
    assert arena.used < 4000 + 8000 + 1000


def test_views_of_one_memory_stay_views_of_one_memory():
    """Views of one memory still share it when they arrive, and the memory is sent once."""
    base = torch.arange(1000.0)
    arena = Arena(make_slot())
    batch = {"base": base, "part": base[100:900], "rows": base.view(10, 100).t(), "small": base[5:10]}
    received = unpickle_batch(pickle_batch(batch, arena), np.frombuffer(arena._memory, np.uint8))
    assert arena.used < 2 * base.nbytes
    received["base"].zero_()
    assert received["part"].sum() == received["rows"].sum() == received["small"].sum() == 0


def test_a_small_part_of_a_large_memory_goes_alone():
    """A view of a small part is sent without the rest, such as one sample of a dataset in memory."""
    base = torch.arange(100_000)
    arena = Arena(make_slot())
    structure = pickle_batch([base[5:10], base[1000:2000:2]], arena)
    assert arena.used < 10_000
    received = unpickle_batch(structure, np.frombuffer(arena._memory, np.uint8))
    assert received[0].tolist() == [5, 6, 7, 8, 9]
    assert received[1].tolist() == list(range(1000, 2000, 2))


def test_what_lies_in_the_slot_is_not_copied():
    """Memory that the collate function has placed in the slot is not copied."""
    arena = Arena(make_slot())
    tensor = torch.frombuffer(arena.allocate(40_000), dtype=torch.float32).view(10, 1000)
    before = arena.used
    structure = pickle_batch([tensor, tensor[2:]], arena)
    assert arena.used < before + 1000
    received = unpickle_batch(structure, np.frombuffer(arena._memory, np.uint8))
    assert [one.data_ptr() for one in received] == [tensor.data_ptr(), tensor[2:].data_ptr()]


def test_large_memory_is_not_copied_where_it_arrives():
    """Tensors and arrays that arrive are writable views of the slot."""
    arena = Arena(make_slot())
    structure = pickle_batch([torch.zeros(100), np.zeros(100)], arena)
    data = make_slot(arena.used)
    data[:] = np.frombuffer(arena._memory, np.uint8)[: arena.used]
    tensor, array = unpickle_batch(structure, data)
    tensor[0], array[0] = 1, 2
    assert bytes(data[:4]) == struct.pack("f", 1)
    assert bytes(data[448:456]) == struct.pack("d", 2)


VIEWS = {
    "tensor": lambda batch: batch["tensor"],
    "slice": lambda batch: batch["tensor"][1:],
    "numpy of tensor": lambda batch: batch["tensor"][1:].numpy()[1:],
    "graph": lambda batch: (torch.ones(100, requires_grad=True) * batch["tensor"]).sum(),
    "strided": lambda batch: batch["strided"].detach(),
    "array": lambda batch: np.asarray(batch["array"].view(np.int64))[1:],
    "tensor of array": lambda batch: torch.from_numpy(batch["array"])[1:],
    "sparse": lambda batch: batch["sparse"],
    "jagged": lambda batch: batch["jagged"].unbind()[0],
}


@pytest.mark.parametrize("is_view", [True, False], ids=["view", "owner"])
@pytest.mark.parametrize("name", VIEWS)
def test_the_slot_lives_as_long_as_any_view_of_it(name, is_view):
    """The slot is written again only when the last view of any kind is gone, which runs its finalizer."""
    components = [torch.ones(200), torch.ones(300)]
    source = {"tensor": torch.ones(100), "strided": torch.ones(100, 100).t(), "array": np.ones(100)}
    source["sparse"] = torch.eye(100).to_sparse()
    source["jagged"] = quietly(lambda: torch.nested.nested_tensor(components, layout=torch.jagged))
    arena = Arena(make_slot())
    structure = pickle_batch(source, arena)
    data = make_slot(arena.used) if is_view else Slot(arena.used, np.uint8)
    data[:] = np.frombuffer(arena._memory, np.uint8)[: arena.used]
    finalizer = weakref.finalize(data, lambda: None)
    kept = VIEWS[name](unpickle_batch(structure, data))
    del data
    assert finalizer.alive
    del kept
    assert not finalizer.alive


@pytest.mark.parametrize("structure", [b"", b"\0" * 15, struct.pack("<QQ", 60, 5), struct.pack("<QQ", 2**63, 2**63)])
def test_a_structure_that_does_not_fit_is_refused(structure):
    """A structure that is empty, cut, or beyond the bytes that have arrived is refused."""
    with pytest.raises(WireError, match="of a batch"):
        unpickle_batch(structure, make_slot(64))


def test_an_arena_hands_out_aligned_memory_until_it_is_full():
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
    arena.used = 0
    assert arena.used == 0
    assert arena.allocate(256).ctypes.data == address
