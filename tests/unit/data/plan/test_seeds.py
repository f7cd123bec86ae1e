"""The random state of each sample and batch, which no other one shares."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.seeds import SampleSeeds
from lightning_sm.errors import DataSettingsError

KEYS = st.recursive(
    st.integers() | st.text(max_size=4),
    lambda keys: st.lists(keys, max_size=3) | st.lists(keys, max_size=3).map(tuple),
    max_leaves=6,
)


def test_seeds_are_pinned():
    """The random state of a sample never changes between releases, else a resumed run would augment otherwise."""
    seeds = SampleSeeds(42, "train", 0, 3, 0)
    assert [seeds.of(key) for key in (0, 1, -1)] == [8922477289440708145, 13068284058432282504, 16230335104841851029]
    assert [seeds.of(key) for key in ("1", (1, "a"), 2**80)] == [
        10124901429963130684,
        3121504021657911480,
        8842096682360979679,
    ]
    assert seeds.of_batch(0, 1) == 605117354580484091


@given(KEYS, KEYS)
def test_different_samples_have_different_seeds(first, second):
    """Any two keys of integers, strings and sequences of them share a seed only if they are the same key."""
    seeds = SampleSeeds(0, "train", 0, 0, 0)
    as_lists = [json.dumps(key) for key in (first, second)]
    assert (seeds.of(first) == seeds.of(second)) == (as_lists[0] == as_lists[1])
    assert 0 <= seeds.of(first) < 2**64


def test_keys_that_look_alike_differ():
    """The kind of a key and the shape of its nesting count, not only its text."""
    keys = [1, "1", (1,), ("1",), ((1,),), (1, 1), (11,), ("1,1",), "[1]", (), "", ((), ()), True, None, 1.0]
    seeds = SampleSeeds(0, "train", 0, 0, 0)
    assert len({seeds.of(key) for key in keys}) == len(keys)


@pytest.mark.parametrize("key", [0, 7, -7, 2**63 - 1, -(2**63)])
def test_numpy_integers_are_integers(key):
    """A sample keeps its random state when the sampler hands out NumPy's integers, also within tuples."""
    seeds = SampleSeeds(0, "train", 0, 0, 0)
    assert seeds.of(np.int64(key)) == seeds.of(key)
    assert seeds.of((np.int64(key), "a")) == seeds.of([key, "a"])


@given(st.integers(-(2**65), 2**65))
def test_integers_around_the_word_size_differ(key):
    """Integers beyond 64 bits are keys like all others."""
    seeds = SampleSeeds(0, "train", 0, 0, 0)
    assert len({seeds.of(key), seeds.of(key + 1), seeds.of(key + 2**64)}) == 3


def test_seeds_depend_on_everything_that_names_a_pass():
    """Another seed, stage, loader, epoch or pass gives every sample and batch another state."""
    fields = [
        (0, "train", 0, 0, 0),
        (1, "train", 0, 0, 0),
        (0, "validate", 0, 0, 0),
        (0, "train", 1, 0, 0),
        (0, "train", 0, 1, 0),
        (0, "train", 0, 0, 1),
        (-1, "train", 0, 0, 0),
    ]
    assert len({SampleSeeds(*one).of(5) for one in fields}) == len(fields)
    assert len({SampleSeeds(*one).of("5") for one in fields}) == len(fields)
    assert len({SampleSeeds(*one).of_batch(5, 0) for one in fields}) == len(fields)


def test_batches_have_states_of_their_own():
    """No batch shares a random state with another batch, or with a sample that is numbered like it."""
    seeds = SampleSeeds(0, "train", 0, 0, 0)
    batches = [seeds.of_batch(step, rank) for step in range(20) for rank in range(20)]
    samples = [seeds.of(key) for key in range(400)] + [seeds.of((a, b)) for a in range(20) for b in range(20)]
    assert len({*batches, *samples}) == len(batches) + len(samples)


def test_seeds_do_not_depend_on_what_was_asked_before():
    """A data host that serves one sample gets the state of a host that served all of them."""
    busy = SampleSeeds(0, "train", 0, 0, 0)
    states = [busy.of(key) for key in range(50)]
    assert [SampleSeeds(0, "train", 0, 0, 0).of(key) for key in reversed(range(50))] == states[::-1]


def test_keys_that_cannot_be_sent_are_refused():
    """The message shows the key and what in it is at fault."""
    with pytest.raises(DataSettingsError, match=r"sample key \(1, b'x'\) cannot be sent .* it contains a bytes"):
        SampleSeeds(0, "train", 0, 0, 0).of((1, b"x"))
