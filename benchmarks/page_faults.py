"""How much fresh memory a batch costs: minor page faults per batch in every process on its way.

Samples lie ready; torch's own collate function stacks them. With the data service it writes into a slot that was used
before; in a worker of a local DataLoader it writes into fresh shared memory, which the training process maps anew.

    python benchmarks/page_faults.py --payload a
"""

from __future__ import annotations

import itertools
import os
import sys

import psutil
import torch
from data_service import in_child, machine, minor_faults, parser, prepare, service
from pytorch_lightning import LightningDataModule
from tabulate import tabulate
from torch.utils.data import DataLoader, Dataset
from wire_baselines import PAYLOADS, Payload

NUM_SAMPLES = 256  # that differ; the others repeat them
NUM_WARM_UP = 40  # every slot of every ring was used once by then


class Samples(Dataset[torch.Tensor]):
    """Samples that lie ready in memory."""

    def __init__(self, payload: Payload, num_batches: int) -> None:
        self.length = num_batches * payload.shape[0]
        shape = (min(NUM_SAMPLES, payload.shape[0]), *payload.shape[1:])
        self.samples = torch.ones(shape, dtype=getattr(torch, payload.dtype))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a sample."""
        return self.samples[index % len(self.samples)]


class SamplesData(LightningDataModule):
    """A loader of such samples."""

    def __init__(self, payload: Payload, num_batches: int, workers: int = 0) -> None:
        super().__init__()
        self.payload, self.num_batches, self.workers = payload, num_batches, workers

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the loader."""
        dataset = Samples(self.payload, self.num_batches)
        return DataLoader(dataset, batch_size=self.payload.shape[0], num_workers=self.workers)


def remote(payload: str, num_batches: int, workers: int, host_cores: list[int], trainer_cores: list[int]) -> dict:
    """Faults per batch of each kind of process of the data service."""
    module = SamplesData(PAYLOADS[payload], num_batches + NUM_WARM_UP)
    with service([module], workers, host_cores, trainer_cores) as running:
        batches = iter(running.loader)
        for _ in itertools.islice(batches, NUM_WARM_UP):
            pass
        pids = running.pids()
        before = {role: minor_faults(members) for role, members in pids.items()}
        for _ in itertools.islice(batches, num_batches):
            pass
        return {role: (minor_faults(members) - before[role]) / num_batches for role, members in pids.items()}


def local(payload: str, num_batches: int, workers: int, trainer_cores: list[int]) -> dict[str, float]:
    """Faults per batch of the user's own DataLoader."""
    prepare(trainer_cores)
    batches = iter(SamplesData(PAYLOADS[payload], num_batches + NUM_WARM_UP, workers).train_dataloader())
    for _ in itertools.islice(batches, NUM_WARM_UP):
        pass
    pids = {"training": [os.getpid()], "worker": [child.pid for child in psutil.Process().children()]}
    before = {role: minor_faults(members) for role, members in pids.items()}
    # The last batches are left in the queue: workers that have ended tell nothing any more.
    num_counted = num_batches - 4 * workers
    for _ in itertools.islice(batches, num_counted):
        pass
    return {role: (minor_faults(members) - before[role]) / num_counted for role, members in pids.items()}


def main() -> None:
    """Count with both, and print a table."""
    options = parser("minor page faults per batch", rounds=1)
    options.add_argument("--payload", nargs="+", choices=PAYLOADS, default=["a", "c"])
    options.add_argument("--batches", type=int, default=200)
    options.add_argument("--workers", type=int, default=2)
    args = options.parse_args()
    table = []
    for payload in args.payload:
        shared = {"payload": payload, "num_batches": args.batches, "workers": args.workers}
        shared |= {"trainer_cores": args.trainer_cores}
        ours = in_child(remote, host_cores=args.host_cores, **shared)
        for name, faults in (("local DataLoader", in_child(local, **shared)), ("lightning_sm", ours)):
            pages = PAYLOADS[payload].size_bytes / 4096
            table.append([payload, f"{pages:.0f}", name, *(_shown(faults, role) for role in ROLES)])
    headers = ["payload", "pages of a batch", "loader", *ROLES]
    sys.stdout.write(machine() + tabulate(table, headers=headers, disable_numparse=True) + "\n")


ROLES = ("worker", "network", "host", "feeder", "training")


def _shown(faults: dict[str, float], role: str) -> str:
    return f"{faults[role]:.1f}" if role in faults else "-"


if __name__ == "__main__":
    main()
