"""Compare 64 KB batches, whose samples draw random numbers, to a local DataLoader with one worker.

Samples cost nothing except their random numbers, so the table shows the cost of seeding and sending each batch. The
data host has one worker, on different cores than the trainer; the local loader may use the cores of both.

    python benchmarks/small_batches.py --rounds 3
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from data_service import in_child, in_turn, machine, parser, prepare, ratio, service, spread
from torch.utils.data import Dataset, get_worker_info
from wire import NUM_BATCHES, Keys, ListedKeys, ReadyData, StreamedKeys
from wire_baselines import PAYLOADS, Payload

from lightning_sm._table import draw_table

NUM_WARM_UP = 1100  # batches before the clock starts: the first 1024 show which generators a loader uses


class TorchKeys(Keys):
    """A dataset whose samples draw from torch's global generator."""

    def __getitem__(self, key: int) -> int:
        """Draw, and return the index."""
        torch.rand(())
        return key


class GlobalKeys(Keys):
    """A dataset whose samples draw from all three global generators."""

    def __getitem__(self, key: int) -> int:
        """Draw, and return the index."""
        torch.rand(())
        random.random()  # noqa: S311  # not for secrets
        np.random.rand()  # as much user code does
        return key


class PrivateKeys(Keys):
    """A dataset whose samples draw from a generator of the dataset."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, key: int) -> int:
        """Draw, and return the index."""
        self.rng.random()
        return key


class TorchStream(StreamedKeys):
    """A stream whose samples draw from torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        """Draw, and yield the indices of the worker's batches."""
        worker = get_worker_info()
        if worker is None:
            raise RuntimeError("a stream is read by a worker")
        for number in range(worker.id, NUM_BATCHES, worker.num_workers):
            for key in range(number * self.batch_size, (number + 1) * self.batch_size):
                torch.rand(())
                yield key


# Datasets by the generators that their samples use.
DRAWS: dict[str, type[Dataset[int]]] = {
    "nothing, by __getitems__": ListedKeys,
    "nothing": Keys,
    "torch": TorchKeys,
    "random, NumPy and torch": GlobalKeys,
    "a generator of its own": PrivateKeys,
    "nothing, a stream": StreamedKeys,
    "torch, a stream": TorchStream,
}


def drawing(draws: str) -> ReadyData:
    """Return a data module with prepared batches whose samples draw random numbers."""
    return ReadyData(PAYLOADS["e"], 1, DRAWS[draws])


def served(draws: str, host_cores: list[int], trainer_cores: list[int], seconds: float) -> float:
    """Return the batches per second from a data host."""
    with service(drawing(draws), 1, host_cores, trainer_cores) as running:
        return _rate(running.loader, seconds)


def local(draws: str, host_cores: list[int], trainer_cores: list[int], seconds: float) -> float:
    """Return the batches per second from a local worker."""
    prepare([*host_cores, *trainer_cores])
    return _rate(drawing(draws).train_dataloader(), seconds)


def _rate(loader: Iterable[torch.Tensor], seconds: float) -> float:
    batches = iter(loader)
    for _ in itertools.islice(batches, NUM_WARM_UP):
        pass
    began = time.perf_counter()
    for number, _ in enumerate(batches, start=1):
        passed = time.perf_counter() - began
        if passed >= seconds:
            return number / passed
    raise RuntimeError("the epoch is shorter than the measurement")


def main() -> None:
    """Run both loaders in turn for all datasets and print a table."""
    options = parser("batches of 64 KB per second", rounds=3, seconds=2.5)
    options.add_argument("--draws", nargs="+", choices=DRAWS, default=list(DRAWS), help="what the samples draw from")
    args = options.parse_args()
    limits = {"host_cores": args.host_cores, "trainer_cores": args.trainer_cores, "seconds": args.seconds}
    table = []
    for draws in args.draws:
        results = in_turn(
            {kind.__name__: partial(in_child, kind, draws=draws, **limits) for kind in (local, served)}, args.rounds
        )
        rates = results["served"], results["local"]
        table.append([draws, *(spread(values, 0) for values in rates), ratio(*rates)])
    headers = ["samples draw from", "data host, batches/s", "local worker, batches/s", "x local"]
    sys.stdout.write(machine() + draw_table(table, headers) + "\n")


if __name__ == "__main__":
    main()
