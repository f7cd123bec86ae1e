"""What a disturbed run may end with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sm.chaos.judge import Difference, Judge, compare_in_process
from lightning_sm.chaos.models import differences
from lightning_sm.chaos.runs import LOG, RunEnding
from lightning_sm.errors import JobConfigError


@pytest.fixture
def ending(tmp_path):
    """Make the ending of a run with two ranks."""

    def make(name, weight=1.0, **values):
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        (folder / LOG).write_text("first line\nlast line\n")
        if weight is not None:
            torch.save({"weight": torch.tensor([weight])}, folder / "model" / "model.ckpt")
        defaults = RunEnding(
            folder=folder,
            exit_code=0,
            seconds=20.0,
            reason="",
            happened={},
            steps=80,
            epochs=4,
            world_size=2,
            metrics={"val_loss": 0.25, "time": 3.0},
            was_served=True,
            problems=(),
            is_approximate=False,
            model=folder / "model",
            data_groups=frozenset({"data"}),
        )
        return replace(defaults, **values)

    return make


def test_the_same_end_is_no_difference(ending):
    """Metrics that undisturbed runs do not share, such as times, do not count."""
    judge = Judge(ending("a"), ending("b", metrics={"val_loss": 0.25, "time": 4.0}), differences)
    judge.check()
    assert judge.differences(ending("c", metrics={"val_loss": 0.25, "time": 5.0})) == []
    assert judge.describe() == "Twice the same, undisturbed, in 20 s: steps, samples, 1 metric of 2, model."


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ({"exit_code": None, "seconds": 300.0}, "did not end within 300 s"),
        ({"exit_code": 137}, "failed with exit code 137"),
        ({"exit_code": 1, "reason": "ValueError: no"}, "failed with exit code 1: ValueError: no"),
        ({"problems": ("Epoch 1: never trained on: 8 samples.",)}, "Epoch 1: never trained on: 8 samples."),
        ({"steps": 79}, "ends at step 79 instead of 80"),
        ({"was_served": False}, "data hosts served no training loaders"),
        ({"metrics": {"val_loss": 0.26, "time": 3.0}}, "metric val_loss is 0.26 instead of 0.25"),
        ({"metrics": {"val_loss": None, "time": 3.0}}, "metric val_loss is None instead of 0.25"),
        ({"metrics": {"time": 3.0}}, "metric val_loss is None instead of 0.25"),
        ({"weight": 1.5}, "model.ckpt weight: differs by up to 0.5 (0.5 of its largest value)"),
        ({"weight": None}, "model.ckpt: only one of the runs has it: "),
    ],
)
def test_any_other_end_is_named(ending, values, difference):
    """Steps, samples, metrics and the model, each with both values."""
    judge = Judge(ending("a"), ending("b"), differences)
    (found,) = judge.differences(ending("c", **values))
    assert found.startswith(difference)


def test_a_restart_without_random_numbers_is_compared_by_steps_and_samples(ending):
    """Its model cannot be that of the other runs; a lost sample still counts."""
    judge = Judge(ending("a"), ending("b"), differences)
    assert judge.differences(ending("c", weight=2.0, metrics={}, is_approximate=True)) == []
    lost = ending("d", weight=2.0, is_approximate=True, steps=79, problems=("Epoch 1: never trained on: 8 samples.",))
    assert judge.differences(lost) == ["Epoch 1: never trained on: 8 samples.", "ends at step 79 instead of 80"]


def test_files_with_names_of_their_own_say_nothing(ending):
    """Where the undisturbed runs have such files, one that only a disturbed run has is no difference."""
    runs = [ending(name) for name in ("a", "b", "c")]
    for number, run in enumerate(runs):
        (run.model / f"events.{number}").touch()
    judge = Judge(runs[0], runs[1], differences)
    assert judge.differences(runs[2]) == []
    assert "only those are compared that two runs have" in judge.describe()
    torch.save({"weight": torch.tensor([2.0])}, runs[2].model / "model.ckpt")
    assert len(judge.differences(runs[2])) == 1


def test_more_than_two_ranks_may_differ_by_rounding(ending):
    """Restarted ranks add gradients up in another order; what is farther apart still counts."""
    judge = Judge(ending("a", world_size=3), ending("b", world_size=3), differences)
    assert judge.differences(ending("c", weight=1.0001, metrics={"val_loss": 0.25001, "time": 3.0})) == []
    assert len(judge.differences(ending("d", weight=1.01, metrics={"val_loss": 0.26, "time": 3.0}))) == 2


def test_what_a_script_does_at_random_is_not_compared(ending):
    """The description says so, and how to make it deterministic."""
    judge = Judge(ending("a", was_served=False), ending("b", weight=2.0, was_served=False), differences)
    assert judge.differences(ending("c", weight=3.0, was_served=False)) == []
    assert "Not compared, because they differ between these runs: model.ckpt weight." in judge.describe()
    assert "samples cannot be compared" in judge.describe()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"exit_code": 1},
            r"fails without any fault, with exit code 1\. The end of .*log\.txt:\nfirst line\nlast line",
        ),
        ({"problems": ("Epoch 1 is wrong.",)}, r"Without any fault, lightning-sm verify says: Epoch 1 is wrong\."),
        ({"steps": 0, "weight": None}, "there is nothing that faults could change"),
    ],
)
def test_a_script_that_cannot_be_judged_is_refused(ending, values, message):
    """Before any fault is injected."""
    with pytest.raises(JobConfigError, match=message):
        Judge(ending("a", **values), ending("b", **values), differences).check()


def test_models_are_compared_in_a_process_of_its_own(ending):
    """Because the command itself loads no torch."""
    found = compare_in_process(ending("a").model, ending("b", weight=2.0).model)
    assert found == {"model.ckpt weight": Difference("differs by up to 1 (1 of its largest value)", 1.0)}
