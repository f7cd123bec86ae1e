"""The headlines of real jobs, each with one known limit (``python -m tests.records`` makes the records)."""

import shutil
from pathlib import Path

import pytest

from lightning_sm.errors import JobConfigError
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report import page, verdict
from lightning_sm.report.figures import Figures
from lightning_sm.report.sizing import plan
from tests.records.__main__ import JOBS

_RECORDS = Path(__file__).parents[2] / "records"
NAMES = {
    "transforms_on_data_hosts": "waiting for data (transforms)",
    "transforms_local": "waiting for data (transforms)",
    "transforms_in_training_process": "waiting for data (the training process builds its own batches)",
    "network": "waiting for data (network)",
    "slow_data_host": "waiting for data (data host algo-3",
    "data_host_without_batches": "waiting for data (data host algo-3",
    "data_host_that_came_back": "waiting for data (data host algo-1",
    "slow_rank": "a slow rank",
    "checkpoints": "checkpoints",
    "validation": "validation",
    "optimizer": "the optimizer",
    "python": "the forward pass",
    "to_device": "the transfer to the device",
    "start_up": "start-up",
    "restart_within_job": "restarts",
    "restarts": "restarts",
}


def figures(name):
    """Return the figures of a job."""
    return Figures(read_run(_RECORDS / name))


def test_each_job_has_a_known_limit():
    """Each job has a known limit, and each known limit has a job that shows it."""
    assert NAMES.keys() == JOBS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_headline_names_the_known_limit(name):
    """The headline and the first proposed change name the part that was made slow, and nothing else."""
    run = figures(name)
    assert verdict.ending(run).startswith("Succeeded after ")
    assert verdict.headline(run).startswith(f"Limited by {NAMES[name]}")
    first, *_ = verdict.changes(run, Prices())
    known = NAMES[name]
    assert first.startswith(known[0].upper() + known[1:])


@pytest.mark.parametrize("name", ["network", "slow_data_host", "data_host_without_batches", "data_host_that_came_back"])
def test_more_workers_are_not_the_answer_to_every_wait(name):
    """Where training waits for the network or a bad data host, there is no plan, and no word about transforms."""
    with pytest.raises(JobConfigError, match=r"more workers would not help\. Training waits .*(network|algo-\d)"):
        plan(figures(name), Prices())
    first, *_ = verdict.changes(figures(name), Prices())
    assert "transforms" not in first
    assert "num_workers" not in first


def test_a_slow_rank_of_another_host_is_possible(tmp_path):
    """Without the other ranks' records, a backward pass may be a wait, so the advice is to get these records."""
    folder = tmp_path / "slow_rank"
    shutil.copytree(_RECORDS / "slow_rank", folder)
    for file in folder.rglob("algo-2*"):
        file.unlink()
    run = Figures(read_run(folder))
    assert verdict.headline(run).startswith("Limited by the backward pass, or a slower rank")
    first, *_ = verdict.changes(run, Prices())
    assert first.endswith(" A report from the records of all ranks shows which.")
    text = page.render([run], Prices())
    assert "the records of the other ranks are not" in text
    assert "for which the others wait" not in text


@pytest.mark.parametrize("name", NAMES)
def test_each_second_of_a_job_is_counted_once(name):
    """The sum is exact to 1 s: Linux reports process starts relative to the boot time, which has whole seconds."""
    run = figures(name)
    assert sum(run.shares.values()) == pytest.approx(run.seconds, abs=1.0)


@pytest.mark.parametrize(("name", "words"), [
    ("slow_rank", "Rank 1 on algo-2 holds up the others"),
    ("slow_data_host", "a worker takes "),
    ("data_host_without_batches", "it has built no batch, and the others have to build all of them"),
    ("data_host_that_came_back", "was lost"),
    ("network", "is transfer from the data host (64 MB a batch"),
    ("transforms_on_data_hosts", "the only worker of the data hosts is busy 100% of the time"),
    ("checkpoints", "10 times, 1.5"),
    ("restarts", "Training was restarted once: "),
])  # fmt: skip
def test_the_finding_says_what_was_measured(name, words):
    """The finding names the measured rank, host or time."""
    assert words in verdict.headline(figures(name))
