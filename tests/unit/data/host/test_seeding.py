"""Seeding only what is used gives the same numbers as seeding everything."""

import logging
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.host.generators import seed_all
from lightning_sm.data.host.seeding import Seeding


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
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)


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
