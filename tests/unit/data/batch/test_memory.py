"""Batches share and copy as much memory as they must, and keep the slot as long as they need it."""

from __future__ import annotations

import struct
import weakref

import numpy as np
import pytest
import torch

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.decode import decode
from lightning_sm.data.batch.encode import encode
from lightning_sm.errors import BatchTooLargeError
from tests.fakes.batches import Slot, make_slot, quietly, send


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
