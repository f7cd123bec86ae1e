"""The base class of messages between processes and hosts, and types of their fields, which msgspec validates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Union

import msgspec
from msgspec import Meta

# Create one decoder at a time: msgspec caches a type's information before it is complete, and crashes the process if
# another thread then creates a decoder for the same type (seen with msgspec 0.22).
_MAKING_DECODER = threading.Lock()

_JSON = msgspec.json.Encoder()

_MAX_INT = 2**63 - 1
_MAX_FLOAT = 2.0**62

AnyInt = Annotated[int, Meta(ge=-_MAX_INT - 1, le=_MAX_INT)]
# A count, size or number of something.
Natural = Annotated[int, Meta(ge=0, le=_MAX_INT)]
# Bounded so that sums and quotients of many figures stay finite.
Real = Annotated[float, Meta(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]
# The name of a rank, host, request or class.
Name = Annotated[str, Meta(max_length=512)]
# A number of ranks or workers.
NumPlaces = Annotated[int, Meta(ge=1, le=1 << 16)]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of messages and their parts. Fields with a default may be left out.

    Members of a union have ``tag=True``, so that their encoding includes their name.
    """

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return encode(self)


def encode(message: msgspec.Struct, encoder: msgspec.json.Encoder | msgspec.msgpack.Encoder = _JSON) -> bytes:
    """Return the bytes of a message.

    Text that is not valid Unicode, such as a file name in another encoding in a traceback, is escaped.

    Args:
        message: The message.
        encoder: A JSON or MessagePack encoder.
    """
    try:
        return encoder.encode(message)
    except UnicodeEncodeError:
        return encoder.encode(_escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))


@cache
def decoder(make: Callable[[Any], Any], *kinds: Any) -> Any:
    """Return the decoder for a union of message types; ``make`` is msgspec's decoder class."""
    with _MAKING_DECODER:
        return make(Union[kinds])  # noqa: UP007


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, (list, tuple)) else value
