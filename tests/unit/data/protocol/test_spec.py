"""Requests for batches and descriptions of loaders survive the wire, and nothing else does."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.protocol.spec import BatchSpec, LoaderFacts
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


@given(st.text(), st.lists(INT64, min_size=6, max_size=6), st.lists(INT64))
def test_a_request_survives_the_wire(opening, numbers, keys):
    """Every field of a request comes out as it went in."""
    spec = BatchSpec(opening, *numbers, np.array(keys, np.int64))
    decoded = BatchSpec.decode(spec.encode())
    assert decoded.keys.tolist() == keys
    assert decoded.encode() == spec.encode()
    assert [decoded.opening, decoded.loader, decoded.seed] == [opening, *numbers[:2]]
    assert [decoded.epoch, decoded.pass_index, decoded.step, decoded.rank] == numbers[2:]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no line",
        b"{}\n",
        b"[]\n",
        b'["o",0,0,0,0,0]\n',
        b'["o",0,0,0,0,0,0.5]\n',
        b'["o",0,0,0,0,0,true]\n',
        b"[1,0,0,0,0,0,0]\n",
        b'["o",0,0,0,0,0,0]\n1234567',
        b"\xff\n",
    ],
)
def test_a_malformed_request_is_refused(data):
    """Missing, superfluous or wrong fields are an error of the wire, never another."""
    with pytest.raises(WireError, match="malformed"):
        BatchSpec.decode(data)


@given(st.binary(max_size=200))
def test_bytes_are_a_request_or_refused(data):
    """Arbitrary bytes raise nothing but a WireError."""
    with contextlib.suppress(WireError):
        BatchSpec.decode(data)


def test_loader_facts_survive_the_wire():
    """A description comes out as it went in."""
    facts = LoaderFacts(**FACTS)
    assert LoaderFacts.from_json(facts.to_json()) == facts


@pytest.mark.parametrize("wrong", [{"num_samples": -1}, {"batch_size": "2"}, {"colour": "red"}])
def test_malformed_loader_facts_are_refused(wrong):
    """Sizes that cannot be and fields that nobody knows are errors."""
    with pytest.raises(WireError, match="A data host described a loader"):
        LoaderFacts.from_json({**FACTS, **wrong})
