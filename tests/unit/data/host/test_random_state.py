"""Whether global generators were used, and the states of streams that take turns."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.data.host import random_state
from lightning_sm.data.host.random_state import GENERATORS, NUMPY, PYTHON, TORCH, Generator, RandomStates, seed_all

# Each takes another way through a generator. 312 numbers of 64 bits are all 624 words of its state: the position after
# them is that before.
DRAWS = {
    "one number": (PYTHON, random.random),
    "a normal number, and one kept for later": (PYTHON, lambda: random.gauss(0, 1)),
    "a choice": (PYTHON, lambda: random.choice("abc")),
    "all words": (PYTHON, lambda: [random.random() for _ in range(312)]),
    "another seed": (PYTHON, lambda: random.seed(5)),
    "NumPy, one number": (NUMPY, np.random.rand),
    "NumPy, a normal number, and one kept for later": (NUMPY, np.random.randn),
    "NumPy, an integer": (NUMPY, lambda: np.random.randint(7)),
    "NumPy, all words": (NUMPY, lambda: np.random.rand(312)),
    "NumPy, another seed": (NUMPY, lambda: np.random.seed(5)),
    "NumPy, a generator over the same bits": (
        NUMPY,
        lambda: np.random.Generator(np.random.get_bit_generator()).random(),
    ),
    "torch, one number": (TORCH, lambda: torch.rand(())),
    "torch, a normal number": (TORCH, lambda: torch.randn(())),
    "torch, a permutation": (TORCH, lambda: torch.randperm(4)),
    "torch, another seed": (TORCH, lambda: torch.manual_seed(5)),
}


@pytest.fixture(autouse=True)
def _restored():
    """Leave all generators as they were."""
    states = [generator.get() for generator in GENERATORS]
    yield
    for generator, state in zip(GENERATORS, states, strict=True):
        generator.set(state)


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_leaves_a_trace(name):
    """Every draw shows in its own generator, and in no other one."""
    generator, draw = DRAWS[name]
    seed_all(1)
    for each in GENERATORS:
        each.mark()
    assert not any(each.was_used for each in GENERATORS)
    draw()
    assert [each.was_used for each in GENERATORS] == [each is generator for each in GENERATORS]


@pytest.mark.parametrize("draw", [lambda: random.gauss(0, 1), np.random.randn])
def test_a_number_that_is_left_over_leaves_a_trace(draw):
    """The second of two normal numbers was drawn earlier, but is not taken unnoticed after the generator is cleared."""
    draw()
    for each in GENERATORS:
        each.clear()
    draw()
    assert [each for each in GENERATORS if each.was_used]


def test_without_a_known_layout_all_generators_count_as_used(monkeypatch):
    """On an interpreter whose generators lie otherwise in memory, everything is seeded."""
    assert random_state._traces_are_known()
    monkeypatch.setattr(random_state, "_TRACES_ARE_KNOWN", False)
    generator = Generator(random.seed, random.getstate, random.setstate, lambda: 0)
    generator.mark()
    assert generator.was_used


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(DRAWS)) | st.none()), max_size=12))
def test_streams_that_take_turns_do_not_disturb_each_other(turns):
    """Each stream draws what it draws alone, whatever the others draw in between."""

    def drawn(order):
        streams = [RandomStates(number) for number in range(3)]
        values = [[], [], []]
        for number, name in order:
            with streams[number]:
                values[number].append(repr(DRAWS[name][1]()) if name else None)
        return values

    alone = [drawn([turn for turn in turns if turn[0] == number])[number] for number in range(3)]
    assert drawn(turns) == alone
