"""The types that a batch may hold besides plain containers, numbers and dense arrays.

An object is converted to *parts*, a tree that the codec can encode, and rebuilt from them. Classes are looked up only
in modules that the process has already imported: no message can make the trainer import or run a module.

Known without registration, once the user's code has imported them: ``PackedSequence``, sparse and nested tensors,
``torch.device`` and ``dtype``, paths, dates and ``Decimal``; ``tensordict.TensorDict``, ``transformers.BatchEncoding``
(without the fast tokenizer's ``Encoding`` objects), and the graphs of ``torch_geometric``. ``instances`` has the
classes that extend a builtin type, a tensor or a dataclass.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_sm.data.batch.class_names import class_name, find_class, is_hidden
from lightning_sm.data.batch.graphs import graph_maker, graph_parts, name_of_graph
from lightning_sm.data.batch.standard_values import STANDARD_VALUES
from lightning_sm.errors import BatchTypeError

_MAX_ELEMENTS = 2**62
_INDEX_DTYPES = (torch.int64, torch.int32)
_NATIVE = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, tuple, set, frozenset, str, bytes, int, float, bool})


class BatchType(NamedTuple):
    """The conversion of one class to parts, and back."""

    name: str
    to_parts: Callable[[Any], Any]
    from_parts: Callable[[Any], Any]


class _KnownType(NamedTuple):
    to_parts: Callable[[Any], Any]
    from_parts: Callable[[Any, Any], Any]


_by_class: dict[type, BatchType] = {}
_by_name: dict[str, BatchType] = {}


def register_batch_type(
    cls: type, to_parts: Callable[[Any], Any], from_parts: Callable[[Any], Any], *, name: str | None = None
) -> None:
    """Let the data service send objects of a class.

    Classes that extend a tensor, a builtin type or a dataclass need it only to be sent in another way. Call it where
    both data hosts and trainers run it, for example next to the class. It does not cover subclasses: an object that
    arrived as its parent class would be a silent change.

    Args:
        cls: The class; objects of exactly this type are sent with the two functions.
        to_parts: Takes an object; returns a tree of types that a batch may hold (dict, list, tensor, number, ...).
        from_parts: Takes that tree; returns an object. The tensors in the tree alias the received memory.
        name: Name in messages, the same on all hosts. Default: module and qualified name of the class.

    Raises:
        BatchTypeError: The data service sends the class without registration, or the name belongs to another class.
    """
    name = class_name(cls) if name is None else name
    if cls in _NATIVE or name in _TENSOR_TYPES:
        raise BatchTypeError(f"{name} needs no registration: the data service sends it already.")
    for other, known in _by_class.items():
        # The same qualified name is the same class defined again, for example by a notebook cell.
        if known.name == name and class_name(other) != class_name(cls):
            raise BatchTypeError(f"The batch type name {name!r} belongs to {class_name(other)}. Choose another name.")
    _by_class[cls] = _by_name[name] = BatchType(name, to_parts, from_parts)


def registered_types() -> dict[type, BatchType]:
    """Return what ``register_batch_type`` has registered in this process, by class."""
    return dict(_by_class)


def converter_of(obj: Any) -> tuple[str, Callable[[Any], Any]] | None:
    """Return the type's name and ``to_parts`` for an object, or None if its class is neither registered nor known."""
    if isinstance(obj, torch.Tensor) and (kind := _tensor_type_name(obj)) is not None:
        return kind, _TENSOR_TYPES[kind].to_parts
    if (registered := _by_class.get(type(obj))) is not None:
        return registered.name, registered.to_parts
    if (name := name_of_graph(obj)) is not None:
        return name, graph_parts
    name = class_name(type(obj))
    return (name, _KNOWN_TYPES[name].to_parts) if name in _KNOWN_TYPES else None


def maker_of(name: str) -> Callable[[Any], Any] | None:
    """Return ``from_parts`` for a type's name, or None if this process has neither registered nor imported the type."""
    if (found := _TENSOR_TYPES.get(name) or _by_name.get(name)) is not None:
        return found.from_parts
    if (make_graph := graph_maker(name)) is not None:
        return make_graph
    known, cls = _KNOWN_TYPES.get(name), find_class(name)
    return None if known is None or cls is None else partial(known.from_parts, cls)


def advice(cls: type) -> str:
    """Return what a user can do about a class that cannot be sent."""
    if cls.__module__.partition(".")[0] == "PIL":
        return "Convert it to a tensor in the transform, for example with torchvision's PILToTensor."
    if issubclass(cls, Enum):
        return "Only the named members of an enum can. Send its value, or convert it in collate_fn."
    if is_hidden(cls):
        return "No other process can find a class that a function made. Define it at the top of a module."
    return "Register its class with register_batch_type(), or convert it in collate_fn."


def _tensor_type_name(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "torch.jagged" if tensor.layout == torch.jagged else "torch.nested"
    name = str(tensor.layout)
    return name if name in _TENSOR_TYPES and type(tensor) in _NATIVE else None


@contextmanager
def _without_prototype_warnings() -> Iterator[None]:
    """Hide warnings that a layout is in beta or a prototype: torch has warned the user's code that chose the layout."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta")
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype")
        yield


def _dense(tensor: Any, dtypes: tuple[torch.dtype, ...] = ()) -> torch.Tensor:
    """Return a component after the checks that torch's C++ code leaves to its caller."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.layout != torch.strided:
        raise ValueError(f"a component is a {type(tensor).__name__}, not a dense tensor")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"a component has dtype {tensor.dtype} instead of one of {', '.join(map(str, dtypes))}")
    return tensor.detach()


def _size(size: Any) -> list[int]:
    if type(size) is not list or not all(type(length) is int and 0 <= length < _MAX_ELEMENTS for length in size):
        raise ValueError("a size is not a list of lengths")
    if math.prod(max(length, 1) for length in size) >= _MAX_ELEMENTS:
        raise ValueError("the product of a size overflows")
    return size


def _with_grad(tensor: torch.Tensor, requires_grad: Any) -> torch.Tensor:
    return tensor.requires_grad_() if requires_grad is True else tensor


def _coo_parts(tensor: torch.Tensor) -> Any:
    plain = tensor.detach()
    return [plain._indices(), plain._values(), list(plain.shape), plain.is_coalesced(), tensor.requires_grad]


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
    return [compressed, indices, plain.values(), list(plain.shape), tensor.requires_grad]


def _compressed_from_parts(layout: torch.layout) -> Callable[[Any], torch.Tensor]:
    @_without_prototype_warnings()
    def from_parts(parts: Any) -> torch.Tensor:
        compressed, indices, values, size, requires_grad = parts
        tensor = torch.sparse_compressed_tensor(
            _dense(compressed, _INDEX_DTYPES),
            _dense(indices, _INDEX_DTYPES),
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
    return [plain.values(), [list(component.shape) for component in plain.unbind()], tensor.requires_grad]


@_without_prototype_warnings()
def _nested_from_parts(parts: Any) -> torch.Tensor:
    values, sizes, requires_grad = parts
    buffer = _dense(values)
    sizes = [_size(size) for size in sizes]
    if buffer.dim() != 1 or not buffer.is_contiguous() or len({len(size) for size in sizes}) > 1:
        raise ValueError("the components of a nested tensor have different dimensions")
    lengths = [math.prod(size) for size in sizes]
    if sum(lengths) != buffer.numel():
        raise ValueError("the components of a nested tensor do not add up to its values")
    if not sizes:
        return _with_grad(torch.nested.nested_tensor([], dtype=buffer.dtype), requires_grad)
    shape = (len(sizes), len(sizes[0]))
    strides = [[math.prod(size[axis + 1 :]) for axis in range(len(size))] for size in sizes]
    offsets = list(accumulate(lengths, initial=0))[:-1]
    # as_nested_tensor() would copy. torch.multiprocessing rebuilds nested tensors with this function, too.
    nested = torch._nested_view_from_buffer(
        buffer,
        torch.tensor(sizes, dtype=torch.int64).view(shape),
        torch.tensor(strides, dtype=torch.int64).view(shape),
        torch.tensor(offsets, dtype=torch.int64),
    )
    return _with_grad(nested, requires_grad)


def _jagged_parts(tensor: Any) -> Any:
    # The offsets themselves, not a copy: jagged tensors can only be added if they share this object.
    return [tensor.detach().values(), tensor.offsets(), tensor.lengths(), tensor._ragged_idx, tensor.requires_grad]


def _jagged_from_parts(parts: Any) -> torch.Tensor:
    values, offsets, lengths, jagged_dim, requires_grad = parts
    values = _dense(values)
    if type(jagged_dim) is not int or not 1 <= jagged_dim <= values.dim():
        raise ValueError(f"the ragged dimension of a jagged tensor is {jagged_dim}")
    total = values.shape[jagged_dim - 1]
    starts = _dense(offsets, _INDEX_DTYPES).tolist()
    if offsets.dim() != 1 or not starts or starts[0] < 0 or starts[-1] > total or starts != sorted(starts):
        raise ValueError("the offsets of a jagged tensor are beyond its values")
    if lengths is not None:
        counts = _dense(lengths, _INDEX_DTYPES).tolist()
        if lengths.dim() != 1 or len(counts) != len(starts) - 1 or min(counts, default=0) < 0:
            raise ValueError("the lengths of a jagged tensor do not match its offsets")
        if any(start + count > total for start, count in zip(starts, counts, strict=False)):
            raise ValueError("the lengths of a jagged tensor are beyond its values")
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim)
    return _with_grad(nested, requires_grad)


def _packed_from_parts(parts: Any) -> PackedSequence:
    data = _dense(parts[0])
    batch_sizes = _dense(parts[1], (torch.int64,))
    permutations = [None if part is None else _dense(part) for part in parts[2:]]
    sizes = batch_sizes.tolist()
    if batch_sizes.dim() != 1 or sizes != sorted(sizes, reverse=True):
        raise ValueError("the batch sizes of a packed sequence do not decrease")
    if not sizes or sizes[-1] < 1 or sum(sizes) != len(data):
        raise ValueError("the batch sizes of a packed sequence do not add up to its data")
    for permutation in permutations:
        if permutation is not None and sorted(permutation.tolist()) != list(range(sizes[0])):
            raise ValueError("the order of a packed sequence is not a permutation")
    return PackedSequence(data, batch_sizes, *permutations)


def _tensordict_parts(obj: Any) -> Any:
    # Item by item: items() wraps values that are not tensors in a class of tensordict.
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
register_batch_type(PackedSequence, list, _packed_from_parts)
for _value in STANDARD_VALUES:
    register_batch_type(*_value)

_KNOWN_TYPES = {
    "transformers.tokenization_utils_base:BatchEncoding": _KnownType(
        lambda obj: [dict(obj.data), obj.n_sequences],
        lambda cls, parts: cls(parts[0], n_sequences=parts[1]),
    ),
    "tensordict._td:TensorDict": _KnownType(
        _tensordict_parts, lambda cls, parts: cls(parts[0], batch_size=parts[1], names=parts[2])
    ),
}
