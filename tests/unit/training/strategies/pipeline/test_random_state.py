"""Random numbers in hooks and stages."""

import random

import numpy as np
import pytest
import torch

from lightning_sm.training.strategies.pipeline.random_state import (
    preserve_random_state,
    random_state,
    stage_stream,
    take_random_state,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def _random_state():
    with preserve_random_state():
        yield


def drawn():
    """Draw a number from each default generator."""
    return [random.random(), float(np.random.rand()), *(float(torch.rand((), device=device)) for device in DEVICES)]


def test_a_stage_leaves_the_default_generators_alone():
    """A stage draws only its seed from the default generators, even if it fails."""

    def fail():
        with stage_stream(1):
            drawn()
            raise ValueError

    kept = random_state()
    with stage_stream(0):
        pass
    expected = random_state()
    take_random_state(kept)
    with pytest.raises(ValueError, match=r"^$"):
        fail()
    assert random_state() == expected


def test_stages_draw_by_the_seed_of_the_run_and_their_position():
    """The default generators and the position determine a stage's numbers: runs are repeatable, and stages differ."""

    def run(position):
        with stage_stream(position):
            return drawn()

    kept = random_state()
    first, next_run = run(0), run(0)
    drawn()
    take_random_state(kept)
    other_stage = run(1)
    take_random_state(kept)
    assert run(0) == first
    assert all(mine != other for numbers in (other_stage, next_run) for mine, other in zip(first, numbers, strict=True))


def test_a_rank_goes_on_with_the_numbers_of_another():
    """A rank that takes another's state draws the same numbers from all generators."""
    drawn()
    sent = random_state()
    expected = drawn()
    take_random_state(sent)
    assert drawn() == expected
