"""Progress lines: their content and order."""

import re

import pytest

from lightning_sm.record.progress_metrics import metric_pattern, objective_pattern, progress_line


def test_a_line_has_the_position_first_and_the_rates_last():
    """Metrics are between the position and the rates."""
    line = progress_line("epoch=3/10 step=45", {"val_acc": 0.9333}, {"steps_per_s": "12.3", "eta": "0:10:23"}, 3)
    assert line == "epoch=3/10 step=45 validation=3 val_acc=0.9333 steps_per_s=12.3 eta=0:10:23"
    assert progress_line("test", {"test_loss": 1e-5}, {}) == "test test_loss=1e-05"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("epoch=3/10 step=45 validation=3 val_acc=0.9333", "0.9333"),
        ("epoch=3/10 batch=7/9 step=45 validation=12 loss=1 val_acc=-1e-05 steps_per_s=3", "-1e-05"),
        ("epoch=3/10 step=45 val_acc=0.9333", None),
        ("epoch=3/10 step=45 validation=3 best_val_acc=0.9333", None),
        ("finished: epochs=3 step=6 val_acc=0.9333", None),
    ],
)
def test_an_objective_is_read_only_after_a_validation(line, value):
    """Only lines after a validation match, because other lines repeat an old value."""
    match = re.search(objective_pattern("val_acc"), line)
    assert (match and match[1]) == value


@pytest.mark.parametrize("name", ["steps_per_s", "samples_per_s", "memory_gb", "data_wait"])
def test_the_speed_can_be_a_metric_too(name):
    """Rates can be read from a line in the same way as the model's metrics."""
    line = progress_line("epoch=1/1 step=1", {}, {name: "3.1" if name != "data_wait" else "1.2%"})
    assert re.search(metric_pattern(name), line)
