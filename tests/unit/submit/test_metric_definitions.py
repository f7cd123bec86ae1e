"""Metric definitions, checked against the lines that LineProgress prints."""

import math
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sm.submit.training_job import metric_definitions
from lightning_sm.training.callbacks import line_progress

NAMES = st.text("abcXYZ_019/.-+()[]*", min_size=1, max_size=12)


def line_with(metrics):
    """Return the line that LineProgress logs at the end of an epoch."""
    lines = []
    handler = SimpleNamespace(level=0, handle=lambda record: lines.append(record.getMessage()))
    trainer = SimpleNamespace(max_epochs=10, current_epoch=2, global_step=45, callback_metrics=metrics, callbacks=[])
    before = line_progress.logger.level
    line_progress.logger.addHandler(handler)
    line_progress.logger.setLevel("INFO")
    try:
        line_progress.LineProgress().on_train_epoch_end(trainer, None)
    finally:
        line_progress.logger.removeHandler(handler)
        line_progress.logger.setLevel(before)
    (line,) = lines
    return line


def found(name, line):
    """Return what the service reads for a metric: the first group of each match."""
    (definition,) = metric_definitions([name])
    assert definition["Name"] == name
    return [match[1] for match in re.finditer(definition["Regex"], line)]


@given(st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=5))
def test_every_metric_is_read_once_and_exactly(metrics):
    """Each metric is read exactly once, whatever its name, its neighbours, its sign and its size."""
    line = line_with(metrics)
    for name, value in metrics.items():
        (text,) = found(name, line)
        assert math.isclose(float(text), float(f"{value:.6g}"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_no_data_point(value):
    """NaN and infinity are not read, because CloudWatch accepts neither."""
    assert found("val_acc", line_with({"val_acc": value, "val_loss": 1.0})) == []


@pytest.mark.parametrize("other", ["val_acc", "val/acc", "val-acc", "acc_step", "acc2"])
def test_a_name_is_not_found_within_another(other):
    """A name matches neither the end nor the beginning of a longer name."""
    assert found("acc", line_with({other: 0.5})) == []


def test_the_step_is_a_metric_too():
    """Values before the metrics can be read, except for the line's first word."""
    assert found("step", line_with({"val_acc": 1.0})) == ["45"]
