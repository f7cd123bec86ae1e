"""Classes travel by name: of the user, registered, or of a known library, and never imported for a message."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import namedtuple
from typing import ClassVar

import numpy as np
import pytest
import torch

from lightning_sm.data.batch import types as batch_types
from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.batch.decode import decode
from lightning_sm.data.batch.encode import encode
from lightning_sm.data.batch.types import register_batch_type
from lightning_sm.errors import BatchTypeError, WireError
from tests.fakes.batches import Colour, Opaque, Point, Volume, header, make_slot, send

Stranger = namedtuple("Stranger", "x")
Stranger.__module__ = "module_that_nobody_imported"


class Registered:
    """A class that a test registers."""

    def __init__(self, payload):
        self.payload = payload


@pytest.fixture
def registry(monkeypatch):
    """Let a test register types of its own."""
    monkeypatch.setattr(batch_types, "_by_class", dict(batch_types._by_class))
    monkeypatch.setattr(batch_types, "_by_name", dict(batch_types._by_name))


@dataclasses.dataclass
class Temporary:
    """Names a file that goes with it."""

    path: str
    removed: ClassVar[list[str]] = []

    def __del__(self):
        self.removed.append(self.path)


def test_a_class_with_a_finalizer_is_not_built_from_a_message():
    """Neither end takes it: its finalizer would run on what somebody else says, without its __init__."""
    with pytest.raises(BatchTypeError, match=r"Temporary, which cannot be sent. Register its class"):
        send([Temporary("own")])
    Temporary.removed.clear()
    with pytest.raises(BatchTypeError, match="Temporary"):
        decode(header(["x", f"{__name__}:Temporary", ["path"], None, ["path"], ["/etc/passwd"]]), make_slot(0))
    assert Temporary.removed == []


@pytest.mark.usefixtures("registry")
def test_registered_type_arrives():
    """A registered class is converted and rebuilt by the registered functions, once per object."""
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
def test_registration_decides_for_a_class_that_needs_none():
    """A class that the codec could send is sent by its registered functions, for example without its metadata."""
    register_batch_type(
        Volume, lambda obj: obj.as_subclass(torch.Tensor), lambda part: Volume(part, {"sent": "without"})
    )
    received = send([Volume(torch.ones(2), {"large": Opaque()})])[0]
    assert type(received) is Volume
    assert received.meta == {"sent": "without"}


@pytest.mark.usefixtures("registry")
def test_a_class_that_only_the_trainer_registers_is_refused():
    """An object that comes without the registered conversion is not made without its check."""
    message = header(["x", f"{Point.__module__}:Point", ["x", "y"], ["u", 1, 2], [], []])
    assert decode(message, make_slot(0)) == Point(1, 2)
    register_batch_type(Point, list, lambda parts: Point(*parts))
    with pytest.raises(BatchTypeError, match=r"Point by its attributes.*is registered.*on all hosts"):
        decode(message, make_slot(0))


@pytest.mark.usefixtures("registry")
def test_failing_registered_functions_are_named():
    """An error in a registered function becomes one that names the path, or the type."""
    register_batch_type(Registered, lambda obj: obj.missing, Registered, name="reg")
    with pytest.raises(BatchTypeError, match=r"batch\[0\]: to_parts\(\) of reg failed: AttributeError"):
        send([Registered(1)])
    register_batch_type(Registered, lambda obj: 1, lambda parts: 1 / 0, name="reg")
    with pytest.raises(WireError, match=r"from_parts\(\) of reg failed: ZeroDivisionError"):
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
        ["x", "wsgiref.simple_server:ServerHandler", None, None, [], []],
        ["e", "wsgiref.simple_server:X", "Y"],
        ["p", "wsgiref.simple_server:ServerHandler", 1],
        ["p", "tensordict._td:TensorDict", 1],
        ["x", "os:path.join", None, None, [], []],
        ["x", "torch:Generator", None, None, [], []],
        ["x", "torch.distributed:Store", None, None, [], []],
        ["x", "torch.nn.utils.rnn:PackedSequence", ["x"], ["u", 1], [], []],
        ["x", "pathlib:PosixPath", None, None, [], []],
        ["x", f"{Colour.__module__}:Colour", None, None, ["_value_"], [2]],
        ["x", f"{Colour.__module__}:Opaque", None, None, ["x"], [2]],
        ["x", "torch.nn:Linear", None, None, ["weight"], [2]],
        ["x", "torch.nested._internal.nested_tensor:NestedTensor", None, ["t", 0, "int8", [0], None, 0], [], []],
        ["x", f"{Point.__module__}:Point", ["x", "z"], ["u", 1, 2], [], []],
        ["x", f"{Point.__module__}:Box", ["corners"], None, ["corners"], [1]],
        ["e", f"{Colour.__module__}:Colour", "BLUE"],
    ):
        with pytest.raises(BatchTypeError, match=r"import|has the fields|but not here|in this process"):
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
