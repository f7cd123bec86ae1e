"""What cannot be sent is an error that names the value and says what to do."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sm.data.batch.decode import decode
from lightning_sm.errors import BatchTooLargeError, BatchTypeError, WireError
from tests.fakes.batches import Box, Opaque, Point, Record, Slotted, Volume, header, make_slot, quietly, send


class Permission(enum.Flag):
    """Flags, whose combinations are no members."""

    READ = 1
    WRITE = 2


class Wrapper(torch.Tensor):
    """A tensor that stands for others, and has no memory."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Return another of them, whatever the function."""
        return torch.Tensor._make_wrapper_subclass(cls, (2,))


def annotated(obj, value, name="more"):
    """Return an object with one more attribute."""
    setattr(obj, name, value)
    return obj


leaf = torch.ones(2, requires_grad=True)
REFUSED = {
    'batch["meta"][3].y': {"meta": [0, 1, 2, Point(1, Opaque())]},
    "batch": Opaque(),
    'batch["a\\"b"]': {'a"b': Opaque()},
    "batch[(1, 2)].corners[0]": {(1, 2): Box([Opaque()])},
    "batch[0].more[1]": [annotated(Record(a=1), [0, Opaque()])],
    "batch[1]": [0, lambda: None],
    "batch[2]": [0, 0, np.array([object()])],
    "batch[3]": [0, 0, 0, np.zeros(2, [("o", object)])],
    "batch[4]": [0, 0, 0, 0, np.ma.array([1])],
    "batch[5]": [0] * 5 + [np.zeros(2, [])],
    "batch[6]": [0] * 6 + [torch.empty(2, device="meta")],
    "batch[7]": [0] * 7 + [type("MyTensor", (torch.Tensor,), {})([1])],
    "batch[8]": [0] * 8 + [Point],
    "batch[9]": [0] * 9 + [Permission.READ | Permission.WRITE],
    "batch[10]": [0] * 10 + [leaf * 2],
    "batch[11].label": [0] * 11 + [annotated(torch.ones(1), leaf * 2, "label")],
    'batch[12]._meta["affine"]': [0] * 12 + [Volume(torch.ones(1), {"affine": Opaque()})],
    "batch[13]": [0] * 13 + [np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)])],
    "batch[14]": [0] * 14 + [np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)])[0]],
    "batch[15]": [0] * 15 + [np.ones(2).view(np.recarray)],
    "batch[16]": [0] * 16 + [types.SimpleNamespace(a=1)],
    "batch[17]": [0] * 17 + [torch.Generator()],
    "batch[18]": [0] * 18 + [(leaf * 2).to_sparse()],
    "batch[19]": [0] * 19 + [Volume(torch.ones(2)).requires_grad_() * 2],
    "batch[21]": [0] * 21 + [torch.Tensor._make_wrapper_subclass(Wrapper, (2,))],
    "batch[20]": [0] * 20 + [type("Made", (dict,), {})()],
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
    with pytest.raises(BatchTypeError, match=r"batches\.Opaque.*register_batch_type\(\).*collate_fn"):
        send([Opaque()])
    image = type("Image", (), {"__module__": "PIL.Image"})
    with pytest.raises(BatchTypeError, match=r"PIL\.Image\.Image.*PILToTensor"):
        send([image()])
    quantized = quietly(lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    with pytest.raises(BatchTypeError, match=r"requires gradients.*Call detach\(\)"):
        send(leaf * 2)
    with pytest.raises(BatchTypeError, match=r"Permission.*named members of an enum.*Send its value"):
        send(Permission.READ | Permission.WRITE)
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
    with pytest.raises(BatchTypeError, match=r'batch\["x"\] has the key'):
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
    monkeypatch.setattr("lightning_sm.data.batch.encode._MAX_OBJECTS", 10_000)
    shared: list[Any] = [1]
    for _ in range(40):
        shared = [shared, shared]
    with pytest.raises(BatchTooLargeError, match="10000 objects"):
        send(shared)


def test_more_lists_than_a_trainer_takes_are_an_error_of_the_data_host(monkeypatch):
    """A batch that the trainer would refuse for its many lists is refused where it is made, with what to do."""
    monkeypatch.setattr("lightning_sm.data.batch.format.MAX_LISTS", 100)
    assert send([[]] * 90) == [[]] * 90
    with pytest.raises(BatchTooLargeError, match=r"has 102 lists .* 100 are allowed. Convert numbers to tensors"):
        send([[]] * 100)


def test_batch_too_large_names_both_sizes():
    """A batch that does not fit says how many bytes it needs, how many there are, and which setting to raise."""
    with pytest.raises(BatchTooLargeError, match=r"needs at least 4000 bytes, but a slot has 1024.*max_batch_bytes"):
        send(torch.ones(1000), nbytes=1024)
