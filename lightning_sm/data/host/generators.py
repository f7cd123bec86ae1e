"""The random generators that user code draws from: the global ones, and those that its objects hold."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import getitem
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

# The global generators; those of ``random`` and ``np.random`` are found through their bound methods.
_GLOBALS = (random.random.__self__, np.random.random_sample.__self__, torch.default_generator)  # type: ignore[attr-defined]

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# Limits for the search, because a dataset may hold a million samples.
_MAX_OBJECTS = 10_000
_MAX_ITEMS = 64

# Types of objects that hold no generators.
_LEAVES = (bool, int, float, complex, str, bytes, np.generic, np.ndarray, torch.Tensor, ModuleType, type(None))

# For each type of container, a function that lists the keys.
_CONTAINERS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    list: lambda value: range(list.__len__(value)),
    tuple: lambda value: range(tuple.__len__(value)),
    deque: lambda value: range(deque.__len__(value)),
    dict: lambda value: list(dict.keys(value)),
}

_FUNCTIONS = (FunctionType, staticmethod, classmethod, type)

# Functions and classes of these libraries are not searched, because they draw from the global generators. Instances of
# the classes are searched.
_LIBRARIES = {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_sm"}

# Odd, so that its multiples differ in their last 64 bits and in their last 32 bits.
_STEP = 0x9E3779B97F4A7C15

_Place = tuple[Callable[[Any, Any], Any], Any, Any]


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator with 64 bits, or as many of them as it accepts."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = _state_of_pcg64(seed) if type(bits) is np.random.PCG64 else type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        try:
            # Avoid the last 32 bits, which torch uses: with equal seeds, NumPy and torch would draw the same bits.
            generator.seed((seed * _STEP >> 32) & 0xFFFFFFFF)
        except TypeError:  # not a Mersenne Twister
            bits = getattr(np.random, generator.get_state(legacy=False)["bit_generator"])(seed)
            generator.set_state(np.random.RandomState(bits).get_state(legacy=False))
    else:
        generator.seed(seed)


def _state_of_pcg64(seed: int) -> dict[str, Any]:
    """Return a state for ``default_rng()`` generators, in a quarter of the time that NumPy takes to expand a seed.

    Any state with an odd increment is valid.
    """
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=32).digest()
    words = {"state": int.from_bytes(digest[:16], "little"), "inc": int.from_bytes(digest[16:], "little") | 1}
    return {"bit_generator": "PCG64", "state": words, "has_uint32": 0, "uinteger": 0}


def seed_all(seed: int) -> None:
    """Seed the global generators of ``random``, NumPy and torch with 64 bits."""
    for generator in _GLOBALS:
        seed_generator(generator, seed)


class HeldGenerators:
    """The random generators that objects hold, directly or indirectly.

    The search follows attributes, containers, methods, closures, and the globals that functions use. It remembers
    places, not generators: libraries may replace generators, as MONAI's ``set_random_state`` does.

    Args:
        *owners: Objects to search.
    """

    def __init__(self, *owners: object) -> None:
        self._owners = owners
        self._places: dict[tuple[int, object], _Place] = {}
        self.search_again()

    def search_again(self) -> None:
        """Add generators created since the last search, because code may create its generators on first use."""
        for place in _find(self._owners):
            self._places.setdefault((id(place[1]), place[2]), place)

    def seed(self, seed: int) -> None:
        """Seed all generators, each with a different seed derived from ``seed``."""
        for number, generator in self._numbered():
            seed_generator(generator, (seed + number * _STEP) & 0xFFFFFFFFFFFFFFFF)

    def _numbered(self) -> Iterator[tuple[int, Any]]:
        """Yield each generator once, with the number of its place."""
        seen: set[int] = set()
        for number, (get, holder, key) in enumerate(self._places.values(), start=1):
            with suppress(Exception):  # the place may be empty now
                generator = get(holder, key)
                if _is_held(generator) and id(generator) not in seen:
                    seen.add(id(generator))
                    yield number, generator


def reachable(*owners: object) -> Iterator[Any]:
    """Yield the objects, and everything in them that the search for generators visits.

    Args:
        *owners: Objects to search.
    """
    yield from owners
    for _, item in _walk(owners):
        yield item


def _find(owners: Iterable[object]) -> Iterator[_Place]:
    return (place for place, item in _walk(owners) if _is_held(item))


def _walk(owners: Iterable[object]) -> Iterator[tuple[_Place, Any]]:
    queue, functions = deque(owners), deque[Any]()  # functions come last: they lead to whole libraries
    seen: dict[int, object] = {}  # keeps the objects alive, so that their ids stay unique
    while (queue or functions) and len(seen) < _MAX_OBJECTS:
        value = queue.popleft() if queue else functions.popleft()
        with suppress(Exception):  # from properties and proxies in user code
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            seen[id(value)] = value
            for place in _places_in(value):
                with suppress(Exception):  # as above, or the place is empty
                    get, holder, key = place
                    item = get(holder, key)
                    yield place, item
                    if not _is_held(item):
                        (functions if isinstance(item, _FUNCTIONS) else queue).append(item)


def _is_held(value: Any) -> bool:
    return isinstance(value, _KINDS) and not any(value is other for other in _GLOBALS)


def _places_in(value: Any) -> Iterator[_Place]:
    for container, keys in _CONTAINERS.items():
        if isinstance(value, container) and container.__len__(value) <= _MAX_ITEMS:
            # Bypass the methods of subclasses, which may read files.
            yield from ((container.__getitem__, value, key) for key in keys(value))
    if isinstance(value, FunctionType):
        if not _is_of_library(value):
            own = "__closure__", "__defaults__", "__kwdefaults__", "__dict__"
            yield from ((getattr, value, name) for name in own)
            names = _names(value.__code__) & value.__globals__.keys()
            yield from ((getitem, value.__globals__, name) for name in sorted(names))
        return
    elif isinstance(value, partial):
        yield from ((getattr, value, name) for name in ("func", "args", "keywords"))
    elif isinstance(value, (MethodType, staticmethod, classmethod)):
        yield from ((getattr, value, name) for name in ("__self__", "__func__"))
    elif isinstance(value, CellType):
        yield getattr, value, "cell_contents"
    with suppress(Exception):
        attributes = value.__dict__
        yield from ((getitem, attributes, name) for name in list(attributes))
    yield from _places_in_class(value, value if isinstance(value, type) else type(value))


def _places_in_class(value: Any, its_class: type) -> Iterator[_Place]:
    for cls in its_class.__mro__:
        if _is_of_library(cls):
            continue
        slots = vars(cls).get("__slots__", ())
        yield from ((getattr, value, name) for name in ((slots,) if isinstance(slots, str) else slots))
        for name, item in vars(cls).items():
            if _is_held(item):
                # The object may replace it with an instance attribute, as MONAI's transforms do, so look it up there.
                yield getattr, value, name
            elif isinstance(item, _FUNCTIONS) and not (name == "__init__" and value is not its_class):  # already ran
                yield getitem, vars(cls), name


def _names(code: CodeType) -> set[str]:
    """Return the names used by a function's code, and by the functions nested in it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _is_of_library(value: Any) -> bool:
    root = str(value.__module__).partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names
