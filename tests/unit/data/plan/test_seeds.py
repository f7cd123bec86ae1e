"""The random state of each sample and batch, which no other one shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.plan.seeds import SampleSeeds, encode_key, hook_seed, worker_seed
from lightning_sm.data.plan.splitmix import random_words
from lightning_sm.errors import DataSettingsError

NAMES = st.tuples(st.sampled_from(["sample", "batch", "list"]), st.lists(st.integers(-(2**70), 2**70), max_size=3))


def test_seeds_are_pinned():
    """The random state of a sample never changes between releases, else a resumed run would augment otherwise."""
    seeds = SampleSeeds(42, "train", 0, 3, 0)
    assert seeds.of_samples(np.array([0, 1, 2**40])) == [
        7950413359627065860,
        8899212354534339635,
        9979829612980908662,
    ]
    assert [seeds.of("batch", 0), seeds.of("batch of shard", 3, 7), seeds.of("sampler")] == [
        10010212540026237278,
        3131159587150889531,
        17718964697018580794,
    ]


def test_seeds_of_hooks_and_workers_are_pinned():
    """A data host of another release splits data in ``setup()`` as the ones before it did."""
    assert [hook_seed(42, "setup", 0), hook_seed(42, "train_dataloader", 3)] == [
        5654096344500906118,
        15472544813016491194,
    ]
    assert [worker_seed(42, "algo-1", "train", 0, 0), worker_seed(42, "algo-2", "val", 1, 3)] == [
        4274877450662645313,
        3059428649824281061,
    ]


def test_random_words_are_those_of_splitmix64():
    """As its authors' program prints them for this seed (rosettacode.org, "Pseudo-random numbers/Splitmix64")."""
    assert random_words(np.arange(1, 6, dtype=np.uint64), np.uint64(1234567)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
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


def test_samples_have_different_seeds():
    """In all bits together, and in the low half, which is all that torch takes."""
    own = np.array(SampleSeeds(0, "train", 0, 0, 0).of_samples(np.arange(100_000)), np.uint64)
    assert len(np.unique(own)) == len(own)
    assert len(np.unique(own & np.uint64(0xFFFFFFFF))) > 0.9999 * len(own)
    ones = np.unpackbits(own.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.01


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
    assert len({SampleSeeds(*one).of_samples(np.array([5]))[0] for one in fields}) == len(fields)


def test_seeds_do_not_depend_on_what_was_asked_before():
    """A data host that serves one sample gets the state of a host that served all of them."""
    busy = SampleSeeds(0, "train", 0, 0, 0)
    states = busy.of_samples(np.arange(50))
    alone = [SampleSeeds(0, "train", 0, 0, 0).of_samples(np.array([position]))[0] for position in reversed(range(50))]
    assert alone == states[::-1]


def test_numbers_of_numpy_are_numbers():
    """A sampler that draws with NumPy yields the same keys as one that yields Python's numbers."""
    assert encode_key([np.int64(7), (np.uint8(1), "1")]) == encode_key([7, (1, "1")]) == b'[7,[1,"1"]]'


def test_keys_that_cannot_be_encoded_are_refused():
    """The message shows the key and what in it is at fault."""
    with pytest.raises(DataSettingsError, match=r"sample key \(1, b'x'\) cannot be sent .* it contains a bytes"):
        encode_key((1, b"x"))
