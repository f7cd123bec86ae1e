"""Compare the data service's transport to raw TCP, gRPC alone, the AWS sample ("seed") and rpcdataloader, on loopback.

This measures the transport of a batch from a data host's memory to a tensor in the training process. The baselines are
in ``wire_baselines.py``. Batches cost nothing to build: the collate function returns an existing tensor, which the
worker copies to its slot; torch's collate function would have written it there directly. This extra copy, which the
baselines do not make, is included. So is the work of the loader's sampler in the training process, which sends the
index of each sample. CPU time includes all processes: workers, server process and main process of the data host; feeder
and training process of the trainer.

    pip install -e . protobuf rpcdataloader
    python benchmarks/wire.py --payload a c --rounds 5
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from data_service import in_child, in_turn, machine, parser, ratio, service, spread
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from wire_baselines import BASELINES, NUM_SOURCES, PAYLOADS, Payload, consume, measure

from lightning_sm._table import draw_table

OURS = "lightning_sm"
NUM_BATCHES = 1_000_000  # per epoch, more than any run takes


class Keys(Dataset[int]):
    """A dataset whose samples are their indices, read one at a time."""

    def __init__(self, payload: Payload) -> None:
        self.batch_size = payload.shape[0]
        self.length = self.batch_size * NUM_BATCHES

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.length

    def __getitem__(self, key: int) -> int:
        """Return the index."""
        return key


class ListedKeys(Keys):
    """A dataset whose samples are their indices, read one batch at a time."""

    def __getitems__(self, keys: list[int]) -> list[int]:
        """Return the indices."""
        return keys


class StreamedKeys(IterableDataset[int]):
    """A stream of indices, in which workers yield whole batches in turn."""

    def __init__(self, payload: Payload) -> None:
        self.batch_size = payload.shape[0]

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the worker's batches."""
        worker = get_worker_info()
        if worker is None:
            raise RuntimeError("a stream is read by a worker")
        for number in range(worker.id, NUM_BATCHES, worker.num_workers):
            yield from range(number * self.batch_size, (number + 1) * self.batch_size)


# Datasets by the method that returns their samples.
DATASETS: dict[str, type[Dataset[int]]] = {"getitems": ListedKeys, "getitem": Keys, "iter": StreamedKeys}


class Ready:
    """A collate function that returns prepared batches, equal to those of the baselines.

    The batches are sent to the data hosts once, before workers are forked.
    """

    def __init__(self, payload: Payload) -> None:
        arrays = (payload.batch(index).view(payload.dtype).reshape(payload.shape) for index in range(NUM_SOURCES))
        self.batches = [torch.from_numpy(array.copy()) for array in arrays]

    def __call__(self, keys: list[int]) -> torch.Tensor:
        """Return the prepared batch for these samples."""
        return self.batches[keys[0] // len(keys) % NUM_SOURCES]


class ReadyData(LightningDataModule):
    """A data module with a loader of prepared batches.

    Args:
        payload: Kind of batch.
        workers: Number of workers of the loader, which matters if the loader is local or reads a stream.
        dataset: Class of the dataset.
    """

    def __init__(self, payload: Payload, workers: int = 1, dataset: type[Dataset[int]] = ListedKeys) -> None:
        super().__init__()
        self.payload, self.workers, self.dataset = payload, workers, dataset

    def train_dataloader(self) -> DataLoader[int]:
        """Return the loader."""
        dataset: Any = self.dataset
        return DataLoader(
            dataset(self.payload),
            batch_size=self.payload.shape[0],
            collate_fn=Ready(self.payload),
            num_workers=self.workers,
        )


def ours(
    payload: str, workers: int, host_cores: list[int], trainer_cores: list[int], seconds: float, *, samples: str
) -> dict[str, Any]:
    """Receive batches for some seconds, after checking that the first ones arrive unchanged."""
    kind = PAYLOADS[payload]
    data = ReadyData(kind, workers, DATASETS[samples])
    with service(data, workers, host_cores, trainer_cores) as running:
        batches = iter(running.loader)
        for index, batch in enumerate(itertools.islice(batches, NUM_SOURCES)):
            if not np.array_equal(batch.numpy().reshape(-1).view(np.uint8), kind.batch(index)):
                raise ValueError(f"batch {index} of payload {payload} arrived changed")
        server_pids = running.server_pids()
        return asdict(consume(_dropped(batches), kind.size_bytes, server_pids, [running.feeder_pid], seconds=seconds))


def _dropped(batches: Iterator[torch.Tensor]) -> Iterator[None]:
    for _ in batches:
        yield


def baseline(name: str, payload: str, host_cores: list[int], trainer_cores: list[int], seconds: float) -> Any:
    """Run one of the baselines."""
    return asdict(measure(name, payload, host_cores, trainer_cores, seconds=seconds))


def rows(payload: str, results: dict[str, list[dict[str, float]]]) -> Iterator[list[str]]:
    """Yield a line of the table for each transport."""
    speeds = {name: [run["gb_per_s"] for run in runs] for name, runs in results.items()}
    costs = {
        name: [run["server_cpu_s_per_gb"] + run["client_cpu_s_per_gb"] for run in runs]
        for name, runs in results.items()
    }
    for name in results:
        line = [payload, name, spread(speeds[name])]
        line += [ratio(speeds[name], speeds[other]) for other in BASELINES]
        line += [spread(costs[name])]
        line += [ratio(costs[name], costs[other]) for other in BASELINES if other != "raw-tcp"]
        yield line


def main() -> None:
    """Run all transports in turn and print a table."""
    options = parser("measure GB/s of delivered payload, and CPU seconds per GB of both ends", rounds=5, seconds=2.0)
    options.add_argument("--payload", nargs="+", choices=PAYLOADS, default=["a", "c", "d", "e"])
    options.add_argument("--workers", type=int, default=2, help="workers of the data host")
    options.add_argument("--samples", nargs="+", choices=DATASETS, default=["getitems"], help="methods of the dataset")
    args = options.parse_args()
    limits = {"host_cores": args.host_cores, "trainer_cores": args.trainer_cores, "seconds": args.seconds}
    table = []
    for payload in args.payload:
        variants = {name: partial(baseline, name, payload, **limits) for name in BASELINES}
        for samples in args.samples:
            variants[f"{OURS}, {samples}"] = partial(
                in_child, ours, payload=payload, workers=args.workers, samples=samples, **limits
            )
        table += rows(payload, in_turn(variants, args.rounds))
    names = [f"x {name}" for name in BASELINES]
    headers = ["payload", "transport", "GB/s", *names, "CPU s/GB", *names[1:]]
    sys.stdout.write(machine() + draw_table(table, headers) + "\n")


if __name__ == "__main__":
    main()
