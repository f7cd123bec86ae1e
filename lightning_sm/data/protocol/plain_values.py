"""Attributes that a data host copies to the trainers: numbers, strings, and containers of these, as JSON and back.

JSON itself has no tuples and sets, and turns the keys of dicts into strings.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

from lightning_sm.errors import WireError

# They are numbers and names, not data.
MAX_PLAIN_BYTES = 1 << 16
_MAX_DEPTH = 32

_SCALARS = (bool, int, float, str)


class _NotPlainError(Exception):
    pass


def plain_json(value: Any) -> str | None:
    """Return a value as JSON, or None if it is not plain.

    Plain are None, bool, int, float, str, and lists, tuples, sets and dicts of plain values, up to 64 KB in all.

    Args:
        value: The value.
    """
    encoder = _ValueEncoder()
    try:
        text = json.dumps(encoder.encode(value, 0))
    except _NotPlainError:
        return None
    return text if len(text) <= MAX_PLAIN_BYTES else None


def plain_value(text: str) -> Any:
    """Return the value that ``plain_json`` has encoded.

    Args:
        text: The JSON.

    Raises:
        WireError: It is not such a value.
    """
    if len(text) > MAX_PLAIN_BYTES:
        raise WireError(f"A plain value has {len(text)} characters of JSON; {MAX_PLAIN_BYTES} are allowed.")
    try:
        encoded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"A plain value is not valid JSON: {reprlib.repr(str(error))}.") from error
    return _decode(encoded, 0)


class _ValueEncoder:
    """The encoder of one value; it stops early at a large one, such as the samples of a dataset in memory."""

    def __init__(self) -> None:
        self._left = MAX_PLAIN_BYTES

    def encode(self, value: Any, depth: int) -> Any:
        self._left -= len(value) if isinstance(value, str) else 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise _NotPlainError
        if value is None or isinstance(value, _SCALARS):
            return value
        # By the methods of the builtin types: those of a subclass may compute, import packages, or fail.
        if isinstance(value, list):
            return self._encode_all(list.__iter__(value), depth)
        if isinstance(value, dict):
            return {"dict": [self._encode_all(item, depth) for item in dict.items(value)]}
        if type(value) is tuple:  # a namedtuple would lose its class
            return {"tuple": self._encode_all(value, depth)}
        if isinstance(value, set):
            return {"set": self._encode_all(set.__iter__(value), depth)}
        raise _NotPlainError

    def _encode_all(self, values: Any, depth: int) -> list[Any]:
        return [self.encode(value, depth + 1) for value in values]


def _decode(encoded: Any, depth: int) -> Any:
    if encoded is None or isinstance(encoded, _SCALARS):
        return encoded
    if depth <= 2 * _MAX_DEPTH:
        try:
            match encoded:
                case [*parts]:
                    return [_decode(part, depth + 1) for part in parts]
                case {"tuple": [*parts], **others} if not others:
                    return tuple(_decode(part, depth + 1) for part in parts)
                case {"set": [*parts], **others} if not others:
                    return {_decode(part, depth + 1) for part in parts}
                case {"dict": [*parts], **others} if not others and all(_is_pair(part) for part in parts):
                    return {_decode(key, depth + 1): _decode(value, depth + 1) for key, value in parts}
        except TypeError as error:  # a list or dict cannot be a key
            raise WireError(f"A data host sent an attribute that cannot exist: {reprlib.repr(encoded)}.") from error
    raise WireError(f"A data host sent an attribute that is not a plain value: {reprlib.repr(encoded)}.")


def _is_pair(part: Any) -> bool:
    return isinstance(part, list) and len(part) == 2
