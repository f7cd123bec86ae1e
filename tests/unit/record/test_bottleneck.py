"""The model of a step, against measured steps of others, and its words."""

import pytest

from lightning_sm.record.bottleneck import StepModel, local_verdict, more_workers, times_as_many


@pytest.mark.parametrize(
    ("workers", "measured_ms"), [(1, 99.0), (2, 50.0), (4, 24.7), (8, 15.3)], ids=["1", "2", "4", "8"]
)
def test_the_model_predicts_measured_steps(workers, measured_ms):
    """Steps of 15 ms with 16 samples of 6 ms, as they were measured with a prototype: within 4 %."""
    model = StepModel(own_s=0.015, cost_s=16 * 0.006, workers=1)
    assert 1e3 * model.step_s(workers) == pytest.approx(measured_ms, rel=0.04)


def test_the_largest_term_is_the_limit():
    """Workers, then the network, then training itself."""
    model = StepModel(own_s=0.1, cost_s=1.0, workers=2, wire_s=0.2)
    assert [model.limit(workers) for workers in (2, 5, 100)] == ["workers", "network", "network"]
    assert StepModel(own_s=0.1, cost_s=1.0, workers=2).limit(100) == "training"


def test_workers_have_a_tenth_in_reserve():
    """10 workers would just do; and there is always one."""
    assert StepModel(own_s=0.1, cost_s=1.0, workers=2).workers_needed == 12
    assert StepModel(own_s=0.1, cost_s=0.0, workers=2).workers_needed == 1


@pytest.mark.parametrize(
    ("share", "busy", "factor"), [(0.85, 1.0, 6.7), (0.58, 1.0, 2.4), (0.3, 0.5, 0.7), (0.0, 1.0, 1.0)]
)
def test_workers_that_idle_need_no_more_of_their_kind(share, busy, factor):
    """The factor is the reciprocal of the time that does not wait, times how busy the workers are."""
    assert more_workers(share, busy) == pytest.approx(factor, rel=0.03)


def test_a_factor_far_from_what_was_measured_is_a_bound():
    """Up to twice the workers it is an estimate."""
    assert times_as_many(1.8) == "about 1.8 times as many"
    assert times_as_many(6.67) == "at most 6.7 times as many"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.04, 4, 0.5, 8), ""),
        ((0.6, 0), "Input-bound 60% of the time: the training process builds its batches itself. Set num_workers"),
        (
            (0.4, 4, 0.5, 8),
            "by the loader's 4 workers: about 1.7 times as many workers would remove the wait; the host's CPUs",
        ),
        ((0.4, 1), "by the loader's only worker: about 1.7 times as many workers would remove the wait."),
        ((0.75, 4, 0.97, 4), "the host's 4 CPUs are 97% busy: at most 4 times as many workers"),
    ],
)
def test_a_local_loader_is_told_what_helps(arguments, words):
    """Workers where there are none, more of them, or more CPUs; silence where nothing waits."""
    said = local_verdict(*arguments)
    assert words in said
    assert bool(said) == bool(words)
