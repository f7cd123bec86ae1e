"""The types that a batch may hold besides plain containers, numbers and dense arrays.

A type is taken apart into *parts*, a tree that the codec can encode, and put together again from them. A class is only
ever looked up among what the process has already imported: no message can make the trainer import or run a module.

Known without registration, once the user's code has imported them: ``PackedSequence``, sparse and nested tensors,
dataclasses, named tuples and enum members; torchvision's ``tv_tensors``, ``tensordict.TensorDict``,
``transformers.BatchEncoding`` (without the fast tokenizer's ``Encoding`` objects) and ``BatchFeature``, and
``torch_geometric``'s ``Data`` and ``Batch`` of ``Data``.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_sm.errors import BatchTypeError

_MAX_ELEMENTS = 2**62
_NATIVE = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, tuple, set, frozenset, str, bytes, int, float, bool})


class BatchType(NamedTuple):
    """How objects of one class become parts, and parts become such an object again."""

    name: str
    to_parts: Callable[[Any], Any]
    from_parts: Callable[[Any], Any]


class _KnownType(NamedTuple):
    # The class to look up in the trainer; another one than the object's where that is made at run time.
    class_name: str
    to_parts: Callable[[Any], Any]
    from_parts: Callable[[Any, Any], Any]


_by_class: dict[type, BatchType] = {}
_by_name: dict[str, BatchType] = {}


def register_batch_type(
    cls: type, to_parts: Callable[[Any], Any], from_parts: Callable[[Any], Any], *, name: str | None = None
) -> None:
    """Teach the data service to send objects of a class.

    Call it where both the data hosts and the trainers run it, for example next to the class. Objects of subclasses are
    not covered: a subclass that came back as its parent would be a silent change.

    Args:
        cls: The class; objects whose type is exactly this class are sent with the two functions.
        to_parts: Takes an object; returns a tree of what a batch may hold (dict, list, tensor, number, ...).
        from_parts: Takes that tree; returns an object. Its tensors alias the received memory.
        name: Name on the wire, the same on all hosts. By default the class's module and qualified name.

    Raises:
        BatchTypeError: The codec knows the class itself, or the name belongs to another class.
    """
    name = class_name(cls) if name is None else name
    if cls in _NATIVE or name in _TENSOR_TYPES:
        raise BatchTypeError(f"{name} needs no registration: the data service sends it as it is.")
    for other, known in _by_class.items():
        # The same qualified name is the same class defined again, for example by a notebook cell.
        if known.name == name and class_name(other) != class_name(cls):
            raise BatchTypeError(f"The batch type name {name!r} belongs to {class_name(other)}; choose another name.")
    _by_class[cls] = _by_name[name] = BatchType(name, to_parts, from_parts)


def class_name(cls: type) -> str:
    """Return the name under which another process finds the class, ``module:qualified.name``.

    Args:
        cls: Any class.
    """
    # multiprocessing loads the user's script as __mp_main__ in the processes that it spawns.
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}:{cls.__qualname__}"


def find_class(name: str) -> type | None:
    """Return a class that this process has imported, or None. Imports nothing and runs no code of the module.

    Args:
        name: What ``class_name`` returned, here or in another process.
    """
    module, _, qualified_name = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        # vars() instead of getattr(): a module's __getattr__ may import whatever it is asked for.
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    return found if isinstance(found, type) else None


def type_of_object(obj: Any) -> BatchType | None:
    """Return how to take an object apart, or None when its class is neither registered nor known.

    Args:
        obj: A leaf of a batch.
    """
    if isinstance(obj, torch.Tensor) and (name := _tensor_type_name(obj)) is not None:
        return _TENSOR_TYPES[name]
    registered = _by_class.get(type(obj))
    if registered is not None:
        return registered
    name = class_name(type(obj))
    known = _KNOWN_TYPES.get(name)
    return None if known is None else _bind(name, known, type(obj))


def type_of_name(name: str) -> BatchType | None:
    """Return how to put a type together, or None when this process has neither registered nor imported it.

    Args:
        name: The name of a ``BatchType`` from a message.
    """
    found = _TENSOR_TYPES.get(name) or _by_name.get(name)
    if found is not None or name not in _KNOWN_TYPES:
        return found
    cls = find_class(_KNOWN_TYPES[name].class_name)
    return None if cls is None else _bind(name, _KNOWN_TYPES[name], cls)


def advice(cls: type) -> str:
    """Return the sentence that tells a user what to do about a class that cannot be sent.

    Args:
        cls: The class of the leaf.
    """
    if cls.__module__.partition(".")[0] == "PIL":
        return "Convert it to a tensor in the transform, for example with torchvision's PILToTensor."
    return "Register its class with register_batch_type(), or convert it in collate_fn."


def rebuild_dataclass(cls: type, values: dict[str, Any]) -> Any:
    """Make an object of a dataclass without running its ``__init__``, which may do anything.

    Args:
        cls: The dataclass.
        values: The value of every field.
    """
    instance: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def field_names(cls: type) -> list[str] | None:
    """Return the fields of a dataclass or named tuple, or None for any other class.

    Args:
        cls: Any class.
    """
    if issubclass(cls, tuple):
        names = getattr(cls, "_fields", None)
        return list(names) if isinstance(names, tuple) else None
    # A dataclass that is also a dict or tensor holds more than its fields, and object.__new__ cannot make it.
    if not dataclasses.is_dataclass(cls) or issubclass(cls, (dict, list, set, str, bytes, int, float, torch.Tensor)):
        return None
    return [field.name for field in dataclasses.fields(cls)]


def _bind(name: str, known: _KnownType, cls: type) -> BatchType:
    return BatchType(name, known.to_parts, lambda parts: known.from_parts(cls, parts))


def _tensor_type_name(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "torch.jagged" if tensor.layout == torch.jagged else "torch.nested"
    name = str(tensor.layout)
    return name if name in _TENSOR_TYPES and type(tensor) in _NATIVE else None


@contextmanager
def _without_prototype_warnings() -> Iterator[None]:
    """Hide that a layout is a prototype or in beta: the user's own code heard so where it chose the layout."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta")
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype")
        yield


def _dense(tensor: Any, dtypes: tuple[torch.dtype, ...] = ()) -> torch.Tensor:
    """Return a component after making sure that C++ code may rely on what it is."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.layout != torch.strided:
        raise ValueError(f"a component is a {type(tensor).__name__}, not a dense tensor")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"indices of dtype {tensor.dtype}")
    return tensor.detach()


def _size(size: Any) -> list[int]:
    if type(size) is not list or not all(type(length) is int and 0 <= length < _MAX_ELEMENTS for length in size):
        raise ValueError("a size is not a list of lengths")
    if math.prod(max(length, 1) for length in size) >= _MAX_ELEMENTS:
        raise ValueError("a size whose product overflows")
    return size


def _with_grad(tensor: torch.Tensor, requires_grad: Any) -> torch.Tensor:
    return tensor.requires_grad_() if requires_grad is True else tensor


def _is_grad_leaf(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _coo_parts(tensor: torch.Tensor) -> Any:
    plain = tensor.detach()
    return [plain._indices(), plain._values(), list(plain.shape), plain.is_coalesced(), _is_grad_leaf(tensor)]


def _coo_from_parts(parts: Any) -> torch.Tensor:
    indices, values, size, is_coalesced, requires_grad = parts
    tensor = torch.sparse_coo_tensor(
        _dense(indices, (torch.int64,)),
        _dense(values),
        _size(size),
        is_coalesced=is_coalesced is True or None,
        check_invariants=True,
    )
    return _with_grad(tensor, requires_grad)


@_without_prototype_warnings()
def _compressed_parts(tensor: torch.Tensor) -> Any:
    plain = tensor.detach()
    by_row = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = plain.crow_indices() if by_row else plain.ccol_indices()
    indices = plain.col_indices() if by_row else plain.row_indices()
    return [compressed, indices, plain.values(), list(plain.shape), _is_grad_leaf(tensor)]


def _compressed_from_parts(layout: torch.layout) -> Callable[[Any], torch.Tensor]:
    @_without_prototype_warnings()
    def from_parts(parts: Any) -> torch.Tensor:
        compressed, indices, values, size, requires_grad = parts
        integers = (torch.int64, torch.int32)
        tensor = torch.sparse_compressed_tensor(
            _dense(compressed, integers),
            _dense(indices, integers),
            _dense(values),
            _size(size),
            layout=layout,
            check_invariants=True,
        )
        return _with_grad(tensor, requires_grad)

    return from_parts


@_without_prototype_warnings()
def _nested_parts(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().contiguous()
    return [plain.values(), [list(component.shape) for component in plain.unbind()], _is_grad_leaf(tensor)]


@_without_prototype_warnings()
def _nested_from_parts(parts: Any) -> torch.Tensor:
    values, sizes, requires_grad = parts
    buffer, sizes = _dense(values), [_size(size) for size in sizes]
    if buffer.dim() != 1 or not buffer.is_contiguous() or len({len(size) for size in sizes}) > 1:
        raise ValueError("a nested tensor's components have different dimensions")
    lengths = [math.prod(size) for size in sizes]
    if sum(lengths) != buffer.numel():
        raise ValueError("a nested tensor's components do not add up to its values")
    if not sizes:
        return _with_grad(torch.nested.nested_tensor([], dtype=buffer.dtype), requires_grad)
    shape = (len(sizes), len(sizes[0]))
    strides = [[math.prod(size[axis + 1 :]) for axis in range(len(size))] for size in sizes]
    offsets = list(accumulate(lengths, initial=0))[:-1]
    # Not as_nested_tensor(): it copies. torch.multiprocessing rebuilds nested tensors with the same function.
    nested = torch._nested_view_from_buffer(
        buffer,
        torch.tensor(sizes, dtype=torch.int64).view(shape),
        torch.tensor(strides, dtype=torch.int64).view(shape),
        torch.tensor(offsets, dtype=torch.int64),
    )
    return _with_grad(nested, requires_grad)


def _jagged_parts(tensor: Any) -> Any:
    # The offsets themselves, not a copy: jagged tensors can be added only when they share this object.
    return [tensor.detach().values(), tensor.offsets(), tensor.lengths(), tensor._ragged_idx, _is_grad_leaf(tensor)]


def _jagged_from_parts(parts: Any) -> torch.Tensor:
    values, offsets, lengths, jagged_dim, requires_grad = parts
    values, integers = _dense(values), (torch.int64, torch.int32)
    if type(jagged_dim) is not int or not 1 <= jagged_dim <= values.dim():
        raise ValueError(f"a jagged tensor whose ragged dimension is {jagged_dim}")
    starts, total = _dense(offsets, integers).tolist(), values.shape[jagged_dim - 1]
    if offsets.dim() != 1 or not starts or starts[0] < 0 or starts[-1] > total or starts != sorted(starts):
        raise ValueError("a jagged tensor's offsets leave its values")
    if lengths is not None:
        counts = _dense(lengths, integers).tolist()
        if lengths.dim() != 1 or len(counts) != len(starts) - 1 or min(counts, default=0) < 0:
            raise ValueError("a jagged tensor's lengths do not fit its offsets")
        if any(start + count > total for start, count in zip(starts, counts, strict=False)):
            raise ValueError("a jagged tensor's lengths leave its values")
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim)
    return _with_grad(nested, requires_grad)


def _packed_from_parts(parts: Any) -> PackedSequence:
    data, batch_sizes = _dense(parts[0]), _dense(parts[1])
    permutations = [None if part is None else _dense(part) for part in parts[2:]]
    sizes = batch_sizes.tolist()
    if batch_sizes.dtype != torch.int64 or batch_sizes.dim() != 1 or sizes != sorted(sizes, reverse=True):
        raise ValueError("a packed sequence's batch sizes do not decrease")
    if not sizes or sizes[-1] < 1 or sum(sizes) != len(data):
        raise ValueError("a packed sequence's batch sizes do not add up to its data")
    for permutation in permutations:
        if permutation is not None and sorted(permutation.tolist()) != list(range(sizes[0])):
            raise ValueError("a packed sequence's order is not a permutation")
    return PackedSequence(data, batch_sizes, *permutations)


def _tv_parts(obj: Any) -> Any:
    # format is an enum of torchvision; its constructor takes the name too.
    settings = {name: getattr(obj, name) for name in ("canvas_size", "clamping_mode") if hasattr(obj, name)}
    if hasattr(obj, "format"):
        settings["format"] = obj.format.name
    return [obj.as_subclass(torch.Tensor), settings]


def _tv_from_parts(cls: Any, parts: Any) -> Any:
    data, settings = parts
    return cls(_dense(data), **settings) if settings else _dense(data).as_subclass(cls)


def _graph_batch_parts(obj: Any) -> Any:
    base: Any = find_class(_GRAPH_BATCH)
    if base is None or not isinstance(obj, base):
        raise ValueError("another class of the same name is known")
    return [obj.to_dict(), obj._slice_dict, obj._inc_dict, obj._num_graphs]


def _graph_batch_from_parts(cls: Any, parts: Any) -> Any:
    fields, slices, increments, num_graphs = parts
    batch = cls()
    for name, value in fields.items():
        batch[name] = value
    batch._slice_dict, batch._inc_dict, batch._num_graphs = slices, increments, num_graphs
    return batch


def _tensordict_parts(obj: Any) -> Any:
    # Item by item: items() wraps what is not a tensor into a class of tensordict's own.
    return [{name: obj[name] for name in obj.keys()}, list(obj.batch_size), list(obj.names)]  # noqa: SIM118 - no mapping


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_TENSOR_TYPES = {
    kind.name: kind
    for kind in (
        BatchType("torch.sparse_coo", _coo_parts, _coo_from_parts),
        *(BatchType(str(layout), _compressed_parts, _compressed_from_parts(layout)) for layout in _COMPRESSED),
        BatchType("torch.nested", _nested_parts, _nested_from_parts),
        BatchType("torch.jagged", _jagged_parts, _jagged_from_parts),
    )
}
_packed = BatchType(class_name(PackedSequence), list, _packed_from_parts)
_by_class[PackedSequence] = _by_name[_packed.name] = _packed

_GRAPH_BATCH = "torch_geometric.data.batch:Batch"
# torch_geometric makes the class of a batch at run time, inside a function of the module abc.
_GRAPH_BATCH_OF_DATA = "abc:DataBatch"
_KNOWN_TYPES = {
    _GRAPH_BATCH_OF_DATA: _KnownType(_GRAPH_BATCH, _graph_batch_parts, _graph_batch_from_parts),
}


def _know(name: str, to_parts: Callable[[Any], Any], from_parts: Callable[[Any, Any], Any]) -> None:
    _KNOWN_TYPES[name] = _KnownType(name, to_parts, from_parts)


for _name in ("image:Image", "video:Video", "mask:Mask", "bounding_boxes:BoundingBoxes", "keypoints:KeyPoints"):
    _know(f"torchvision.tv_tensors._{_name}", _tv_parts, _tv_from_parts)
_know(
    "transformers.tokenization_utils_base:BatchEncoding",
    lambda obj: [dict(obj.data), obj.n_sequences],
    lambda cls, parts: cls(parts[0], n_sequences=parts[1]),
)
_know("transformers.feature_extraction_utils:BatchFeature", lambda obj: dict(obj.data), lambda cls, parts: cls(parts))
_know(
    "tensordict._td:TensorDict",
    _tensordict_parts,
    lambda cls, parts: cls(parts[0], batch_size=parts[1], names=parts[2]),
)
_know("torch_geometric.data.data:Data", lambda obj: obj.to_dict(), lambda cls, parts: cls.from_dict(parts))
