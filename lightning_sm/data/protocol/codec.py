"""The codec of all messages of the data service: typed structs, which are checked when they are decoded.

Between hosts they travel as JSON, and may be anything: only what the types say is accepted. Both ends have the same
version, so unknown fields and values are errors.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from lightning_sm._structs import Struct, decoder
from lightning_sm.errors import WireError

# The result of a hook has what its samplers hold. A list takes 20 times its bytes once it is parsed.
_MAX_BYTES = 32 << 20
_MAX_CONTAINERS = 1 << 18
_MAX_INT = 2**63 - 1
_MAX_FLOAT = 2.0**62

AnyInt = Annotated[int, Meta(ge=-_MAX_INT - 1, le=_MAX_INT)]
# A count, size or number of something.
Natural = Annotated[int, Meta(ge=0, le=_MAX_INT)]
# Figures that sums and quotients of many of them leave finite.
Real = Annotated[float, Meta(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]
# Of a rank, host, request or class.
Name = Annotated[str, Meta(max_length=512)]
# The number of things of a kind.
NumPlaces = Annotated[int, Meta(ge=1, le=1 << 16)]


_Struct = TypeVar("_Struct", bound=Struct)


def decode(kind: type[_Struct], data: bytes, what: str, max_bytes: int = _MAX_BYTES) -> _Struct:
    """Rebuild a message.

    Args:
        kind: What it must be, perhaps a union.
        data: The message as JSON.
        what: What it is and where it is from, for the error.
        max_bytes: How many bytes there may be.

    Raises:
        WireError: It is too long, no JSON, or not what the types say.
    """
    num_containers = data.count(b"[") + data.count(b"{")
    if len(data) > max_bytes or num_containers > _MAX_CONTAINERS:
        raise WireError(
            f"The {what} has {len(data)} bytes with {num_containers} lists and objects; {max_bytes} bytes with "
            f"{_MAX_CONTAINERS} are allowed."
        )
    try:
        message: _Struct = decoder(msgspec.json.Decoder, kind).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"The {what} is malformed: {error}.") from error
    return message
