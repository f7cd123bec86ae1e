"""Measure two data hosts, one of which is eight times slower or freezes in the middle of an epoch.

    slow      Compare the time of an epoch to the ideal, computed from the rates of the hosts alone.
    frozen    Send SIGSTOP to all processes of one host, and measure the first and the longest wait between two batches
              afterwards.

Transforms only sleep, so that cores are not the bottleneck. Every sample must arrive exactly once, in order.

    python benchmarks/stragglers.py --experiment slow
    python benchmarks/stragglers.py --experiment frozen
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from data_service import frozen, in_child, in_turn, machine, parser, service, sleep_s, spread
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm._table import draw_table

BATCH_SIZE = 4
SLOW = "one of two 8 x slower"
# Environment variable with the factor by which a data host is slower.
SLOWNESS = "LIGHTNING_SM_BENCHMARK_SLOWNESS"
LONG_GAP_S = 0.25  # without a failure, a batch takes far less, hedged or not


class Numbers(Dataset[torch.Tensor]):
    """Samples that are their own indices, each of which takes a fixed time."""

    def __init__(self, length: int, sample_s: float) -> None:
        self.length, self.sample_s = length, sample_s

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sleep, then return a sample."""
        sleep_s(self.sample_s * float(os.environ[SLOWNESS]))
        return torch.tensor(index)


class NumbersData(LightningDataModule):
    """A data module with a loader of these samples, in order."""

    def __init__(self, length: int, sample_s: float) -> None:
        super().__init__()
        self.length, self.sample_s = length, sample_s

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the loader."""
        return DataLoader(Numbers(self.length, self.sample_s), batch_size=BATCH_SIZE)


def epoch(
    *,
    factors: list[float],
    freeze_at: int | None,
    num_batches: int,
    batch_s: float,
    workers: int,
    host_cores: list[int],
    trainer_cores: list[int],
) -> dict[str, Any]:
    """Run two epochs, and return the time of the second one and the waits between its batches."""
    sample_s = batch_s / BATCH_SIZE
    length = num_batches * BATCH_SIZE
    hosts = [{SLOWNESS: str(factor)} for factor in factors]
    data = NumbersData(length, sample_s)
    with (
        service(data, workers, host_cores, trainer_cores, environments=hosts) as running,
        contextlib.ExitStack() as stack,
    ):
        for _ in running.loader:  # a warm-up epoch, after which both hosts serve
            pass
        began = time.perf_counter()
        times, samples, frozen_at = [], [], None
        for step, batch in enumerate(running.loader):
            times.append(time.perf_counter())
            samples += batch.tolist()
            if step == freeze_at:
                stack.enter_context(frozen(running.hosts[1]))
                frozen_at = len(times)
        total_s = times[-1] - times[0]
        if samples != list(range(length)):
            raise ValueError("samples were lost, repeated or out of order")
    waits = [after - before for before, after in itertools.pairwise(times)]
    late = waits[frozen_at - 1 :] if frozen_at else waits
    first = next((number for number, wait in enumerate(late) if wait > LONG_GAP_S), len(late))
    return {
        "first_batch_s": times[0] - began,
        "total_s": total_s,
        "first_gap_s": late[first] if first < len(late) else max(late),
        "worst_gap_s": max(late[first + 1 :], default=0.0) if first < len(late) else max(late),
        "usual_gap_s": sorted(waits)[len(waits) // 2],
    }


def main() -> None:
    """Run one experiment and print its table."""
    options = parser("measure two data hosts, one of which is slow or freezes", rounds=3)
    options.add_argument("--experiment", choices=["slow", "frozen"], default="slow")
    options.add_argument("--batches", type=int, default=400)
    options.add_argument("--batch-ms", type=float, default=40.0, help="milliseconds per batch on the faster host")
    options.add_argument("--workers", type=int, default=2, help="workers of each host")
    args = options.parse_args()
    shared = {
        "num_batches": args.batches,
        "batch_s": args.batch_ms / 1e3,
        "workers": args.workers,
        "host_cores": args.host_cores,
        "trainer_cores": args.trainer_cores,
    }
    if args.experiment == "slow":
        table, headers = slow_table(args.rounds, shared)
    else:
        runs = in_turn({"frozen": lambda: in_child(epoch, factors=[1.0, 1.0], freeze_at=50, **shared)}, args.rounds)
        headers = ["total_s", "usual_gap_s", "first_gap_s", "worst_gap_s"]
        table = [[spread([run[column] for run in runs["frozen"]], 3) for column in headers]]
    sys.stdout.write(machine() + draw_table(table, headers) + "\n")


def slow_table(rounds: int, shared: dict[str, Any]) -> tuple[list[list[str]], list[str]]:
    """Compare two hosts, the second slower by a factor, to the ideal computed from the first host's rate alone."""
    cases = {"one": [1.0], "two alike": [1.0, 1.0], "one of two 2 x slower": [1.0, 2.0], SLOW: [1.0, 8.0]}
    variants = {
        name: partial(in_child, epoch, factors=factors, freeze_at=None, **shared) for name, factors in cases.items()
    }
    results = in_turn(variants, rounds)
    alone_s = statistics.median(run["total_s"] for run in results["one"])
    table = []
    for name, factors in cases.items():
        totals = [run["total_s"] for run in results[name]]
        ideal_s = alone_s / sum(1 / factor for factor in factors)
        table.append([name, spread(totals, 2), f"{ideal_s:.2f}", spread([total / ideal_s for total in totals])])
    return table, ["hosts", "s per epoch", "ideal", "x ideal"]


if __name__ == "__main__":
    main()
