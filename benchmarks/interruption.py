"""How long an interrupted job of two hosts takes to save a checkpoint and to exit, compared to stock Lightning.

Both train the same model on two emulated hosts, under the same launcher. Each round interrupts each of them once, as
SageMaker does: SIGTERM to both hosts, ``--skew`` seconds apart, in random order, and SIGKILL after ``--grace`` to the
processes that still run. Stock Lightning is a Trainer with ``ModelCheckpoint(save_on_exception=True)``, which its
documentation recommends for this.

    python benchmarks/interruption.py --rounds 10
    python benchmarks/interruption.py --experiment overhead

A third experiment kills a rank of a job that may restart, and compares a restart from the last step with one from the
latest periodic checkpoint:

    python benchmarks/interruption.py --experiment restart
"""

from __future__ import annotations

import argparse
import os
import re
import signal
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

from lightning_sm import SageMakerCLI, SageMakerEnvironment, SageMakerTrainer, SpotCheckpoint, prepare_process
from lightning_sm._lightning import Callback, LightningDataModule, LightningModule, ModelCheckpoint, Trainer
from lightning_sm._table import draw_table
from lightning_sm.job.variables import MAX_RESTARTS, RESTART_DIR

_JOB_TIMEOUT_S = 300.0
_INTERRUPT_AT = 20
# Late enough that the standby process, which imports beside the first steps, waits; two cores need seconds for that.
_KILL_AT, _SAVE_EVERY = 295, 50
_WAYS_TO_RESTART = ("from the latest checkpoint", "from the last step")


class Line(LightningModule):
    """A model of some megabytes whose step takes a fixed time."""

    def __init__(self, step_s: float = 0.02, width: int = 1000) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Take the time, and return a loss."""
        sleep_s(self.step_s)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer with a state as large as the model."""
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


class Points(LightningDataModule):
    """More batches than any run needs."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader."""
        return DataLoader(TensorDataset(torch.rand(40_000, 2)), batch_size=4)


class Clock(Callback):
    """Print the duration of some steps, without the first ones, and SpotCheckpoint's share of it."""

    def __init__(self, skipped: int = 50, counted: int = 500) -> None:
        super().__init__()
        self.skipped, self.counted, self.began, self.in_spot_s = skipped, counted, 0.0, 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Time SpotCheckpoint's part of each step."""
        for callback in trainer.callbacks:
            if isinstance(callback, SpotCheckpoint):
                callback.on_train_batch_start = self.timed(callback.on_train_batch_start)
                callback.on_train_batch_end = self.timed(callback.on_train_batch_end)

    def timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that measures its own time."""

        def run(*arguments: Any) -> None:
            began = time.perf_counter()
            hook(*arguments)
            self.in_spot_s += time.perf_counter() - began

        return run

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the time."""
        if batch_idx == self.skipped:
            self.began, self.in_spot_s = time.perf_counter(), 0.0
        if batch_idx == self.skipped + self.counted:
            took = time.perf_counter() - self.began
            sys.stdout.write(f"ms per step {1e3 * took / self.counted}, percent {100 * self.in_spot_s / took}\n")
            trainer.should_stop = True


class Killed(Callback):
    """Kill rank 1 once, and print the time of that and of the next step."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark, self.is_first = mark, True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Kill the rank."""
        if trainer.global_step == _KILL_AT and trainer.global_rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.write(1, f"killed at {time.time()}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print the time of the first step of an attempt."""
        if self.is_first and trainer.global_rank == 0:
            os.write(1, f"step {trainer.global_step} at {time.time()}\n".encode())
        self.is_first = False
        trainer.should_stop = trainer.global_step > _KILL_AT


def train(way: str, folder: str, step_s: float) -> None:
    """The script that runs on each host."""
    torch.set_num_threads(1)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    if way in _WAYS_TO_RESTART:
        if way == _WAYS_TO_RESTART[0]:
            os.environ.pop(RESTART_DIR.name, None)
        callbacks = [ModelCheckpoint(every_n_train_steps=_SAVE_EVERY), Killed(Path(folder).parent / "killed")]
        trainer = SageMakerTrainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **quiet)
        trainer.fit(Line(step_s), datamodule=Points())
        return
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
    """Run a job of two hosts, and return its output and its checkpoints."""
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
    """Interrupt one job."""
    # Stock Lightning reports no steps: both are interrupted some seconds after they were started.
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


def restarted(way: str, args: argparse.Namespace) -> tuple[float, float]:
    """Kill a rank of one job; return the seconds to the next step, and the steps lost."""
    output, _ = run_job(way, args.step_s, "--env", f"{MAX_RESTARTS.name}=1")
    killed = re.findall(r"killed at ([\d.]+)", output)
    steps = re.findall(r"step (\d+) at ([\d.]+)", output)
    if len(killed) != 1 or len(steps) != 2:  # noqa: PLR2004  # two attempts
        raise RuntimeError(f"the job {way} was not restarted once:\n{output[-3000:]}")
    step, at = steps[1]
    return float(at) - float(killed[0]), _KILL_AT + 1 - int(step)


def overhead(way: str, args: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds per step of an undisturbed job, and the percentage that SpotCheckpoint takes of them."""
    output, _ = run_job(way, args.step_s)
    found = re.findall(r"ms per step ([\d.]+), percent ([\d.]+)", output)
    if not found:
        raise RuntimeError(f"the job of {way} printed no time:\n{output[-3000:]}")
    return max(float(ms) for ms, _ in found), max(float(percent) for _, percent in found)


def main() -> None:
    """Run both in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=["interrupt", "overhead", "restart"], default="interrupt")
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
    ways = _WAYS_TO_RESTART if args.experiment == "restart" else ("stock Lightning", "lightning_sm")
    function = {"interrupt": interrupted, "overhead": overhead, "restart": restarted}[args.experiment]
    results = in_turn({way: lambda way=way: function(way, args) for way in ways}, args.rounds)
    if args.experiment == "overhead":
        times = {way: [ms for ms, _ in runs] for way, runs in results.items()}
        shares = {way: spread([percent for _, percent in runs], 3) for way, runs in results.items()}
        rows = [[way, spread(times[way]), ratio(times[way], times[ways[0]], 3), shares[way]] for way in ways]
        headers = ["way", "ms per step", f"x {ways[0]}", "% of it in SpotCheckpoint"]
    elif args.experiment == "restart":
        rows = [
            [way, *(spread([run[number] for run in runs], 1) for number in (0, 1))] for way, runs in results.items()
        ]
        headers = ["restart", "kill to the next step s", "steps lost"]
    else:
        rows = [_row(way, runs) for way, runs in results.items()]
        headers = [
            "way",
            "checkpoint left",
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
