"""Rebuild dataclasses from JSON of another host, which may be anything: only what the type hints say is accepted.

Both ends have the same version, so unknown fields and values are errors.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_sm.data.settings import MAX_SHARDS
from lightning_sm.errors import WireError

# Attributes of a DataModule have up to 64 KB each. A list takes 20 times its bytes once it is parsed.
_MAX_BYTES = 32 << 20
_MAX_CONTAINERS = 1 << 18
_MAX_INT = 2**63 - 1
_MAX_FLOAT = 2.0**62
_RANGES = {
    "seed": (-_MAX_INT - 1, _MAX_INT),
    "world_size": (1, 1 << 16),
    "num_shards": (1, MAX_SHARDS),
    "part": (0, 1 << 16),
    "num_parts": (1, 1 << 16),
    "loader": (0, 1 << 16),
    "batch_size": (0, 1 << 32),
    "stream_port": (0, (1 << 16) - 1),
}

_T = TypeVar("_T")


def parse_json(data: bytes, what: str, max_bytes: int = _MAX_BYTES) -> Any:
    """Parse JSON.

    Args:
        data: The bytes.
        what: What they are, for the error.
        max_bytes: How many there may be.

    Raises:
        WireError: They are too many, or no JSON.
    """
    num_containers = data.count(b"[") + data.count(b"{")
    if len(data) > max_bytes or num_containers > _MAX_CONTAINERS:
        raise WireError(
            f"The {what} has {len(data)} bytes with {num_containers} lists and objects; {max_bytes} bytes with "
            f"{_MAX_CONTAINERS} are allowed."
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"The {what} is not valid JSON: {reprlib.repr(str(error))}.") from error


def from_json(kind: Callable[..., _T], values: Any, what: str) -> _T:
    """Rebuild a dataclass, with those in it. Fields with a default may be left out.

    Args:
        kind: The dataclass. Its fields are plain, literals, dataclasses, lists or dicts of these, or perhaps None.
        values: Its fields, as JSON values.
        what: What it is, for the error.

    Raises:
        WireError: A field is missing, unknown, out of range or of another type.
    """
    if not isinstance(values, dict):
        raise WireError(f"For the {what} came {reprlib.repr(values)}, which is not a JSON object.")
    hints, required = _fields(kind)
    if missing := required - values.keys():
        raise WireError(f"Fields are missing in the {what}: {', '.join(sorted(missing))}.")
    if unknown := values.keys() - hints.keys():
        raise WireError(f"Fields are unknown in the {what}: {reprlib.repr(sorted(unknown))}.")
    return kind(**{name: _value(value, hints[name], name, what) for name, value in values.items()})


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of the fields, and the names of those without a default."""
    hints, own = get_type_hints(kind), fields(kind)
    required = (one.name for one in own if one.default is MISSING and one.default_factory is MISSING)
    return {one.name: hints[one.name] for one in own}, frozenset(required)


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return a type without its arguments, the arguments, and whether it is a dataclass."""
    return get_origin(hint) or hint, get_args(hint), is_dataclass(hint)


def _value(value: Any, hint: Any, name: str, what: str) -> Any:
    kind, inner, is_nested = _parts(hint)
    if hint is Any or (kind is UnionType and value is None):
        return value
    if kind is UnionType:  # of a type and None
        return _value(value, inner[0], name, what)
    if is_nested:
        return from_json(kind, value, f"{name} of the {what}")
    if not _is(value, kind, inner):
        expected = " or ".join(map(repr, inner)) if kind is Literal else f"of type {kind.__name__}"
        raise WireError(f"In the {what}, {name!r} must be {expected}, not {reprlib.repr(value)}.")
    if kind is int:
        least, most = _RANGES.get(name, (0, _MAX_INT))
        if not least <= value <= most:
            raise WireError(f"In the {what}, {name} is {reprlib.repr(value)}; {least} to {most} are allowed.")
    if kind is list:
        return [_value(item, inner[0], name, what) for item in value]
    if kind is dict:
        return {key: _value(item, inner[1], name, what) for key, item in value.items()}
    return value


def _is(value: Any, kind: Any, options: tuple[Any, ...]) -> bool:
    if kind is Literal:
        return value in options
    if kind is float:
        return type(value) in (int, float) and abs(value) <= _MAX_FLOAT  # false for nan, too
    return type(value) is kind
