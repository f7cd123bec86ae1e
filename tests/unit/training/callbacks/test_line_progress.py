"""Lines of progress: one for each epoch, in which metric_definitions find the metrics."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from lightning_sm._lightning import Callback, ProgressBar
from lightning_sm.data.trainer.reporter import EpochReport
from lightning_sm.submit.metric_patterns import metric_definitions
from lightning_sm.training.callbacks import line_progress
from lightning_sm.training.callbacks.line_progress import LineProgress, own_progress


@pytest.fixture
def trainer():
    """A Trainer at the end of its third epoch."""
    metrics = {"train_loss": torch.tensor(0.25), "val_acc": torch.tensor(0.5)}
    return SimpleNamespace(max_epochs=10, current_epoch=2, global_step=45, callback_metrics=metrics, callbacks=[])


@pytest.fixture
def lines(caplog):
    """What was logged."""
    caplog.set_level(logging.INFO)
    return lambda: caplog.messages


def test_the_line_of_an_epoch_has_what_the_data_service_says(trainer, lines, monkeypatch):
    """Behind the metrics, which metric_definitions still find, and the data wait as well."""
    verdict = "Rank 3 on algo-2 waits 62% of the time for the network."
    monkeypatch.setattr(line_progress, "data_report", lambda _: EpochReport(0.62, verdict))
    LineProgress().on_train_epoch_end(trainer, None)
    assert lines() == [f"epoch=3/10 step=45 train_loss=0.25 val_acc=0.5 data_wait=62.0% | {verdict}"]
    found = {
        definition["Name"]: re.findall(definition["Regex"], lines()[0])
        for definition in metric_definitions(["train_loss", "val_acc", "data_wait"], {})
    }
    assert found == {"train_loss": ["0.25"], "val_acc": ["0.5"], "data_wait": ["62.0"]}


def test_without_data_hosts_the_line_ends_with_the_metrics(trainer, lines):
    """No callback reports on data."""
    LineProgress().on_train_epoch_end(trainer, None)
    assert lines() == ["epoch=3/10 step=45 train_loss=0.25 val_acc=0.5"]


def test_ranks_that_log_nothing_take_no_report(trainer, lines, monkeypatch):
    """A report exists once, for rank 0."""
    monkeypatch.setattr(line_progress, "data_report", lambda _: pytest.fail("taken"))
    progress = LineProgress()
    progress.disable()
    progress.on_train_epoch_end(trainer, None)
    assert not lines()


def test_a_progress_bar_of_the_user_has_a_consequence(lines):
    """metric_definitions find nothing of ours any more, and that is said, unless the bar is our own."""

    class OwnBar(ProgressBar):
        """The user's."""

    assert [type(callback) for callback in own_progress([Callback()])] == [LineProgress]
    assert own_progress([LineProgress(5.0)]) == []
    assert not lines()
    assert own_progress([Callback(), OwnBar()]) == []
    assert len(lines()) == 1
    assert lines()[0].startswith("OwnBar replaces the progress lines")
    assert "metric_definitions" in lines()[0]
