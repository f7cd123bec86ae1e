"""Generators are found wherever user code keeps them, and seeded by public calls."""

import functools
import random
from collections import deque

import numpy as np
import pytest
import torch

from lightning_sm.data.host import generators
from lightning_sm.data.host.generators import HeldGenerators, reachable, seed_all, seed_generator

KINDS = {
    "NumPy": lambda: np.random.default_rng(1),
    "NumPy, bits of another kind": lambda: np.random.Generator(np.random.PCG64DXSM(1)),
    "NumPy, other bits": lambda: np.random.Generator(np.random.MT19937(1)),
    "NumPy's legacy": lambda: np.random.RandomState(1),
    "NumPy's legacy, other bits": lambda: np.random.RandomState(np.random.PCG64(1)),
    "random": lambda: random.Random(1),
    "torch": torch.Generator,
}
IN_A_MODULE = np.random.default_rng(1)


def draw(generator):
    """Draw a number."""
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.rand() if isinstance(generator, np.random.RandomState) else generator.random()


def found(held):
    """Return the generators that were found."""
    return [generator for _, generator in held._numbered()]


class Holder:
    """An object with attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def method(self, samples):
        return samples


class Randomizable:
    """A transform as in MONAI: all instances share a generator until one gets another."""

    R = np.random.RandomState(1)

    def set_random_state(self, seed):
        self.R = np.random.RandomState(seed)


class Compose:
    """Transforms as in albumentations: each has two generators, which seeding replaces."""

    def __init__(self, *transforms):
        self.transforms = list(transforms)
        self.set_random_seed(None)

    def set_random_seed(self, seed):
        self.random_generator, self.py_random = np.random.default_rng(seed), random.Random(seed)


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("empty", "rng")

    def __init__(self, rng):
        self.rng = rng


class Guarded:
    """An object that hides its attributes."""

    def __init__(self, rng):
        object.__setattr__(self, "rng", rng)

    @property
    def __dict__(self):
        raise RuntimeError("hidden")


def names_a_global(sample):
    """Draw from the module's generator."""
    return [IN_A_MODULE.random() for _ in range(sample)]


def enclosing(rng):
    """Return a function that draws from a generator in its closure."""

    def enclosed(_):
        return rng.random()

    return enclosed


HOLDERS = {
    "an attribute": lambda rng: Holder(rng=rng),
    "a transform of a transform": lambda rng: Holder(transform=Holder(transforms=[Holder(), Holder(rng=rng)])),
    "a dictionary": lambda rng: Holder(rngs={"train": {"a": rng}}),
    "a tuple": lambda rng: Holder(rngs=(1, (rng,))),
    "a queue": lambda rng: deque([rng]),
    "slots": Slotted,
    "a bound method": lambda rng: Holder(rng=rng).method,
    "a partial": lambda rng: functools.partial(max, key=functools.partial(min, rng)),
    "the keywords of a partial": lambda rng: functools.partial(max, key=rng),
    "a closure": enclosing,
    "a default": lambda rng: lambda sample, rng=rng: rng,
    "an attribute of a function": lambda rng: functools.wraps(enclosing(rng))(lambda sample: sample),
    "a module of torch": lambda rng: torch.nn.Sequential(torch.nn.ModuleDict({"a": Transform(rng)})),
    "a subset": lambda rng: torch.utils.data.Subset(Holder(rng=rng), [0]),
}


class Transform(torch.nn.Module):
    """A transform that is a module."""

    def __init__(self, rng):
        super().__init__()
        self.rng = rng


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_generator_is_found(holder, kind):
    """A generator is found and seeded wherever it is kept, and equal seeds give equal numbers."""
    rng = KINDS[kind]()
    held = HeldGenerators(HOLDERS[holder](rng))
    assert found(held) == [rng]
    held.seed(7)
    first, again = draw(rng), (held.seed(7), draw(rng))[1]
    held.seed(8)
    assert first == again != draw(rng)


def test_globals_that_code_names_are_searched():
    """Globals that code names are searched, because a script may keep a generator there."""

    class Dataset:
        def __getitem__(self, index):
            return [names_a_global(index) for _ in range(2)]

    assert found(HeldGenerators(Dataset())) == [IN_A_MODULE]
    assert found(HeldGenerators(lambda: lambda: names_a_global(3))) == [IN_A_MODULE]


def test_generators_of_classes_are_found():
    """A generator of a class is found, and so is one that replaces it in an instance."""
    objects = [Randomizable(), Randomizable()]
    held = HeldGenerators(objects)
    assert found(held) == [Randomizable.R]
    objects[1].set_random_state(5)
    assert found(held) == [Randomizable.R, objects[1].R]
    held.seed(7)
    assert objects[0].R.rand() != objects[1].R.rand()


def test_generators_that_are_replaced_are_seeded():
    """Generators are looked up in their places at each seeding; a place that is empty is skipped."""
    transforms = [Compose(), Compose()]
    held = HeldGenerators(Compose(*transforms))
    assert len(found(held)) == 6
    held.seed(7)
    expected = [draw(generator) for generator in found(held)]
    assert len(set(expected)) == 6, "no two draw the same"
    for transform in transforms:
        transform.set_random_seed(3)
    held.seed(7)
    assert [draw(generator) for generator in found(held)] == expected
    del transforms[0].py_random
    assert len(found(held)) == 5


def test_generators_that_are_made_later_keep_the_seeds_of_the_others():
    """A generator created later, as for the first sample, does not change the seeds of the others."""
    owner = Holder(second=None, rng=np.random.default_rng(1))
    held = HeldGenerators(owner)
    held.seed(7)
    expected = draw(owner.rng)
    owner.second = np.random.default_rng(2)
    held.search_again()
    held.seed(7)
    assert draw(owner.rng) == expected
    assert draw(owner.second) != expected


def test_global_generators_are_not_held():
    """Global generators are seeded elsewhere, even if an object holds them, as in scikit-learn."""
    owner = Holder(rng=np.random.mtrand._rand, draw=random.random, rand=np.random.rand, torch=torch.default_generator)
    assert found(HeldGenerators(owner)) == []


def test_the_search_is_bounded():
    """The search goes neither through a huge number of samples, nor for ever through circular references."""
    looked_at = []

    class Sample:
        def __init__(self, number):
            self.number = number

        @property
        def __class__(self):
            looked_at.append(self.number)
            return Sample

    owner = Holder(samples=[Sample(number) for number in range(100_000)], rng=np.random.default_rng(1))
    owner.itself = [owner]
    owner.chain = None
    for _ in range(2 * generators._MAX_OBJECTS):
        owner.chain = Holder(chain=owner.chain)
    assert found(HeldGenerators(owner)) == [owner.rng]
    assert not looked_at


def test_the_search_calls_no_code_of_containers():
    """The search runs no code of containers: a dataset may be a list whose items are read from files."""

    class Files(list):
        def __getitem__(self, index):
            raise AssertionError("read")

        __iter__ = __len__ = __getitem__

    rng = np.random.default_rng(1)
    assert found(HeldGenerators(Files([[rng]]))) == [rng]


def test_objects_that_cannot_be_looked_at_are_passed_over():
    """Objects that raise when their attributes are read are skipped."""
    owner = Holder(guarded=Guarded(np.random.default_rng(1)), rng=np.random.default_rng(2))
    assert found(HeldGenerators(owner)) == [owner.rng]


def test_seeds_give_unrelated_numbers():
    """Neighboring seeds give evenly spread, unrelated numbers, and seeding discards buffered bits."""
    rng = np.random.default_rng(1)
    drawn = []
    for seed in range(4000):
        seed_generator(rng, seed)
        drawn.append(rng.random())
        rng.integers(2, dtype=np.uint32)  # buffers half of 64 bits
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 44  # chi-squared, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.06
    seed_generator(rng, 3999)
    assert rng.random() == drawn[-1]


def test_torch_and_numpy_draw_different_bits():
    """The global generators get different seeds: from equal ones, these Mersenne Twisters would flip equal coins."""
    alike = 0
    for sample in range(1000):
        seed_all(sample * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
        alike += int(torch.randint(2, ())) == np.random.randint(2)
    assert 400 < alike < 600


def test_what_objects_hold_is_reachable():
    """Objects are reachable through attributes, containers and closures."""
    held = [Slotted(1), Transform(None), Slotted(2)]
    owner = Holder(transform=Holder(transforms=[Holder(), held[0]]), function=enclosing(held[1]))
    found = {id(one) for one in reachable(owner)}
    assert [id(one) in found for one in (owner, *held)] == [True, True, True, False]
