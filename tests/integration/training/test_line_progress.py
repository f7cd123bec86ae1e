"""LineProgress: the lines that metric_definitions read."""

import re

import pytest

from lightning_sm.submit.training_job import metric_definitions
from lightning_sm.training.callbacks.line_progress import LineProgress
from tests.fakes.small_app import SmallModel

QUIET = ("--trainer.enable_model_summary=false", "--trainer.logger=false", "--trainer.accelerator=cpu")
NUMBER = r"=([0-9.eE+-]+)(?: |$)"


@pytest.fixture
def lines(caplog):
    """The lines that LineProgress has written so far."""
    caplog.set_level("INFO", "lightning_sm")

    def read():
        name = "lightning_sm.training.callbacks.line_progress"
        return [record.getMessage() for record in caplog.records if record.name == name]

    return read


def test_one_line_for_each_epoch_and_one_at_the_end(host, lines):
    """Each epoch's line has epoch, step, all metrics and speed; the sanity check before training logs none."""
    host.start("fit", "--trainer.max_epochs=3", "--model.scores=[0.25, 0.5, 0.75]", *QUIET)
    first, second, third, end = lines()
    speed = rf"steps_per_s{NUMBER}samples_per_s{NUMBER}eta=0:00:\d\d memory_gb{NUMBER}data_wait=\d+\.\d%"
    assert re.fullmatch(rf"epoch=1/3 step=2 validation=1 val_score{NUMBER}train_loss{NUMBER}{speed}", first)
    assert [re.search(f"val_score{NUMBER}", line)[1] for line in (first, second, third)] == ["0.25", "0.5", "0.75"]
    assert second.startswith("epoch=2/3 step=4 ")
    assert third.startswith("epoch=3/3 step=6 ")
    assert end.startswith("finished: epochs=3 step=6 ")
    assert "validation=" not in end


def test_definitions_read_what_a_run_printed(host, lines):
    """Definitions find a metric in each line that has it, and a tuning job's objective once per validation."""
    host.start(
        "fit", "--trainer.max_epochs=2", "--trainer.val_check_interval=1", "--model.scores=[0.25, 0.5]",
        *QUIET, trainer_defaults={"callbacks": LineProgress(every_n_seconds=0)},
    )  # fmt: skip

    def found(name, objective=None):
        (definition,) = metric_definitions([name], objective)
        assert len(definition["Regex"]) <= 500
        return [float(match[1]) for line in lines() if (match := re.search(definition["Regex"], line))]

    assert found("val_score", objective="val_score") == [0.25, 0.25, 0.5, 0.5]
    repeated = found("val_score")
    assert len(repeated) > 4
    assert set(repeated) == {0.25, 0.5}
    assert found("steps_per_s")
    assert all(0 <= share <= 100 for share in found("data_wait"))


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize("score", [1e-5, 123456.0, 0.0, -2.5, 1e20])
def test_numbers_of_any_size_can_be_read(host, lines, score):
    """Metric definitions find a number of any size, and it is not rounded away."""
    host.start("fit", "--trainer.max_epochs=1", f"--model.scores=[{score}]", *QUIET)
    assert float(re.search(f"val_score{NUMBER}", lines()[0])[1]) == pytest.approx(score)


@pytest.mark.parametrize(
    ("subcommand", "title"), [("validate", "validation val_score=1e-05"), ("test", "test test_loss=")]
)
def test_other_subcommands_write_their_metrics(host, lines, subcommand, title):
    """``validate`` and ``test`` log one line at their end."""
    host.start(subcommand, *QUIET)
    assert len(lines()) == 1
    assert lines()[0].startswith(title)


def test_lines_within_an_epoch(host, lines):
    """Every ``every_n_seconds``, a line within the epoch also has the batch."""
    host.start("fit", "--trainer.max_epochs=1", *QUIET, trainer_defaults={"callbacks": LineProgress(every_n_seconds=0)})
    assert [line.split(" ")[:3] for line in lines()[:2]] == [
        ["epoch=1/1", "batch=1/2", "step=1"],
        ["epoch=1/1", "batch=2/2", "step=2"],
    ]


def test_an_open_end_is_a_question_mark(host, lines):
    """Without ``max_epochs`` the number of epochs is ``?``, while the number of batches is known."""
    every_step = {"callbacks": LineProgress(every_n_seconds=0)}
    host.start("fit", "--trainer.max_epochs=-1", "--trainer.max_steps=2", *QUIET, trainer_defaults=every_step)
    first, second, last, *_ = lines()
    assert first.startswith("epoch=1/? batch=1/2 step=1 ")
    assert second.startswith("epoch=1/? batch=2/2 step=2 ")
    assert last.startswith("epoch=1/? step=2 ")


@pytest.mark.parametrize("is_main", [True, False])
def test_only_rank_0_writes(host, lines, is_main):
    """Other ranks, where Lightning disables the progress bar, log neither lines nor what the model prints."""
    progress = LineProgress(every_n_seconds=0)

    class Prints(SmallModel):
        def on_train_start(self):
            """Print, after disabling the progress bar as on another rank."""
            if not is_main:
                progress.disable()
            self.print("hello", 1)

    host.start("fit", "--trainer.max_epochs=1", *QUIET, model=Prints, trainer_defaults={"callbacks": progress})
    assert ("hello 1" in lines()) == is_main
    assert bool(lines()) == is_main
    progress.enable()
    progress.print("again")
    assert lines()[-1] == "again"
