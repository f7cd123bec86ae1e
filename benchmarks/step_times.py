"""Measure the cost of StepTimes per training step: the time of the training thread with and without it.

Both variants train the same small model, in turn, in one process, without pauses between steps. For each run, the 10th
percentile of its steps counts, because other work on the machine only makes steps longer. To stand out from the noise,
one variant has ``--copies`` of the callback. The overhead is the difference divided by the number of copies. It is the
same for steps of any length, and shown as a percentage of ``--step-ms``. The callback writes the record of the run to a
folder, as in a job.

    python benchmarks/step_times.py --rounds 10
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from data_service import in_turn, machine, spread
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm._lightning import Callback, LightningModule, Trainer
from lightning_sm._table import draw_table
from lightning_sm.job.facts import InstanceGroup, SageMakerJob
from lightning_sm.record.events import find_files, record_folder
from lightning_sm.timing.step_times import StepTimes

# Steps before the clock starts: the allocator, caches and the branch predictor settle.
_WARM_UP = 200


class Line(LightningModule):
    """The smallest possible model."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return a loss."""
        return self.line(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stopwatch(Callback):
    """A callback that records when steps begin, which costs both variants the same."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the CPU time and the wall-clock time."""
        self.cpu_s.append(time.thread_time())
        self.wall_s.append(time.perf_counter())


def typical(moments: list[float]) -> float:
    """Return the microseconds of an undisturbed step."""
    steps = [after - before for before, after in pairwise(moments[_WARM_UP:])]
    return 1e6 * quantiles(steps, n=10)[0]


def train(num_steps: int, copies: int) -> tuple[float, float]:
    """Train, and return the microseconds per step, as CPU time and as wall-clock time."""
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        job = SageMakerJob("algo-1", ("algo-1",), (InstanceGroup("all", ("algo-1",)),), "benchmark", Path(folder))
        callbacks: list[Callback] = [stopwatch, *(StepTimes(job) for _ in range(copies))]
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(num_steps, 4)), 1))
        num_files = len(find_files(record_folder(job)))
        if num_files != copies:
            raise RuntimeError(f"{num_files} of {copies} records were written")
    return typical(stopwatch.cpu_s), typical(stopwatch.wall_s)


def main() -> None:
    """Run both variants in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--step-ms", type=float, default=2.0, help="step length for the percentage")
    args = parser.parse_args()
    torch.set_num_threads(1)
    without, measured = "without", f"with {args.copies} StepTimes"
    variants = {
        without: lambda: train(args.steps, 0),
        measured: lambda: train(args.steps, args.copies),
    }
    results = in_turn(variants, args.rounds)
    rows = [[name, *(spread([run[kind] for run in runs], 0) for kind in (0, 1))] for name, runs in results.items()]
    headers = ["variant", "CPU time of a step, microseconds", "on the clock"]
    sys.stdout.write(machine() + draw_table(rows, headers) + "\n")
    for kind, words in enumerate(("CPU time", "on the clock")):
        added = [
            (more[kind] - less[kind]) / args.copies
            for more, less in zip(results[measured], results[without], strict=True)
        ]
        percent = median(added) / (10 * args.step_ms)
        sys.stdout.write(f"One adds {spread(added, 1)} microseconds ({words}): {percent:.2f}% of {args.step_ms:g} ms\n")


if __name__ == "__main__":
    main()
