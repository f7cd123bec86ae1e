"""The record of an emulated job with data hosts: one file per process, which together explain the run."""

import re
from pathlib import Path

import pytest

from lightning_sm.record import events
from lightning_sm.record.data_figures import HostFigures, RankFigures
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.record.waiting_reasons import verdict
from lightning_sm.report.figures import STEPS, WAITING, Figures
from lightning_sm.report.limits import cause_of_wait
from lightning_sm.report.page import render
from lightning_sm.report.sizing import advice, plan
from tests.integration.emulators import local

pytestmark = pytest.mark.processes

SCRIPT = """
import time
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from lightning_sm import SageMakerTrainer

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 120
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.rand(2)

class Data(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(Slow(), 2)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        loss = self.line(batch).mean()
        self.log("train_loss", loss)
        return loss
    def on_train_epoch_end(self):
        time.sleep(0.5)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

SageMakerTrainer(
    accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_model_summary=False
).fit(Model(), datamodule=Data())
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The folder that contains the job's folder."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def run(tmp_path_factory, jobs):
    """The output of two trainers that wait for a data host, and the job's record by role and writer."""
    work = tmp_path_factory.mktemp("work")
    (work / "train.py").write_text(SCRIPT)
    groups = ("--group", "trainer=2", "--group", "data=1")
    ended = local(jobs, work, *groups, "--", "train.py", "--api_key=abc", OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    files = {path.stem: events.read_lines(path.read_bytes()) for path in events.find_files(jobs)}
    heads = [lines[0] for lines in files.values()]
    return ended.stdout + ended.stderr, {(head.role, head.who): files[f"{head.host}-{head.who}"] for head in heads}


def of_kind(lines, kind):
    """Return the lines of one type."""
    return [line for line in lines if isinstance(line, kind)]


def test_every_process_has_a_file(run):
    """Launchers of both roles and all ranks write files that begin with who they are and end with the outcome."""
    _, files = run
    assert files.keys() == {("trainer", "launcher"), ("data", "launcher"), ("trainer", "rank-0"), ("trainer", "rank-1")}
    for (role, who), lines in files.items():
        head, end = lines[0], lines[-1]
        assert (head.role, len(head.hosts)) == (role, 3)
        assert (end.outcome, end.exit_code) == ("succeeded", 0 if who == "launcher" else None)


def test_launchers_say_what_they_ran_and_how_busy_it_was(run):
    """Launchers of both roles record their command, without secrets, and the use of their host."""
    for role in ("trainer", "data"):
        lines = run[1][role, "launcher"]
        script, argument = lines[0].command[-2:]
        assert (Path(script).name, argument) == ("train.py", "--api_key=(hidden)")
        assert [span.name for span in of_kind(lines, events.Span)] == ["preparation"]
        uses = of_kind(lines, events.HostUse)
        assert uses
        assert any(use.cpu > 0 for use in uses)
        assert all(0 < use.memory_bytes <= use.memory_total_bytes for use in uses)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_say_where_their_steps_were(run, rank):
    """Each rank records 30 batches in each of two epochs, without the first step."""
    lines = run[1]["trainer", f"rank-{rank}"]
    steps = of_kind(lines, events.Steps)
    assert sum(line.n for line in steps) == 59
    assert sum(line.samples for line in steps) == 59 * 2
    assert steps[-1].step == 60
    (loader,) = of_kind(lines, events.Loader)
    assert loader.ranks_of_host == 1


def test_the_record_of_rank_0_says_why_training_waited(run):
    """Rank 0's last figures, which cover all data hosts and ranks, explain why training waited."""
    _, files = run
    assert not of_kind(files["trainer", "rank-1"], events.DataService)
    last = of_kind(files["trainer", "rank-0"], events.DataService)[-1]
    ranks = {name: RankFigures(**values) for name, values in last.ranks.items()}
    text = verdict(ranks, [HostFigures(**host) for host in last.hosts])
    assert "for the transforms" in text


def test_the_end_of_an_epoch_is_part_of_no_step(jobs):
    """The script's work at the end of an epoch is reported separately."""
    assert Figures(read_run(jobs)).shares["between epochs"] >= 1.0


def test_report_and_plan_read_what_was_recorded(run, jobs):
    """The figures cover all hosts, steps and seconds of a real job, and the advice is what the job lacks."""
    figures = Figures(read_run(jobs))
    assert (figures.outcome, len(figures.attempts), figures.num_steps) == ("succeeded", 1, 60)
    assert [(host.role, bool(host.uses)) for host in figures.hosts] == [("trainer", True)] * 2 + [("data", True)]
    assert figures.samples_per_step == pytest.approx(4)
    assert sum(figures.shares.values()) == pytest.approx(figures.seconds, rel=0.05)
    assert min(figures.shares[WAITING], figures.shares[STEPS]) > 0
    assert cause_of_wait(figures).name == "transforms"
    planned = plan(figures, Prices())
    # Two ranks with 2 samples of 50 ms.
    assert planned.measured.cost_s == pytest.approx(0.2, rel=0.3)
    assert planned.best.workers > planned.measured.workers
    assert re.search(r"Use \d+ data hosts instead of 1, with", advice(planned, Prices()))
    assert "What to change" in render([figures], Prices())
