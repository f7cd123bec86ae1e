"""Measure the time to the first batch of a fresh data host, and of the next epoch, when workers are running.

The dataset has 1,280,000 samples and is shuffled: the sampler draws the order in the training process. Building a batch
costs almost nothing.

    python benchmarks/start_up.py --rounds 5
"""

from __future__ import annotations

import sys
import time

import torch
from data_service import data_hosts, in_child, in_turn, machine, parser, prepare, spread
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm._table import draw_table

NUM_SAMPLES = 1_280_000
BATCH_SIZE = 256
PARTS = {
    "up": "host: process started to listening",
    "first": "host listening to first batch",
    "next": "first batch of the next epoch",
}


class Indices(Dataset[torch.Tensor]):
    """Samples that are their own indices."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a sample."""
        return torch.tensor(index)


class IndicesData(LightningDataModule):
    """A data module with a shuffled loader of these samples."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the loader."""
        return DataLoader(Indices(), batch_size=BATCH_SIZE, shuffle=True)


def start(workers: int, host_cores: list[int], trainer_cores: list[int]) -> dict[str, float]:
    """Return the seconds of each part."""
    from lightning_sm.data.trainer.datamodule import RemoteDataModule

    prepare(trainer_cores)
    began = time.perf_counter()
    with data_hosts([{}], host_cores, workers) as hosts:
        up = time.perf_counter()
        remote = RemoteDataModule(IndicesData(), [hosts[0].address])
        remote.setup("fit")
        loader = remote.train_dataloader()
        next(iter(loader))
        first = time.perf_counter()
        next(iter(loader))
        following = time.perf_counter()
        remote.teardown("fit")
    times = [up - began, first - up, following - first]
    return dict(zip(PARTS, times, strict=True))


def main() -> None:
    """Run the rounds and print a table."""
    options = parser("measure the time to the first batch", rounds=5)
    options.add_argument("--workers", type=int, default=2, help="workers of the data host")
    args = options.parse_args()
    cores = {"host_cores": args.host_cores, "trainer_cores": args.trainer_cores}
    runs = in_turn({"start": lambda: in_child(start, workers=args.workers, **cores)}, args.rounds)["start"]
    table = [[text, spread([run[part] for run in runs], 3)] for part, text in PARTS.items()]
    headers = ["part", "seconds"]
    sys.stdout.write(machine() + draw_table(table, headers) + "\n")


if __name__ == "__main__":
    main()
