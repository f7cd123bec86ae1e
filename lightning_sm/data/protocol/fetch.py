"""Requests for batches: the instructions that a ``DataLoader`` gives a worker, but for several batches at a time."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from lightning_sm._structs import AnyInt, Name, Natural, NumPlaces, encode
from lightning_sm.data.protocol.message_codec import decode_bounded
from lightning_sm.data.protocol.spec import MAX_RANGE_LENGTH
from lightning_sm.errors import WireError

_Indices = Annotated[list[bytes], Meta(max_length=MAX_RANGE_LENGTH)]


class FetchSpec(msgspec.Struct, frozen=True, array_like=True):
    """A request for consecutive batches of one iterator, sent together because a message costs more than a small batch.

    Attributes:
        opening: Name of the opening whose workers build the batches.
        rank: Rank of the iterator.
        world_size: Number of ranks.
        seed: Base of the pass's random states; for a stream, whose worker already has it, the number of the pass.
        first: Number of the first batch in the iterator.
        num_batches: Number of batches.
        indices: The sampler's output for each batch, pickled; empty for a stream, which is not indexed.
        num_before: For a stream, how many batches torch's worker would have built in each of the last passes: in all
            since the last one of which the trainer got a batch.
    """

    opening: Name
    rank: Natural
    world_size: NumPlaces
    seed: AnyInt
    first: Natural
    num_batches: Annotated[int, Meta(ge=1, le=MAX_RANGE_LENGTH)]
    indices: _Indices
    num_before: Annotated[list[Natural], Meta(max_length=1 << 16)] = []

    def encode(self) -> bytes:
        """Return the payload of a FETCH frame."""
        return encode(self, _ENCODER)

    @classmethod
    def decode(cls, data: bytes) -> FetchSpec:
        """Decode a request.

        Raises:
            WireError: The request is malformed.
        """
        spec = decode_bounded(msgspec.msgpack.Decoder, cls, data, "request for batches")
        if spec.indices and len(spec.indices) != spec.num_batches:
            raise WireError(f"A request for {spec.num_batches} batches has the indices of {len(spec.indices)}.")
        return spec


_ENCODER = msgspec.msgpack.Encoder()
