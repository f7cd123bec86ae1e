"""The random state of each sample and batch, which no other one shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.seeds import SampleSeeds, encode_key
from lightning_sm.errors import DataSettingsError

NAMES = st.tuples(st.sampled_from(["sample", "batch", "list"]), st.lists(st.integers(-(2**70), 2**70), max_size=3))


def test_seeds_are_pinned():
    """The random state of a sample never changes between releases, else a resumed run would augment otherwise."""
    seeds = SampleSeeds(42, "train", 0, 3, 0)
    assert [seeds.of("sample", position) for position in (0, 1, 2**40)] == [
        8254812858931523443,
        2488358499792952440,
        14601804854312312232,
    ]
    assert [seeds.of("batch", 0), seeds.of("batch of shard", 3, 7), seeds.of("sampler")] == [
        10010212540026237278,
        3131159587150889531,
        17718964697018580794,
    ]


@given(NAMES, NAMES)
def test_different_things_have_different_seeds(first, second):
    """Two names share a seed only if they are the same, numbers included."""
    seeds = SampleSeeds(0, "train", 0, 0, 0)
    one, other = (seeds.of(what, *numbers) for what, numbers in (first, second))
    assert (one == other) == (first == second)
    assert 0 <= one < 2**64


def test_numbers_that_look_alike_differ():
    """Where one number ends and the next begins counts."""
    seeds = SampleSeeds(0, "train", 0, 0, 0)
    names = [("sample", 1, 1), ("sample", 11), ("sample", 1), ("sample",), ("sample", -1), ("list", 1)]
    assert len({seeds.of(*name) for name in names}) == len(names)


def test_seeds_depend_on_everything_that_names_a_pass():
    """Another seed, stage, loader, epoch or pass gives every sample another state."""
    fields = [
        (0, "train", 0, 0, 0),
        (1, "train", 0, 0, 0),
        (0, "validate", 0, 0, 0),
        (0, "train", 1, 0, 0),
        (0, "train", 0, 1, 0),
        (0, "train", 0, 0, 1),
        (-1, "train", 0, 0, 0),
    ]
    assert len({SampleSeeds(*one).of("sample", 5) for one in fields}) == len(fields)


def test_seeds_do_not_depend_on_what_was_asked_before():
    """A data host that serves one sample gets the state of a host that served all of them."""
    busy = SampleSeeds(0, "train", 0, 0, 0)
    states = [busy.of("sample", position) for position in range(50)]
    alone = [SampleSeeds(0, "train", 0, 0, 0).of("sample", position) for position in reversed(range(50))]
    assert alone == states[::-1]


def test_keys_that_cannot_be_encoded_are_refused():
    """The message shows the key and what in it is at fault."""
    with pytest.raises(DataSettingsError, match=r"sample key \(1, b'x'\) cannot be sent .* it contains a bytes"):
        encode_key((1, b"x"))
