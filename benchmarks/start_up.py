"""Time to the first batch: from a data host that just listens, and of a pass that starts late in a long epoch.

The data host has only loaded the DataModule: the time includes setup() and the forks of workers. The dataset has
1,280,000 samples and is shuffled; a batch costs almost nothing. The workers exist before the pass that starts late.

With ``--experiment script``: of one script that has a data host and trains, from the start of its interpreter.

    python benchmarks/start_up.py --rounds 5
    python benchmarks/start_up.py --experiment script
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial

import numpy as np
import torch
from data_service import data_hosts, in_child, in_turn, machine, parser, prepare, spread
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_sm._table import draw_table

NUM_SAMPLES = 1_280_000
BATCH_SIZE = 256
PARTS = {
    "up": "host: process started to listening",
    "setup": "RemoteDataModule.setup()",
    "open": "train_dataloader()",
    "first": "first batch of the epoch",
    "all": "host listening to first batch",
    "late": "first batch at 95 % of the epoch",
}


SCRIPT = """
import json, sys, time
from lightning_sm import DataHost
if sys.argv[1] == "preloaded":
    DataHost.preload()
import torch
from lightning_sm import RemoteDataModule
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.arange(12800), batch_size=64)

imported = time.time()
with DataHost() as host:
    module = RemoteDataModule(Data(), [host.address])
    module.setup("fit")
    next(iter(module.train_dataloader()))
    print(json.dumps([imported, time.time()]))
    module.teardown("fit")
"""


class Indices(Dataset[torch.Tensor]):
    """Samples that are their own indices."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a sample."""
        return torch.tensor(index)


class IndicesData(LightningDataModule):
    """A loader of such samples, shuffled."""

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the loader."""
        return DataLoader(Indices(), batch_size=BATCH_SIZE, shuffle=True)


def start(workers: int, host_cores: list[int], trainer_cores: list[int]) -> dict[str, float]:
    """Return the seconds of each part."""
    from lightning_sm.data.ipc.feeder_messages import Position
    from lightning_sm.data.plan.order import ShuffledOrder
    from lightning_sm.data.trainer.datamodule import RemoteDataModule
    from lightning_sm.data.trainer.loader import RemoteLoader

    prepare(trainer_cores)
    began = time.perf_counter()
    with data_hosts([{}], host_cores, workers) as hosts:
        up = time.perf_counter()
        remote = RemoteDataModule(IndicesData(), [hosts[0].address], seed=0)
        remote.setup("fit")
        set_up = time.perf_counter()
        loader = remote.train_dataloader()
        opened = time.perf_counter()
        next(iter(loader))
        first = time.perf_counter()
        step = int(0.95 * len(loader))
        resumed = RemoteLoader(
            loader._client, loader.description, loader.place, loader.slots, lambda *_: Position(first_step=step)
        )
        asked = time.perf_counter()
        batch = next(iter(resumed))
        late = time.perf_counter()
        order = ShuffledOrder(NUM_SAMPLES, seed=0, epoch=0, salt="train 0")
        if not np.array_equal(batch.numpy(), order[np.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)]):
            raise ValueError("the pass did not begin where it should")
        del batch
        remote.teardown("fit")
    times = [up - began, set_up - up, opened - set_up, first - opened, first - up, late - asked]
    return dict(zip(PARTS, times, strict=True))


def script(kind: str) -> tuple[float, float]:
    """Return the seconds from the start of a script to the end of its imports, and to its first batch."""
    began = time.time()
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], stdout=subprocess.PIPE, check=True, timeout=170)
    imported, first = json.loads(done.stdout)
    return imported - began, first - began


def main() -> None:
    """Run one experiment, and print its table."""
    options = parser("seconds until the first batch", rounds=5)
    options.add_argument("--experiment", choices=["host", "script"], default="host")
    options.add_argument("--workers", type=int, default=2, help="workers of the data host")
    args = options.parse_args()
    if args.experiment == "host":
        cores = {"host_cores": args.host_cores, "trainer_cores": args.trainer_cores}
        runs = in_turn({"start": lambda: in_child(start, workers=args.workers, **cores)}, args.rounds)["start"]
        table = [[text, spread([run[part] for run in runs], 3)] for part, text in PARTS.items()]
        headers = ["part", "seconds"]
    else:
        results = in_turn({kind: partial(script, kind) for kind in ("plain", "preloaded")}, args.rounds)
        table = [[kind, *map(spread, zip(*times, strict=True))] for kind, times in results.items()]
        headers = ["DataHost in the script", "s to the end of its imports", "s to the first batch"]
    sys.stdout.write(machine() + draw_table(table, headers) + "\n")


if __name__ == "__main__":
    main()
