"""Values of every type survive the way through a header and a slot of shared memory."""

from __future__ import annotations

import copy
import struct
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.decode import decode
from lightning_sm.data.batch.encode import encode
from tests.fakes.batches import (
    ARRAYS,
    CONTAINERS,
    SCALARS,
    STRUCTURED,
    Box,
    Slotted,
    Strict,
    Volume,
    every_dtype,
    make_slot,
    quietly,
    send,
    sparse_and_nested,
)


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


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_container_is_unchanged(value):
    """A container arrives with its type, its order and its items' types."""
    received = send(value)
    assert type(received) is type(value)
    assert received == value
    assert repr(received) == repr(value) or isinstance(value, set | frozenset)


def test_attributes_travel_and_no_code_of_their_class_runs(monkeypatch):
    """Attributes of objects that extend a builtin type or are dataclasses arrive, without any call of their methods."""
    objects = [value for value in CONTAINERS if type(value).__module__ == Box.__module__ and hasattr(value, "__dict__")]
    assert len(objects) >= 15
    for number, value in enumerate(objects):
        vars(value)["extra"] = [number, torch.full((2,), number)]
    try:
        monkeypatch.setattr(Strict, "armed", True)
        received = send(objects)
        monkeypatch.undo()
        for number, (value, sent) in enumerate(zip(received, objects, strict=True)):
            assert type(value) is type(sent)
            assert value == sent or type(value) is Box  # its field holds a list, and equality compares fields
            assert value.extra[0] == number
            assert value.extra[1].tolist() == [number] * 2
            assert list(vars(value)) == list(vars(sent))
    finally:
        for value in objects:
            del vars(value)["extra"]


def test_attributes_of_an_ordered_dict_travel():
    """Plain ordered dictionaries, too, may have attributes."""
    values = OrderedDict(a=1)
    values.extra = torch.ones(2)
    received = send([values])[0]
    assert received == values
    assert received.extra.tolist() == [1, 1]


def test_attributes_of_a_dataclass_that_are_no_fields_travel():
    """What __post_init__ or others set beside the fields arrives, and a field that has only its default keeps it."""
    box = Box([1, 2])
    object.__setattr__(box, "area", torch.tensor(4))
    object.__delattr__(box, "label")
    received = send(box)
    assert received.area == 4
    assert received.label == "cat"
    assert "label" not in vars(received)


def test_attributes_of_tensors_travel():
    """Attributes of tensors and parameters arrive: torch marks buffers by one."""
    labelled, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(1))
    labelled.label, parameter.group = ["cat", labelled[:1]], 3
    sparse = torch.eye(2).to_sparse()
    sparse.role = "adjacency"
    received = send(
        {"a": labelled, "again": labelled, "p": parameter, "s": sparse, "b": torch.nn.Buffer(torch.ones(1))}
    )
    assert type(received["a"]) is torch.Tensor
    assert received["a"].label[0] == "cat"
    assert received["a"].label[1].data_ptr() == received["a"].data_ptr()
    assert received["again"] is received["a"]
    assert type(received["p"]) is torch.nn.Parameter
    assert received["p"].requires_grad
    assert received["p"].group == 3
    assert received["s"].layout == torch.sparse_coo
    assert received["s"].role == "adjacency"
    assert isinstance(received["b"], torch.nn.Buffer)
    assert received["b"].persistent


def test_subclasses_of_tensor_travel_with_their_metadata(monkeypatch):
    """A tensor with metadata arrives as itself, and none of its code runs on the trainer."""
    volume = Volume(torch.rand(2, 3), {"affine": torch.eye(4), "path": Path("a.nii"), "shape": np.array([2, 3])})
    volume._applied_operations.append({"class": "Flip", "extra_info": {"axis": (0,)}})
    leaf = Volume(torch.ones(2)).requires_grad_()
    batch = {"image": volume, "again": [volume], "leaf": leaf, "int": Volume(torch.arange(3))}
    arena = Arena(make_slot())
    header = encode(batch, arena)
    monkeypatch.setattr(Volume, "armed", True)
    received = decode(header, np.frombuffer(arena._memory, np.uint8))
    monkeypatch.undo()
    assert [type(received[name]) for name in ("image", "leaf", "int")] == [Volume] * 3
    assert torch.equal(received["image"].as_subclass(torch.Tensor), volume.as_subclass(torch.Tensor))
    assert list(received["image"].meta) == ["affine", "path", "shape"]
    assert torch.equal(received["image"].meta["affine"], torch.eye(4))
    assert received["image"]._applied_operations == volume._applied_operations
    assert received["again"][0] is received["image"]
    assert received["leaf"].requires_grad
    assert received["leaf"].is_leaf
    assert (received["int"] + 1).meta == {}


@pytest.mark.parametrize("factory", [list, dict, int, None])
def test_defaultdict_keeps_a_builtin_factory(factory):
    """A defaultdict of lists or numbers arrives as one, with its items and their order."""
    received = send({"boxes": defaultdict(factory, b=[1], a=torch.ones(2))})["boxes"]
    assert type(received) is defaultdict
    assert received.default_factory is factory
    assert list(received) == ["b", "a"]
    assert received["a"].tolist() == [1, 1]


def test_defaultdict_of_a_function_becomes_a_dictionary():
    """A default factory of the user's own is code, and stays behind."""
    assert type(send(defaultdict(lambda: [0], a=[1]))) is dict


@pytest.mark.parametrize("name", ["cpu", "cuda:1", "meta"])
def test_device_is_unchanged(name):
    """A device is a name, also of a device that this machine does not have."""
    assert send([torch.device(name)]) == [torch.device(name)]


def test_dataclass_is_rebuilt_without_its_constructor():
    """A dataclass gets its fields, frozen or slotted, and __init__ does not run."""
    box = copy.copy(Box(torch.ones(2)))
    object.__setattr__(box, "label", "from the wire")
    received = send({"boxes": [box, Slotted(5)]})["boxes"]
    assert received[0].label == "from the wire"
    assert received[0].corners.tolist() == [1, 1]
    assert received[1].x == 5


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
    """A leaf or parameter requires gradients again."""
    leaf, parameter = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.tensor(3), requires_grad=False)
    received = send([leaf, (leaf * 2).detach(), parameter, frozen])
    assert [tensor.requires_grad for tensor in received] == [True, False, True, False]
    assert [type(tensor) for tensor in received] == [type(x) for x in (leaf, leaf, parameter, parameter)]
    assert all(tensor.is_leaf for tensor in received)


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
