"""The example models' learning rate over the steps of a run."""

import math

import pytest

from app.schedule import learning_rate_factor


def test_learning_rate_rises_then_falls():
    """The factor rises to 1 over a fifth of the steps, falls to 0 over the rest, and stays 0 after the end."""
    factors = [learning_rate_factor(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 20)
    assert factors[19] == 1
    assert factors[20:] == sorted(factors[20:], reverse=True)
    assert factors[60] == pytest.approx(0.5)
    assert factors[100] == 0
    assert learning_rate_factor(150, 100) == 0


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_learning_rate_of_the_shortest_runs(num_steps):
    """A run of few steps starts with the full learning rate instead of dividing by zero."""
    assert learning_rate_factor(0, num_steps) == 1
    assert learning_rate_factor(num_steps, num_steps) == 0


def test_learning_rate_of_an_endless_run():
    """Without a last step, the learning rate is constant."""
    assert learning_rate_factor(10**6, math.inf) == 1
