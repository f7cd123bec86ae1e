"""Compare the predictions of lightning-sm plan, made from one short run, with measurements of other runs.

Each run is an emulated job with one trainer host and one data host on separate cores. With ``--local``, the trainer's
DataLoader has the workers instead. A step takes ``--step-ms``. A batch takes a worker ``--batch-ms`` on average,
varying by ``--vary`` (standard deviation / mean, log-normal). Both sleep, so that the cores suffice for all workers.
The plan is made from the run with the first number of workers, and predicts the runs with the others. With ``--save``,
it predicts the cheapest mix of workers and hosts, which then runs by the command in the planned job file.

    python benchmarks/plan.py --workers 2 1 4 6 --vary 0.25
    python benchmarks/plan.py --local --workers 1 2
    python benchmarks/plan.py --save --workers 2
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from data_service import machine, sleep_s
from torch.utils.data import DataLoader, Dataset

from lightning_sm import SageMakerCLI, SageMakerJob, Topology
from lightning_sm._lightning import LightningDataModule, LightningModule
from lightning_sm._table import draw_table
from lightning_sm._text import count
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import read_run
from lightning_sm.report.figures import Figures
from lightning_sm.report.job_of_plan import job_of_plan
from lightning_sm.report.sizing import Sizing, measure, plan

_JOB_TIMEOUT_S = 300.0


class Sleeps(Dataset[torch.Tensor]):
    """Items whose loading takes a random time."""

    def __init__(self, num_items: int, mean_s: float, vary: float) -> None:
        self.num_items = num_items
        sigma2 = math.log(1 + vary**2)
        self.mu, self.sigma = math.log(mean_s) - sigma2 / 2, math.sqrt(sigma2)

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sleep for the time of this item, which is the same in each run."""
        sleep_s(random.Random(index).lognormvariate(self.mu, self.sigma))  # noqa: S311 - no secret
        return torch.ones(256)


class Batches(LightningDataModule):
    """A data module with batches of one item each."""

    def __init__(self, batch_s: float = 0.06, vary: float = 0.0, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_s, self.vary, self.num_workers = batch_s, vary, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader."""
        return DataLoader(Sleeps(100_000, self.batch_s, self.vary), num_workers=self.num_workers)


class Line(LightningModule):
    """A small model whose step takes a fixed time."""

    def __init__(self, step_s: float = 0.015) -> None:
        super().__init__()
        self.step_s = step_s
        self.layer = torch.nn.Linear(256, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Sleep, then return a loss."""
        sleep_s(self.step_s)
        loss: torch.Tensor = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train() -> None:
    """Train, on half of the cores if data hosts have the other half."""
    cores = sorted(os.sched_getaffinity(0))
    job = SageMakerJob.from_environment()
    topology = None if job is None else Topology.from_job(job)
    if topology is not None and topology.data_hosts and len(cores) > 1:
        half = len(cores) // 2
        os.sched_setaffinity(0, cores[:half] if topology.role.value == "trainer" else cores[half:])
    SageMakerCLI(Line, Batches)


def run(hosts_and_script: list[str]) -> Figures:
    """Run an emulated job with these arguments of ``lightning-sm local``, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lightning_sm", "local", "--base-dir", folder]
        command += ["--env", "LIGHTNING_SM_REPORT_S=0", *hosts_and_script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_JOB_TIMEOUT_S, check=False)
        if done.returncode != 0:
            sys.exit(f"{shlex.join(hosts_and_script)} failed:\n{done.stdout}\n{done.stderr}")
        return Figures(read_run(Path(folder)))


def job(options: argparse.Namespace, workers: int) -> list[str]:
    """Return the arguments of ``lightning-sm local`` for a job with this number of workers."""
    command = ["--group", "trainer=1", *([] if options.local else ["--group", "data=1"]), "--"]
    command += [__file__, "fit", f"--trainer.max_steps={options.steps}", "--trainer.logger=false"]
    command += [f"--data.batch_s={options.batch_ms / 1e3}", f"--data.vary={options.vary}"]
    option = "data.num_workers" if options.local else "data_service.workers"
    return [*command, f"--model.step_s={options.step_ms / 1e3}", f"--{option}={workers}"]


def planned_job(planned: Sizing, prices: Prices) -> list[str]:
    """Return the arguments of ``lightning-sm local`` in the comment of a plan's job file."""
    lines = [line.removeprefix("#").strip() for line in job_of_plan(planned, prices).splitlines() if line[0] == "#"]
    return shlex.split(" ".join(lines).partition("lightning-sm local ")[2])


def main() -> None:
    """Measure and predict the runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 1, 4, 6], help="plan from the first number")
    parser.add_argument("--local", action="store_true", help="use the DataLoader's workers, and no data host")
    parser.add_argument("--save", action="store_true", help="also run the job that plan --save writes")
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--batch-ms", type=float, default=60.0)
    parser.add_argument("--vary", type=float, default=0.25, help="standard deviation / mean of the time for a batch")
    parser.add_argument("--steps", type=int, default=400, help="steps per run")
    options = parser.parse_args()
    first, *others = options.workers
    figures = run(job(options, first))
    measured = measure(figures)
    jobs = {str(workers): (measured.predict(workers)[0], job(options, workers)) for workers in others}
    if options.save:
        prices = Prices({"trainer": 1.4, "data": 0.2})
        planned = plan(figures, prices)
        where = f"on {count(planned.best.num_hosts, 'data host')}, " if planned.best.num_hosts else ""
        jobs[f"{planned.best.workers} {where}planned"] = planned.best.step_s, planned_job(planned, prices)
    rows = []
    for name, (predicted_s, command) in jobs.items():
        step_s = run(command).pace.step_s
        error = f"{100 * (predicted_s / step_s - 1):+.1f}%"
        rows.append([name, f"{1e3 * predicted_s:.1f}", f"{1e3 * step_s:.1f}", error])
    table = draw_table(rows, ["workers", "predicted ms", "measured ms", "error"])
    sys.stdout.write(
        f"{machine()}\nfrom {first} workers: {1e3 * figures.pace.step_s:.1f} ms a step, {figures.pace.waiting:.0%} "
        f"waiting; a step needs {1e3 * measured.cost_s:.1f} ms of work\n{table}\n"
    )


if __name__ == "__main__":
    train() if sys.argv[1:2] == ["fit"] else main()
