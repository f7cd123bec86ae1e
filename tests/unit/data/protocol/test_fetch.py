"""Requests for batches survive the wire; anything else is refused."""

import contextlib
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.protocol.fetch import FetchSpec
from lightning_sm.data.protocol.spec import MAX_RANGE_LENGTH
from lightning_sm.errors import WireError

FIELDS = ["train", 1, 2, -(2**63), 5, 2, [b"a", b"bc"]]


@given(st.text(max_size=50), st.integers(-(2**63), 2**63 - 1), st.lists(st.binary(), min_size=1, max_size=256))
def test_a_request_survives_the_wire(opening, seed, indices):
    """Every field arrives unchanged; requests for streams have no indices."""
    for given_indices in (indices, []):
        spec = FetchSpec(opening, 3, 4, seed, 7, len(indices), given_indices)
        assert FetchSpec.decode(spec.encode()) == spec


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 1),
        (0, "x" * 513),
        (1, -1),
        (2, 0),
        (3, 2**63),
        (4, -1),
        (5, 0),
        (5, 257),
        (5, True),
        (6, ["a", "b"]),
        (6, 0),
    ],
)
def test_a_malformed_request_is_refused(place, value):
    """A request with a wrong field raises a WireError, and no other error."""
    fields = [*FIELDS[:place], value, *FIELDS[place + 1 :]]
    assert FetchSpec.decode(msgspec.msgpack.encode(FIELDS)) == FetchSpec(*FIELDS)
    with pytest.raises(WireError, match="The request for batches is malformed"):
        FetchSpec.decode(msgspec.msgpack.encode(fields))


def test_each_batch_has_its_index():
    """A request has an index for each batch, or none at all."""
    with pytest.raises(WireError, match="A request for 2 batches has the indices of 1"):
        FetchSpec.decode(msgspec.msgpack.encode([*FIELDS[:6], [b"a"]]))


def test_a_request_becomes_little_in_memory():
    """A request with more indices than any trainer sends is refused before they become objects."""
    data = msgspec.msgpack.encode([*FIELDS[:5], MAX_RANGE_LENGTH, [b""] * 200_000])
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="malformed"):
            FetchSpec.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_bytes_are_a_request_or_refused(data):
    """Arbitrary bytes raise nothing but a WireError."""
    with contextlib.suppress(WireError):
        FetchSpec.decode(data)
