"""Values of every type survive the way through a header and a slot of shared memory."""

from __future__ import annotations

import copy
import struct
from collections import defaultdict

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
    """A leaf or parameter requires gradients again; what was computed arrives detached."""
    leaf, parameter = torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.tensor(3), requires_grad=False)
    received = send([leaf, leaf * 2, parameter, frozen])
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
