"""The codec for the data service's messages: typed structs that are validated on decoding.

Messages from other hosts arrive as JSON and cannot be trusted, so only values of the declared types are accepted. Both
ends run the same version, so unknown fields and values are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from lightning_sm._structs import decoder
from lightning_sm.errors import WireError

# Hook results include the contents of samplers, so they may be large. A parsed list takes 20 times its JSON size.
_MAX_BYTES = 32 << 20
_MAX_CONTAINERS = 1 << 18

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def decode(kind: type[_Struct], data: bytes, what: str, max_bytes: int = _MAX_BYTES) -> _Struct:
    """Decode a message.

    Args:
        kind: The expected type, or a union of types.
        data: The message as JSON.
        what: What the message is and where it comes from, for the error.
        max_bytes: Maximum size of the message.

    Raises:
        WireError: The message is too long, is not JSON, or does not match the type.
    """
    num_containers = data.count(b"[") + data.count(b"{")
    if len(data) > max_bytes or num_containers > _MAX_CONTAINERS:
        raise WireError(
            f"The {what} has {len(data)} bytes with {num_containers} lists and objects; {max_bytes} bytes with "
            f"{_MAX_CONTAINERS} lists and objects are allowed."
        )
    return decode_bounded(msgspec.json.Decoder, kind, data, what)


def decode_bounded(make: Callable[[Any], Any], kind: type[_Struct], data: bytes | memoryview, what: str) -> _Struct:
    """Decode a message whose size is known to be harmless.

    Args:
        make: Decoder class of msgspec.
        kind: The expected type.
        data: The message.
        what: What the message is and where it comes from, for the error.

    Raises:
        WireError: The message does not match the type.
    """
    try:
        message: _Struct = decoder(make, kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"The {what} is malformed: {error}.") from error
    return message
