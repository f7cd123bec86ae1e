"""Progress lines: one per epoch, whose metrics metric_definitions can find."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from lightning_sm._lightning import Callback, ProgressBar
from lightning_sm.submit.training_job import metric_definitions
from lightning_sm.training.callbacks.line_progress import LineProgress, own_progress


@pytest.fixture
def trainer():
    """A Trainer at the end of its third epoch."""
    metrics = {"train_loss": torch.tensor(0.25), "val_acc": torch.tensor(0.5)}
    return SimpleNamespace(max_epochs=10, current_epoch=2, global_step=45, callback_metrics=metrics, callbacks=[])


@pytest.fixture
def lines(caplog):
    """The logged lines."""
    caplog.set_level(logging.INFO)
    return lambda: caplog.messages


def test_the_line_of_an_epoch_has_the_metrics(trainer, lines):
    """metric_definitions find the metrics; without step times, the line shows no rates."""
    LineProgress().on_train_epoch_end(trainer, None)
    assert lines() == ["epoch=3/10 step=45 train_loss=0.25 val_acc=0.5"]
    found = {
        definition["Name"]: re.findall(definition["Regex"], lines()[0])
        for definition in metric_definitions(["train_loss", "val_acc"])
    }
    assert found == {"train_loss": ["0.25"], "val_acc": ["0.5"]}


@pytest.mark.parametrize("is_main", [True, False])
def test_only_rank_0_writes_after_a_search(trainer, lines, is_main):
    """Only rank 0 logs after a search for a learning rate or batch size, which disables and then enables all bars."""
    progress, trainer.is_global_zero = LineProgress(), is_main
    progress.setup(trainer, None, "fit")
    progress.disable()
    progress.enable()
    progress.on_train_epoch_end(trainer, None)
    assert bool(lines()) == is_main


def test_a_progress_bar_of_the_user_has_a_consequence(lines):
    """A user's progress bar replaces the lines, so metric_definitions find nothing, and the log says so."""

    class OwnBar(ProgressBar):
        """A user's progress bar."""

    assert [type(callback) for callback in own_progress([Callback()])] == [LineProgress]
    assert own_progress([LineProgress(5.0)]) == []
    assert not lines()
    assert own_progress([Callback(), OwnBar()]) == []
    assert len(lines()) == 1
    assert lines()[0].startswith("OwnBar replaces the progress lines")
    assert "metric_definitions" in lines()[0]
