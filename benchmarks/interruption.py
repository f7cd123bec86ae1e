"""Measure how long an interrupted job takes to save a checkpoint and exit, compared to stock Lightning.

Both train the same model on two emulated hosts, with the same launcher. Each round interrupts one job of each kind as
SageMaker does: SIGTERM to both hosts in random order, ``--skew`` seconds apart, and after ``--grace`` seconds SIGKILL
to the processes that still run. Stock Lightning is a Trainer with ``ModelCheckpoint(save_on_exception=True)``, as its
documentation recommends.

    python benchmarks/interruption.py --rounds 10
    python benchmarks/interruption.py --experiment overhead
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from data_service import in_turn, machine, ratio, sleep_s, spread
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerCLI, SageMakerEnvironment, SpotCheckpoint, prepare_process
from lightning_sm._lightning import Callback, LightningDataModule, LightningModule, ModelCheckpoint, Trainer
from lightning_sm._table import draw_table

_JOB_TIMEOUT_S = 300.0


class Line(LightningModule):
    """A model of some megabytes whose step takes a fixed time."""

    def __init__(self, step_s: float = 0.02, width: int = 1000) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Sleep, then return a loss."""
        sleep_s(self.step_s)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer with a state as large as the model."""
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


class Points(LightningDataModule):
    """A data module with more batches than any run needs."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader."""
        return DataLoader(TensorDataset(torch.rand(40_000, 2)), batch_size=4)


class Clock(Callback):
    """A callback that prints the duration of a step after a warm-up, and SpotCheckpoint's share of it."""

    def __init__(self, skipped: int = 50, counted: int = 500) -> None:
        super().__init__()
        self.skipped, self.counted, self.began, self.in_spot_s = skipped, counted, 0.0, 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Time SpotCheckpoint's hooks in each step."""
        for callback in trainer.callbacks:
            if isinstance(callback, SpotCheckpoint):
                callback.on_train_batch_start = self.timed(callback.on_train_batch_start)
                callback.on_train_batch_end = self.timed(callback.on_train_batch_end)

    def timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that also measures its duration."""

        def run(*arguments: Any) -> None:
            began = time.perf_counter()
            hook(*arguments)
            self.in_spot_s += time.perf_counter() - began

        return run

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock after the warm-up; print the times and stop training at the end."""
        if batch_idx == self.skipped:
            self.began, self.in_spot_s = time.perf_counter(), 0.0
        if batch_idx == self.skipped + self.counted:
            took = time.perf_counter() - self.began
            sys.stdout.write(f"ms per step {1e3 * took / self.counted}, percent {100 * self.in_spot_s / took}\n")
            trainer.should_stop = True


def train(way: str, folder: str, step_s: float) -> None:
    """Train on a host, as the script of the job."""
    torch.set_num_threads(1)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    if way == "lightning_sm":
        sys.argv = [sys.argv[0], "fit", f"--model.step_s={step_s}"]
        SageMakerCLI(Line, Points, trainer_defaults={**quiet, "callbacks": [Clock()], "max_epochs": 1})
        return
    environment = SageMakerEnvironment()
    prepare_process(environment)
    callbacks = [ModelCheckpoint(folder, save_on_exception=True), Clock()]
    trainer = Trainer(
        num_nodes=environment.num_nodes,
        devices=1,
        accelerator="cpu",
        strategy="ddp",
        max_epochs=1,
        plugins=[environment],
        callbacks=callbacks,
        **quiet,
    )
    trainer.fit(Line(step_s), datamodule=Points())


def run_job(way: str, step_s: float, *options: str) -> tuple[str, list[Path]]:
    """Run a job with two hosts, and return its output and its checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "checkpoints"
        command = [
            *(sys.executable, "-m", "lightning_sm", "local", "--group", "trainer=2", "--base-dir", f"{folder}/jobs"),
            *("--checkpoints", str(checkpoints), "--env", "OMP_NUM_THREADS=1", *options),
            *("--", __file__, "--train", way, "--folder", str(checkpoints), "--step-s", str(step_s)),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_JOB_TIMEOUT_S)
        return ended.stdout + ended.stderr, sorted(path for path in checkpoints.glob("*.ckpt") if path.stat().st_size)


def interrupted(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Interrupt a job, and return exit codes and times."""
    # Interrupt after a fixed time rather than at a step, because stock Lightning does not report steps.
    fault = f"stop@after={args.after},skew={args.skew}"
    output, checkpoints = run_job(way, args.step_s, "--fault", fault, "--grace-s", str(args.grace))
    rows = re.findall(r"^ *algo-\d+ +trainer +trainer +(\d+) +[\d.]+ +([\d.]+)", output, re.MULTILINE)
    if len(rows) != 2:  # noqa: PLR2004  # two hosts
        raise RuntimeError(f"the job of {way} was not interrupted:\n{output[-3000:]}")
    saved = re.findall(r"is saved in .*, ([\d.]+) s after the signal", output)
    return {
        "codes": sorted(int(code) for code, _ in rows),
        "exit_s": max(float(seconds) for _, seconds in rows),
        "saved_s": max(map(float, saved), default=None),
        "has_checkpoint": bool(checkpoints),
    }


def overhead(way: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the milliseconds per step of an undisturbed job, and SpotCheckpoint's percentage of them."""
    output, _ = run_job(way, args.step_s)
    times = re.findall(r"ms per step ([\d.]+), percent ([\d.]+)", output)
    if not times:
        raise RuntimeError(f"the job of {way} printed no time:\n{output[-3000:]}")
    return max(float(ms) for ms, _ in times), max(float(percent) for _, percent in times)


def main() -> None:
    """Run both in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=["interrupt", "overhead"], default="interrupt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skew", type=float, default=0.5, help="seconds between the signals to the two hosts")
    parser.add_argument("--after", type=float, default=12.0, help="seconds from the start of the job to the signal")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.folder, args.step_s)
        return
    ways = ("stock Lightning", "lightning_sm")
    function = {"interrupt": interrupted, "overhead": overhead}[args.experiment]
    results = in_turn({way: lambda way=way: function(way, args) for way in ways}, args.rounds)
    if args.experiment == "overhead":
        times = {way: [ms for ms, _ in runs] for way, runs in results.items()}
        shares = {way: spread([percent for _, percent in runs], 3) for way, runs in results.items()}
        rows = [[way, spread(times[way]), ratio(times[way], times[ways[0]], 3), shares[way]] for way in ways]
        headers = ["way", "ms per step", f"x {ways[0]}", "% of it in SpotCheckpoint"]
    else:
        rows = [_row(way, runs) for way, runs in results.items()]
        headers = [
            "way",
            "checkpoint saved",
            "signal to checkpoint s",
            "signal to exit s: median",
            "worst",
            "exit codes",
        ]
    sys.stdout.write(machine() + draw_table(rows, headers) + "\n")


def _row(way: str, runs: list[dict[str, Any]]) -> list[str]:
    saved = [run["saved_s"] for run in runs if run["saved_s"] is not None]
    left = sum(run["has_checkpoint"] for run in runs)
    exits = [run["exit_s"] for run in runs]
    codes = sorted({code for run in runs for code in run["codes"]})
    return [
        way,
        f"{left} of {len(runs)}",
        spread(saved, 1) if saved else "-",
        f"{median(exits):.1f}",
        f"{max(exits):.1f}",
        ", ".join(map(str, codes)),
    ]


if __name__ == "__main__":
    main()
