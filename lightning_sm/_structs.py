"""The base of all messages between processes and hosts: typed structs, which msgspec encodes and checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Union

import msgspec

# msgspec stores what it knows of a type before it is complete, and crashes the process if another thread makes a
# decoder of the type meanwhile (seen with msgspec 0.22).
_MAKING_DECODER = threading.Lock()

_JSON = msgspec.json.Encoder()


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of messages, and of the parts of messages. Fields with a default may be left out.

    Those that stand in a union have ``tag=True``: their encoding names them.
    """

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return encode(self)


def encode(message: msgspec.Struct, encoder: msgspec.json.Encoder | msgspec.msgpack.Encoder = _JSON) -> bytes:
    """Return the bytes of a message.

    Text that is not Unicode, such as the name of a file in another encoding in a traceback, gets escapes.

    Args:
        message: The message.
        encoder: Of JSON or MessagePack.
    """
    try:
        return encoder.encode(message)
    except UnicodeEncodeError:
        return encoder.encode(_escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))


@cache
def decoder(make: Callable[[Any], Any], *kinds: Any) -> Any:
    """Return the decoder of some kinds of messages; ``make`` is msgspec's class of decoders."""
    with _MAKING_DECODER:
        return make(Union[kinds])  # noqa: UP007


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, (list, tuple)) else value
