"""Seeding only what is used gives the same numbers as seeding everything."""

import logging
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_sm.data.host.generators import GLOBALS, get_state, seed_all, set_state
from lightning_sm.data.host.iterable import OpenShards, UserCodeError
from lightning_sm.data.host.seeding import Seeding
from lightning_sm.data.plan.seeds import SampleSeeds
from lightning_sm.data.protocol.spec import BatchSpec


def isolated():
    """Draw from a seed of one's own, and restore the state, as ``numpy_seed`` of fairseq does."""
    state = np.random.get_state()
    np.random.seed(7)
    drawn = np.random.rand()
    np.random.set_state(state)
    return drawn


# What the code of a sample or of a collate function may do.
ACTIONS = {
    "nothing": lambda: None,
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "all words of random": lambda: [random.random() for _ in range(312)],
    "randint": lambda: random.randint(0, 9),
    "NumPy": np.random.rand,
    "randn": np.random.randn,
    "all words of NumPy": lambda: np.random.rand(312).sum(),
    "torch": lambda: torch.rand(()).item(),
    "torch.randn": lambda: torch.randn(()).item(),
    "only a seed": lambda: random.seed(3),
    "own seed": lambda: (random.seed(3), random.random()),
    "own generator": lambda: np.random.default_rng(3).random(),
    "isolated": isolated,
}
SAMPLES = st.lists(st.sampled_from(sorted(ACTIONS)), max_size=2)
BATCHES = st.lists(st.lists(SAMPLES, max_size=4), max_size=8)


def forked():
    """Draw from torch's generator, and restore its state."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


# These look at a generator's state without changing it.
LOOKS = {
    "torch.initial_seed": torch.initial_seed,
    "a seed from the state": lambda: np.random.get_state()[1][0],
    "a seed from the state of random": lambda: random.getstate()[1][1],
    "fork_rng": forked,
}


@pytest.fixture(autouse=True, scope="module")
def _restored():
    """Leave all generators as they were."""
    states = [get_state(generator) for generator in GLOBALS]
    yield
    for generator, state in zip(GLOBALS, states, strict=True):
        set_state(generator, state)


def result(batch, seed):
    """Return what the samples of a batch draw."""
    drawn = []
    for number, actions in enumerate(batch):
        if seed:
            seed(2**63 + 1000 * number)
        drawn.extend(ACTIONS[action]() for action in actions)
    return drawn


def build(seeding, batch):
    """Build a batch that is a request of its own."""
    drawn = result(batch, seeding.start(5))
    seeding.check()
    return drawn


@given(BATCHES)
def test_bits_are_those_of_seeding_everything(batches):
    """Whatever the code of a loader draws in its first samples, and whenever, it draws as if all were seeded."""
    seeding = Seeding("loader")
    for batch in batches:
        assert build(seeding, batch) == result(batch, seed_all)


@given(SAMPLES, SAMPLES, BATCHES, BATCHES)
def test_after_the_trial_bits_are_the_same(first_sample, second_sample, first, second):
    """What the trial has seen, and nothing else, is seeded later; loaders of one worker do not disturb each other."""
    pairs = [(Seeding("a", trial_seeds=1), first_sample, first), (Seeding("b", trial_seeds=1), second_sample, second)]
    for seeding, seen, _ in pairs:
        build(seeding, [seen])
    for place in range(8):
        for seeding, seen, batches in pairs:
            batch = [[action for action in actions if action in seen] for actions in (*batches[place : place + 1], [])]
            assert build(seeding, batch) == result(batch, seed_all)


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_a_state_shows_the_pass_and_not_the_worker(look):
    """Code that draws nothing may still derive a seed from a generator: workers with another history give the same."""

    def seen(seed, num_before):
        seeding = Seeding("loader", trial_seeds=1)
        build(seeding, [["nothing"]] * 2)
        for _ in range(num_before):
            build(seeding, [["isolated"]])
        random.seed()
        seeding.start(seed)
        drawn = LOOKS[look]()
        seeding.check()
        return drawn

    assert seen(5, 0) == seen(5, 3)
    assert seen(5, 0) != seen(6, 0)


def test_code_that_draws_nothing_is_not_seeded():
    """After the trial nothing is seeded, nor is a seed computed."""
    seeding = Seeding("loader", trial_seeds=1)
    build(seeding, [["nothing"], ["own generator"]])
    assert seeding.start(5) is None


def test_a_late_draw_is_told_once_and_seeded_from_then_on(caplog):
    """The request that drew cannot be helped; the log names the loader and the generator, and later ones are right."""
    seeding = Seeding("train_dataloader()", trial_seeds=1)
    build(seeding, [["torch"]])
    with caplog.at_level(logging.WARNING):
        assert build(seeding, [["torch"]]) == result([["torch"]], seed_all)
        assert not caplog.text
        build(seeding, [["randn", "torch"]])
        for _ in range(2):
            assert build(seeding, [["randn", "torch"]]) == result([["randn", "torch"]], seed_all)
    assert caplog.text.count("train_dataloader() has drawn from the global generator of numpy.random") == 1


def test_a_request_that_failed_is_not_taken_for_that_of_another_loader(caplog):
    """It was never checked; the next loader starts afresh."""
    failed, other = Seeding("failed", trial_seeds=1), Seeding("other", trial_seeds=1)
    for seeding in (failed, other):
        build(seeding, [["nothing"]] * 2)
    failed.start(5)
    random.random()
    build(other, [["nothing"]])
    assert other.start(5) is None
    assert not caplog.text


class Stream(IterableDataset):
    """Yields what the actions of a batch draw, and the actions that collating it takes."""

    def __init__(self, batches):
        self.batches = batches
        self.opened = []

    def __iter__(self):
        self.opened.append(get_worker_info().id)
        yield from ([result([drawn], None), collated] for drawn, collated in self.batches)


def collated(sample):
    """Take a sample apart, which can be done once."""
    return sample.pop(0), result([sample.pop()], None)


def in_turn(num_batches, batch):
    """Return the batches of two shards that take turns."""
    return [batch(shard, offset) for offset in range(num_batches) for shard in range(2)]


def batch_of(shards, shard, offset):
    """Return a batch of one of two shards, or raise the error of the user's code."""
    try:
        return shards.batch(BatchSpec(7, 0, 0, 0, 0, np.array([2, shard, offset, 1])))
    except UserCodeError as error:
        raise error.__cause__ from None
    finally:
        shards.seeding.check()


def opened(batches, trial_seeds=1024):
    """Return the shards of such a stream, and the stream."""
    dataset = Stream(batches)
    shards = OpenShards(DataLoader(dataset, batch_size=None, collate_fn=collated), "train_dataloader()", "train", 0)
    shards.seeding._seeds_left = trial_seeds
    return shards, dataset


def alone(batches, shard, offset):
    """Return what a batch draws if everything is seeded: the samples go on, and the collate function begins anew."""
    seeds = SampleSeeds(7, "train", 0, 0, 0)
    seed_all(seeds.of("shard", shard))
    samples = [[result([drawn], None), collated] for drawn, collated in batches[: offset + 1]]
    seed_all(seeds.of("batch of shard", shard, offset))
    return collated(samples[-1])


@given(st.lists(st.tuples(SAMPLES, SAMPLES), min_size=1, max_size=6))
def test_streams_of_one_worker_draw_as_if_they_were_alone(batches):
    """Whatever a stream and its collate function draw: the one from the shard's seed on, the other from the batch's."""
    shards, dataset = opened(batches)
    expected = in_turn(len(batches), partial(alone, batches))
    assert in_turn(len(batches), partial(batch_of, shards)) == expected
    assert dataset.opened == [0, 1]


@given(SAMPLES, SAMPLES, st.integers(1, 6))
def test_streams_after_the_trial_draw_the_same(drawn, collated_draws, length):
    """What the trial has seen goes on, whether the stream or its collate function draws."""
    batches = [(drawn, collated_draws)] * length
    shards, _ = opened(batches, trial_seeds=2)
    assert in_turn(length, partial(batch_of, shards)) == in_turn(length, partial(alone, batches))


def test_a_late_draw_in_a_stream_is_told(caplog):
    """It counts as in other datasets."""
    batches = [([drawn], ["nothing"]) for drawn in ("nothing", "nothing", "random", "random")]
    shards, dataset = opened(batches, trial_seeds=1)
    in_turn(len(batches), partial(batch_of, shards))
    assert caplog.text.count("train_dataloader() has drawn from the global generator of random") == 1
    assert dataset.opened == [0, 1]


class Shuffled(IterableDataset):
    """Shuffles by a generator of its own, takes its part, and adds noise by one that it shares with others.

    Args:
        noise: Holds a generator.
    """

    def __init__(self, noise):
        self.rng = np.random.default_rng(3)
        self.noise = noise

    def __iter__(self):
        info = get_worker_info()
        for number in self.rng.permutation(24)[info.id :: info.num_workers].tolist():
            yield number, self.noise.rng.random()


class Noise:
    """A transform with a generator."""

    def __init__(self):
        self.rng = random.Random(1)

    def __call__(self, samples):
        return [*samples, self.rng.random()]


def test_generators_of_streams_go_on_in_each_shard():
    """All shards shuffle alike, so that each sample comes once, and no other shard or collate function shows."""
    noise = Noise()
    dataset = Shuffled(noise)

    def batches(epoch, turns):
        shards = OpenShards(DataLoader(dataset, batch_size=2, collate_fn=noise), "train_dataloader()", "train", 0)
        return {
            (shard, offset): shards.batch(BatchSpec(7, epoch, 0, 0, 0, np.array([2, shard, offset, 1])))
            for shard, offset in turns
        }

    one_by_one = [(shard, offset) for shard in range(2) for offset in range(6)]
    first = batches(0, one_by_one)
    assert sorted(sample[0] for batch in first.values() for sample in batch[:2]) == list(range(24))
    assert batches(0, sorted(one_by_one, key=lambda turn: turn[1])) == first
    assert batches(0, [(1, 4)])[1, 4] == first[1, 4]
    assert batches(1, one_by_one) != first
