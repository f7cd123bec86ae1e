"""Measure how the data service scales with transforms that only sleep, so that cores are not the bottleneck.

workers    Compare k workers, on one data host and on two, to k times the rate of one worker. The trainer only reads.
seed       Repeat the AWS sample's experiment: a step takes 15 ms, a sample 6 ms, and a batch has 16 samples. Compare a
           trainer with one local worker to the same trainer with one and with two data hosts of four workers each.

python benchmarks/scaling.py --experiment workers --workers 1 2 4 8
python benchmarks/scaling.py --experiment seed
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from data_service import in_child, in_turn, machine, parser, prepare, ratio, service, sleep_s, spread
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm._table import draw_table

BATCH_SIZE = 16
SAMPLE_S = 0.006
STEP_S = 0.015
NUM_SAMPLES = BATCH_SIZE * 20_000


class Slow(Dataset[torch.Tensor]):
    """Samples that take time but use no core."""

    def __init__(self) -> None:
        self.sample = torch.arange(256, dtype=torch.float32)

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sleep, then return a sample."""
        sleep_s(SAMPLE_S)
        return self.sample


class SlowData(LightningDataModule):
    """A data module with a loader of these samples.

    Args:
        workers: Number of local workers of the loader.
    """

    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the loader."""
        return DataLoader(Slow(), batch_size=BATCH_SIZE, num_workers=self.workers)


def interval_s(batches: Iterable[Any], num_batches: int, num_warm_up: int, step_s: float) -> float:
    """Return the mean seconds per step over some batches, after warm-up batches that fill the pipeline."""
    iterator = iter(batches)
    for _ in itertools.islice(iterator, num_warm_up):
        sleep_s(step_s)
    began = time.perf_counter()
    for _ in itertools.islice(iterator, num_batches):
        if step_s:
            sleep_s(step_s)
    return (time.perf_counter() - began) / num_batches


def local(workers: int, step_s: float, num_batches: int, trainer_cores: list[int]) -> float:
    """Return the seconds per step with a local DataLoader."""
    prepare(trainer_cores)
    return interval_s(SlowData(workers).train_dataloader(), num_batches, 2 * workers + 2, step_s)


def remote(
    *,
    num_hosts: int,
    workers: int,
    step_s: float,
    num_batches: int,
    host_cores: list[int],
    trainer_cores: list[int],
) -> float:
    """Return the seconds per step with some data hosts and a number of workers on each."""
    with service(SlowData(), workers, host_cores, trainer_cores, environments=[{}] * num_hosts) as running:
        return interval_s(running.loader, num_batches, 4 * num_hosts * workers + 4, step_s)


def workers_table(counts: list[int], rounds: int, num_batches: int, cores: dict[str, list[int]]) -> list[list[str]]:
    """Compare the rate of k workers with k times the rate of one."""
    shapes = [(num_hosts, count // num_hosts) for count in counts for num_hosts in (1, 2) if count % num_hosts == 0]
    shapes = sorted({(1, 1), *shapes}, key=lambda shape: (shape[0] * shape[1], shape))
    variants = {
        f"{num_hosts} x {workers}": partial(
            in_child,
            remote,
            num_hosts=num_hosts,
            workers=workers,
            step_s=0.0,
            num_batches=num_batches * num_hosts * workers,
            **cores,
        )
        for num_hosts, workers in shapes
    }
    results = in_turn(variants, rounds)
    one = results["1 x 1"]
    table = []
    for (name, times), (num_hosts, workers) in zip(results.items(), shapes, strict=True):
        k = num_hosts * workers
        table.append([name, spread([1e3 * value for value in times], 1), ratio(one, [value * k for value in times], 3)])
    return table


def seed_table(rounds: int, num_batches: int, cores: dict[str, list[int]]) -> list[list[str]]:
    """Compare a slow host without data hosts to the same host with data hosts."""
    shared = {"step_s": STEP_S, "trainer_cores": cores["trainer_cores"]}
    variants = {"alone, 1 local worker": partial(in_child, local, workers=1, num_batches=num_batches // 4, **shared)}
    for num_hosts, workers in ((1, 4), (2, 4)):
        more = {"num_hosts": num_hosts, "workers": workers, "num_batches": num_batches, **shared}
        name = f"{num_hosts} data hosts x {workers} workers"
        variants[name] = partial(in_child, remote, host_cores=cores["host_cores"], **more)
    results = in_turn(variants, rounds)
    alone = results["alone, 1 local worker"]
    limit = f"limit: a step of {1e3 * STEP_S:.0f} ms"
    table = [
        [name, spread([1e3 * value for value in times], 1), ratio(alone, times)] for name, times in results.items()
    ]
    return [*table, [limit, f"{1e3 * STEP_S:.1f}", f"{statistics.median(alone) / STEP_S:.2f}"]]


def main() -> None:
    """Run one experiment and print its table."""
    options = parser("scaling with simulated transforms", rounds=2)
    options.add_argument("--experiment", choices=["workers", "seed"], default="workers")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="total numbers of workers")
    options.add_argument("--batches", type=int, help="batches per run; for the experiment workers, per worker")
    args = options.parse_args()
    cores = {"host_cores": args.host_cores, "trainer_cores": args.trainer_cores}
    if args.experiment == "workers":
        table = workers_table(args.workers, args.rounds, args.batches or 40, cores)
        headers = ["hosts x workers", "ms per batch", "rate / (k x rate of one)"]
    else:
        table, headers = seed_table(args.rounds, args.batches or 200, cores), ["hosts", "ms per step", "x alone"]
    sys.stdout.write(machine() + draw_table(table, headers) + "\n")


if __name__ == "__main__":
    main()
