"""Objects of classes that extend a builtin type, a tensor or a dataclass: a plain value, and attributes.

An object is taken apart and put together by the methods of the builtin type alone. No method of its own class runs, on
either end: not ``__new__``, ``__init__``, ``__setattr__``, ``__setitem__``, ``__setstate__`` or a property.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

import torch


class Layout(NamedTuple):
    """How the objects of a class are stored.

    Attributes:
        base: The builtin type whose value they have, or None for attributes alone.
        fields: Names of the fields of a dataclass or named tuple, in order.
        required: Fields that each object has as attributes of its own.
        dictionary: The descriptor of ``__dict__``, if they have one.
        slots: The descriptors of ``__slots__``, by name.
    """

    base: type | None
    fields: list[str] | None
    required: frozenset[str]
    dictionary: GetSetDescriptorType | None
    slots: dict[str, MemberDescriptorType]


def layout_of(cls: Any) -> Layout | None:
    """Return how the objects of a class are stored, or None if they cannot be taken apart."""
    return _layout_of(cls)


@lru_cache(maxsize=1024)
def _layout_of(cls: Any) -> Layout | None:
    # A finalizer would run on what a message says, in an object that no __init__ has made. The member of an enum is not
    # made again. Tensors with __tensor_unflatten__ have no memory of their own.
    if issubclass(cls, Enum) or any("__del__" in vars(c) or "__tensor_unflatten__" in vars(c) for c in cls.__mro__):
        return None
    base = next((parent for parent in cls.__mro__ if parent in _BASES), None)
    if base is None and not dataclasses.is_dataclass(cls) and not issubclass(cls, (UserDict, UserList)):
        return None
    if base is not torch.Tensor:
        try:
            _new(base or object)(cls)
        except TypeError:  # a class written in C whose objects hold more, or an abstract class
            return None
    fields = None
    if dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls)]
    elif base is tuple and isinstance(names := getattr(cls, "_fields", None), tuple):
        fields = list(names)
    dictionaries = (vars(parent).get("__dict__") for parent in cls.__mro__)
    slots = {
        name: descriptor
        for parent in reversed(cls.__mro__)
        if "__slots__" in vars(parent)
        for name, descriptor in vars(parent).items()
        if isinstance(descriptor, MemberDescriptorType)
    }
    dictionary = next((found for found in dictionaries if isinstance(found, GetSetDescriptorType)), None)
    # The class may have a default, or compute the attribute: tensordict's classes do.
    elsewhere = set().union(*(vars(parent) for parent in cls.__mro__)) - set(slots)
    required = frozenset(fields or ()) - elsewhere if "__getattr__" not in elsewhere else frozenset()
    return Layout(base, fields, required, dictionary, slots)


def plain_value(obj: Any, base: type) -> Any:
    """Return the value of an object as an object of its builtin type."""
    return _BASES[base][0](obj)


def attributes(obj: Any, layout: Layout) -> dict[str, Any]:
    """Return the attributes of an object, whether in its ``__dict__`` or in slots."""
    values = {} if layout.dictionary is None else dict(layout.dictionary.__get__(obj))
    for name, descriptor in layout.slots.items():
        with suppress(AttributeError):  # the slot is empty
            values[name] = descriptor.__get__(obj)
    return values


def rebuild(cls: type, layout: Layout, value: Any, values: dict[str, Any]) -> Any:
    """Return an object of a class.

    Args:
        cls: The class.
        layout: Its layout.
        value: The value, of type ``layout.base`` (a ``Parameter`` counts as a tensor), or None.
        values: The attributes.

    Raises:
        TypeError: The class has no place for an attribute.
    """
    obj: Any = object.__new__(cls) if layout.base is None else _BASES[layout.base][1](cls, value)
    others = {}
    for name, attribute in values.items():
        if name in layout.slots:
            layout.slots[name].__set__(obj, attribute)
        else:
            others[name] = attribute
    if others:
        if layout.dictionary is None:
            raise TypeError(f"its objects have no attribute {next(iter(others))!r}")
        layout.dictionary.__get__(obj).update(others)
    return obj


def _plain_tensor(obj: torch.Tensor) -> torch.Tensor:
    if type(obj) in (torch.Tensor, torch.nn.Parameter):
        return obj
    # Its class may override every function of torch.
    with torch._C.DisableTorchFunctionSubclass():
        return obj.detach().as_subclass(torch.Tensor).requires_grad_(obj.requires_grad)


def _tensor_of(cls: Any, value: torch.Tensor) -> torch.Tensor:
    # as_subclass() would make a leaf that requires gradients a result of a computation.
    return value if type(value) is cls else torch.Tensor._make_subclass(cls, value, value.requires_grad)


def _ordered_dict_of(cls: Any, value: OrderedDict[Any, Any]) -> Any:
    obj = OrderedDict.__new__(cls)
    for key, item in value.items():
        OrderedDict.__setitem__(obj, key, item)  # update() would call a __setitem__ of cls
    return obj


def _default_dict_of(cls: Any, value: Any) -> Any:
    obj = defaultdict.__new__(cls)
    defaultdict.__init__(obj, value.default_factory, value)
    return obj


def _deque_of(cls: Any, value: deque[Any]) -> Any:
    obj = deque.__new__(cls)
    deque.__init__(obj, value, value.maxlen)
    return obj


def _new(base: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = base.__new__
    return made


def _mutable(base: Any) -> Callable[[Any, Any], Any]:
    def make(cls: Any, value: Any) -> Any:
        obj = base.__new__(cls)
        base.__init__(obj, value)
        return obj

    return make


# For each builtin type: its plain value in an object of a subclass, and an object of a subclass from a plain value.
_BASES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Tensor: (_plain_tensor, _tensor_of),
    OrderedDict: (lambda obj: OrderedDict(OrderedDict.items(obj)), _ordered_dict_of),
    defaultdict: (lambda obj: defaultdict(obj.default_factory, dict.items(obj)), _default_dict_of),
    deque: (lambda obj: deque(deque.__iter__(obj), obj.maxlen), _deque_of),
    dict: (lambda obj: dict(dict.items(obj)), _mutable(dict)),
    list: (lambda obj: list(list.__iter__(obj)), _mutable(list)),
    set: (lambda obj: set(set.__iter__(obj)), _mutable(set)),
    tuple: (lambda obj: tuple(tuple.__iter__(obj)), _new(tuple)),
    frozenset: (lambda obj: frozenset(frozenset.__iter__(obj)), _new(frozenset)),
    str: (str.__str__, _new(str)),
    int: (int.__int__, _new(int)),
    float: (float.__float__, _new(float)),
}
