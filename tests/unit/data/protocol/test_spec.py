"""Requests for batches and descriptions of loaders survive the wire, and nothing else does."""

import contextlib
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.protocol.codec import decode
from lightning_sm.data.protocol.spec import MAX_RANGE_LENGTH, BatchSpec, LoaderDescription, StepRangeSpec
from lightning_sm.errors import WireError

INT64 = st.integers(-(2**63), 2**63 - 1)

FACTS = {
    "name": "train_dataloader()",
    "order": "shuffled",
    "num_samples": 10,
    "batch_size": 2,
    "drop_last": False,
    "identity": "cd",
    "fingerprint": "ab",
    "dataset": "Digits of 10",
}


@given(
    st.text(),
    st.lists(INT64, min_size=5, max_size=5),
    st.lists(st.tuples(INT64, st.lists(INT64)), min_size=1),
    st.none() | INT64,
)
def test_a_request_survives_the_wire(opening, numbers, parts, built_by):
    """Every field of a request comes out as it went in."""
    loader, *fields = numbers
    batches = [BatchSpec(*fields, position, np.array(keys, np.int64)) for position, keys in parts]
    spec = StepRangeSpec(opening, loader, tuple(batches), "zstd", built_by)
    decoded = StepRangeSpec.decode(spec.encode())
    assert [(batch.position, batch.keys.tolist()) for batch in decoded.batches] == parts
    assert [list(batch[:4]) for batch in decoded.batches] == [fields] * len(parts)
    assert decoded.encode() == spec.encode()
    assert (decoded.opening, decoded.loader, decoded.compression) == (opening, loader, "zstd")
    assert decoded.built_by == built_by


def test_positions_go_round():
    """Behind the last sample of an order comes its first, for a rank that repeats samples."""
    batch = BatchSpec(0, 0, 0, 7, 5, np.zeros(4, np.int64))
    assert batch.positions.tolist() == [5, 6, 0, 1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no line",
        b"{}\n",
        b"[]\n",
        b'["o","",null,0,0,0,0,0,[0]]\n',
        b'["o","",null,0,0,0,0,[0],[0]]\n',
        b'["o","",null,0,0,0,0,0.5,[0],[0]]\n',
        b'["o","",null,0,0,0,0,true,[0],[0]]\n',
        b'[1,"",null,0,0,0,0,0,[0],[0]]\n',
        b'["o","",null,0,0,0,0,0,[0],[0,0]]\n',
        b'["o","",null,0,0,0,0,0,[0],["0"]]\n',
        b'["o","",null,0,0,0,0,0,[],[]]\n',
        b'["o","",null,0,0,0,0,0,[1],[0]]\n',
        b'["o","",null,0,0,0,0,0,[2,-1],[0,0]]\n12345678',
        b'["o","",null,0,0,0,0,0,[1],[0]]\n1234567',
        b'["o","","1",0,0,0,0,0,[0],[0]]\n',
        b"\xff\n",
    ],
)
def test_a_malformed_request_is_refused(data):
    """Missing, superfluous or wrong fields are an error of the wire, never another."""
    with pytest.raises(WireError, match="malformed"):
        StepRangeSpec.decode(data)


@pytest.mark.parametrize(
    "head",
    [
        ["o", "", None, *[0] * 5, [0] * 175_000, [0] * 175_000],
        ["o", "", None, *[0] * 5, [[]] * 230_000, []],
        ["o", "", None, *[0] * 5, [0] * 257, [0] * 257],
    ],
    ids=["batches", "lists", "one too many"],
)
def test_a_request_becomes_little_in_memory(head):
    """One that names more batches than any trainer asks for is refused, before it has become objects."""
    data = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="malformed"):
            StepRangeSpec.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_longest_request_is_understood():
    """As many batches as a trainer may ask for, with the largest numbers."""
    keys = np.full(3, 2**62, "<i8")
    batches = tuple(BatchSpec(2**63 - 1, 2**31, 2**32, 2**62, 2**62, keys) for _ in range(MAX_RANGE_LENGTH))
    spec = StepRangeSpec("x" * 100, 7, batches, "zstd")
    decoded = StepRangeSpec.decode(spec.encode())
    assert decoded.batches[-1].position == 2**62
    assert len(decoded.batches) == MAX_RANGE_LENGTH


@given(st.binary(max_size=200))
def test_bytes_are_a_request_or_refused(data):
    """Arbitrary bytes raise nothing but a WireError."""
    with contextlib.suppress(WireError):
        StepRangeSpec.decode(data)


def test_loader_facts_survive_the_wire():
    """A description comes out as it went in."""
    description = LoaderDescription(**FACTS)
    assert decode(LoaderDescription, description.encode(), "description of a loader") == description


@pytest.mark.parametrize("wrong", [{"num_samples": -1}, {"batch_size": "2"}, {"colour": "red"}])
def test_malformed_loader_facts_are_refused(wrong):
    """Sizes that cannot be and fields that nobody knows are errors."""
    with pytest.raises(WireError, match=f"description of a loader.*{next(iter(wrong))}"):
        decode(LoaderDescription, json.dumps({**FACTS, **wrong}).encode(), "description of a loader")
