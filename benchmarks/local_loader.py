"""Compare the data service to a local DataLoader, for training that is input-bound and for training that is not.

    idle    Loading is faster than the training step. Both variants have the same number of workers and the same cores
            for the training process. The data service's workers have other cores, so this measures its overhead.
    bound   Loading is slower than the training step. Both variants have the same total number of cores. The local
            loader may use all of them; with the data service, the trainer (training process and feeder) has one core
            and the data host the others.

Images of 3x224x224 bytes are flipped, and blurred --blur times. A step works half in the interpreter and half in matrix
products. Both variants run in Lightning's Trainer. The clock starts after a warm-up.

    python benchmarks/local_loader.py --experiment idle
    python benchmarks/local_loader.py --experiment bound
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from data_service import busy_step, data_hosts, in_child, in_turn, machine, parser, prepare, ratio, spread
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_sm._table import draw_table

BATCH_SIZE = 32
NUM_WARM_UP = 10  # batches before the clock starts
EPOCH = 10_000  # batches; more than any run takes


class Images(Dataset[torch.Tensor]):
    """Images in memory, with augmentation."""

    def __init__(self, length: int, num_blurs: int) -> None:
        self.length, self.num_blurs = length, num_blurs
        self.images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)

    def __len__(self) -> int:
        """Return the number of images."""
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return an image, flipped at random and blurred."""
        image = self.images[index % len(self.images)]
        if torch.rand(()) < 0.5:  # noqa: PLR2004  # a fair coin
            image = image.flip(-1)
        if self.num_blurs:
            blurred = image.float()[None]
            for _ in range(self.num_blurs):
                blurred = torch.nn.functional.avg_pool2d(blurred, 5, stride=1, padding=2)
            image = blurred[0].to(torch.uint8)
        return image


class ImagesData(LightningDataModule):
    """A data module with a shuffled loader of these images."""

    def __init__(self, num_blurs: int, workers: int) -> None:
        super().__init__()
        self.num_blurs, self.workers = num_blurs, workers

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the loader."""
        dataset = Images(EPOCH * BATCH_SIZE, self.num_blurs)
        return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=self.workers)


class Work(LightningModule):
    """A model whose step does some units of work, with a clock.

    Args:
        step_units: Units of work per step.
        num_steps: Number of measured steps, after which training stops.
    """

    def __init__(self, step_units: int, num_steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.step_units = step_units
        self.num_steps = num_steps
        self.layer = torch.nn.Linear(1, 1)
        self.began = 0.0
        self.step_s = 0.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Read the batch, then work."""
        if batch_idx == NUM_WARM_UP:
            self.began = time.perf_counter()
        batch[:, 0, 0, 0].sum()
        busy_step(self.step_units)
        if batch_idx + 1 == NUM_WARM_UP + self.num_steps:
            self.step_s = (time.perf_counter() - self.began) / self.num_steps
            self.trainer.should_stop = True

    def configure_optimizers(self) -> None:
        """Configure no optimizer, because nothing is trained."""


def fit(
    *,
    hosts: int,
    workers: int,
    step_units: int,
    num_batches: int,
    num_blurs: int,
    host_cores: list[int],
    trainer_cores: list[int],
) -> float:
    """Return the seconds per step with some data hosts, or with a local loader if ``hosts`` is 0."""
    from lightning_sm.data.trainer.datamodule import RemoteDataModule

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    prepare(trainer_cores)
    data: LightningDataModule = ImagesData(num_blurs, workers)
    with contextlib.ExitStack() as stack:
        if hosts:
            running = stack.enter_context(data_hosts([{}] * hosts, host_cores, workers))
            data = RemoteDataModule(data, [host.address for host in running])
        model = Work(step_units, num_batches)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=data)
    return model.step_s


def main() -> None:
    """Run one experiment and print its table."""
    options = parser("compare the data service to a local DataLoader", rounds=3)
    options.add_argument("--experiment", choices=["idle", "bound"], default="idle")
    options.add_argument("--batches", type=int, default=200, help="number of measured batches, after the warm-up")
    options.add_argument("--step-units", type=int, help="work per step, in 0.2 ms; default: 200 for idle, 25 for bound")
    options.add_argument("--blur", type=int, help="how often an image is blurred; default: 0 for idle, 4 for bound")
    options.add_argument("--workers", type=int, default=2, help="workers for idle; bound uses one per core")
    args = options.parse_args()
    is_idle = args.experiment == "idle"
    shared = {
        "num_batches": args.batches,
        "num_blurs": (0 if is_idle else 4) if args.blur is None else args.blur,
        "step_units": args.step_units or (200 if is_idle else 25),
        "host_cores": args.host_cores,
    }
    every = args.host_cores + args.trainer_cores
    if is_idle:
        local = {"local DataLoader": {"workers": args.workers, "trainer_cores": args.trainer_cores}}
        ours = {"workers": args.workers, "trainer_cores": args.trainer_cores}
    else:
        counts = (len(every) - 1, len(every))
        local = {f"local DataLoader, {count} workers": {"workers": count, "trainer_cores": every} for count in counts}
        ours = {"workers": len(every) - 1, "trainer_cores": every[-1:], "host_cores": every[:-1]}
    cases: dict[str, dict[str, Any]] = {name: {"hosts": 0, **case} for name, case in local.items()}
    cases["lightning_sm"] = {"hosts": 1, **ours}
    variants = {name: partial(in_child, fit, **{**shared, **case}) for name, case in cases.items()}
    results = in_turn(variants, args.rounds)
    best = min((name for name in results if name in local), key=lambda name: statistics.median(results[name]))
    table = [
        [name, spread([1e3 * value for value in times], 1), ratio(times, results[best], 3)]
        for name, times in results.items()
    ]
    headers = ["loader", "ms per step", f"x {best}"]
    sys.stdout.write(machine() + draw_table(table, headers) + "\n")


if __name__ == "__main__":
    main()
