"""Seeding only what is used gives the same numbers as seeding everything."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_sm.data.batch.arena import Arena
from lightning_sm.data.host import seeding
from lightning_sm.data.host.iterable import OpenShards, UserCodeError
from lightning_sm.data.host.loader import ServedLoader
from lightning_sm.data.host.random_state import GENERATORS, seed_all
from lightning_sm.data.host.sample_mark import SampleMark
from lightning_sm.data.host.seeding import Seeding, watch_readers
from lightning_sm.data.plan.seeds import SampleSeeds
from lightning_sm.data.protocol.spec import BatchSpec


def isolated():
    """Draw from a seed of one's own, and restore the state, as ``numpy_seed`` of fairseq does."""
    state = np.random.get_state()
    np.random.seed(7)
    drawn = np.random.rand()
    np.random.set_state(state)
    return drawn


def fork_rng():
    """Draw from torch's generator, and restore its state."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


def rarely_fails():
    """Fail for some of the numbers that may be drawn."""
    if random.random() < 0.5:
        raise ValueError("drawn")


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
    "seed from the state": lambda: np.random.default_rng(np.random.get_state()[1][0]).random(),
    "seed from the state of random": lambda: random.getstate()[1][0],
    "seed from that of torch": lambda: np.random.default_rng(torch.initial_seed()).random(),
    "own generator": lambda: np.random.default_rng(3).random(),
    "isolated": isolated,
    "fork_rng": fork_rng,
    "fails": rarely_fails,
}
SAMPLES = st.lists(st.sampled_from(sorted(ACTIONS)), max_size=2)
BATCHES = st.lists(st.lists(SAMPLES, max_size=4), max_size=8)


@pytest.fixture(autouse=True, scope="module")
def _watching():
    """Watch as in a worker, and leave everything as it was."""
    states = [generator.get() for generator in GENERATORS]
    with pytest.MonkeyPatch.context() as patch:
        for _, module, name in seeding._READERS:
            patch.setattr(module, name, getattr(module, name))
        watch_readers()
        yield
    for generator, state in zip(GENERATORS, states, strict=True):
        generator.set(state)


def result(batch, seed):
    """Return what the samples of a batch draw, or how they fail."""
    drawn = []
    for number, actions in enumerate(batch):
        if seed:
            seed(2**63 + 1000 * number)
        drawn.extend(ACTIONS[action]() for action in actions)
    return drawn


def outcome(call):
    """Return what a call returns, or its error."""
    try:
        return call()
    except ValueError as error:
        return str(error)


@given(BATCHES, st.integers(0, 6))
def test_bits_are_those_of_seeding_everything(batches, trial_seeds):
    """Whatever the code of a loader draws, and whenever it begins to, it draws as if all were always seeded."""
    lazily = Seeding(trial_seeds)
    for batch in batches:
        expected = outcome(lambda batch=batch: result(batch, seed_all))
        assert outcome(lambda batch=batch: lazily.run(lambda seed: result(batch, seed), ())) == expected


@given(BATCHES, BATCHES, st.integers(0, 6))
def test_loaders_of_one_worker_do_not_disturb_each_other(first, second, trial_seeds):
    """What one loader leaves in the generators, such as half a pair of normal numbers, the other one never draws."""
    loaders = Seeding(trial_seeds), Seeding(trial_seeds)
    for pair in zip(first, second, strict=False):
        for lazily, batch in zip(loaders, pair, strict=True):
            expected = outcome(lambda batch=batch: result(batch, seed_all))
            assert outcome(lambda batch=batch, lazily=lazily: lazily.run(lambda s: result(batch, s), ())) == expected


class Stream(IterableDataset):
    """Yields what the actions of a batch draw, and the actions that collating it takes; counts how often it opens."""

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
    """Return the batches of two shards that take turns, or their errors."""
    return [outcome(lambda o=offset, s=shard: batch(s, o)) for offset in range(num_batches) for shard in range(2)]


def batch_of(shards, shard, offset):
    """Return a batch of one of two shards, or raise the error of the user's code."""
    try:
        return shards.batch(BatchSpec(7, 0, 0, 0, 0, np.array([2, shard, offset, 1])))
    except UserCodeError as error:
        raise error.__cause__ from None


@given(st.lists(st.tuples(SAMPLES, SAMPLES), min_size=1, max_size=6), st.integers(0, 4))
def test_streams_of_one_worker_draw_as_if_they_were_alone(batches, trial_seeds):
    """Whatever a stream and its collate function draw: the one from the shard's seed on, the other from the batch's."""
    seeds = SampleSeeds(7, "train", 0, 0, 0)

    def alone(shard, offset):
        seed_all(seeds.of(shard))
        samples = [[result([drawn], None), collated] for drawn, collated in batches[: offset + 1]]
        seed_all(seeds.of_batch(offset, shard))
        return collated(samples[-1])

    shards = OpenShards(DataLoader(Stream(batches), batch_size=None, collate_fn=collated), "train", 0)
    shards._seeding = Seeding(trial_seeds)
    assert in_turn(len(batches), partial(batch_of, shards)) == in_turn(len(batches), alone)


@pytest.mark.parametrize("action", ["random", "randn", "torch.randn"])
def test_a_stream_that_draws_is_read_once(action):
    """What streams draw is not taken for what their collate function draws, for which a shard opens again."""
    batches = [([drawn], ["nothing"]) for drawn in ("nothing", "nothing", action, action)]
    dataset = Stream(batches)
    shards = OpenShards(DataLoader(dataset, batch_size=None, collate_fn=collated), "train", 0)
    shards._seeding = Seeding(1)
    in_turn(len(batches), partial(batch_of, shards))
    assert dataset.opened == [0, 1]


def counted(lazily, action, owners=()):
    """Run a batch of one action; return how often it was made, and what is seeded for it."""
    seeds = []

    def make(seed):
        seeds.append(seed)
        return result([[action]], seed)

    lazily.run(make, owners)
    return len(seeds), lazily._used


def test_code_that_draws_nothing_is_not_seeded():
    """After the trial nothing is seeded, nor is a seed computed."""
    lazily = Seeding(1)
    for _ in range(2):
        assert counted(lazily, "nothing") == (1, set())
    assert lazily.run(lambda seed: seed, ()) is None


def test_code_that_draws_is_made_again_at_most_once():
    """What is used in the trial costs nothing again; what is used later, one batch."""
    torch_, numpy = GENERATORS[2], GENERATORS[1]
    lazily = Seeding(1)
    for _ in range(2):
        assert counted(lazily, "torch") == (1, {torch_})
    assert counted(lazily, "torch") == (1, {torch_})
    assert counted(lazily, "randn") == (2, {torch_, numpy})
    assert counted(lazily, "randn") == (1, {torch_, numpy})


class Counter:
    """A transform that counts, and holds an object that does."""

    def __init__(self):
        self.inner = SimpleNamespace(number=0, path="file")

    def count(self):
        self.inner.number += 1


class Hidden:
    """An object that does not show its attributes."""

    @property
    def __dict__(self):
        raise RuntimeError("hidden")


CHANGES = {
    "a counter": lambda owner: owner.count(),
    "a generator": lambda owner: owner.rng.random(),
    "a generator of torch": lambda owner: torch.rand((), generator=owner.torch_rng),
    "a cache": lambda owner: owner.cache.update({len(owner.cache): 1}),
    "what cannot be looked at": lambda owner: setattr(owner, "hidden", Hidden()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_with_a_state_of_its_own_is_never_made_again(change):
    """A batch made twice would show in the state: such code gets all seeds, whatever it draws."""
    owner = Counter()
    owner.rng, owner.torch_rng, owner.cache = np.random.default_rng(0), torch.Generator(), {}
    lazily = Seeding(1)
    num_made = 0

    def make(seed):
        nonlocal num_made
        num_made += 1
        seed(1)
        CHANGES[change](owner)
        return random.random() if num_made > 2 else None

    assert [lazily.run(make, [[owner]]) for _ in range(3)][2] is not None
    assert num_made == 3


class Rarely(Dataset):
    """Draws for its last sample only."""

    def __len__(self):
        return 600

    def __getitem__(self, index):
        return torch.full((4,), np.random.rand() if index == 599 else index, dtype=torch.float64)


def test_a_batch_that_is_made_again_takes_no_more_room():
    """The slot holds the batch once, and the bits are those of a worker that has just started."""

    def batches(starts):
        loader = ServedLoader(DataLoader(Rarely(), batch_size=200), "train_dataloader()", "train", 0)
        for start in starts:
            arena = Arena(np.zeros(1 << 14, np.uint8))
            spec = BatchSpec(0, 0, 0, start // 200, 0, np.arange(start, start + 200))
            made = loader.batch(spec, arena, SampleMark()).clone()
        return made, arena.used, loader._seeding._used

    made, used, seeded = batches([0, 200, 400])
    alone, alone_used, _ = batches([400])
    assert torch.equal(made, alone)
    assert used == alone_used == 200 * 32
    assert seeded == {GENERATORS[1]}
