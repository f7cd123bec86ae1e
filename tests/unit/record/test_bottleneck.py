"""The model of a step, against measured steps of others, and its words."""

import pytest

from lightning_sm.record.bottleneck import StepModel


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
