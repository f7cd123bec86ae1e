"""Two ranks of this machine train in one situation after the other; the log of rank 0 says what it thinks of each.

Arguments: a folder through which data hosts and network learn of the situation, and the addresses of the data hosts.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_sm import RemoteDataModule
from lightning_sm._log import show_log_lines
from tests.integration.data.datasets import HOST_VARIABLE, Data


@dataclass(frozen=True)
class Situation:
    """Where the time goes.

    Attributes:
        steps: Steps of each of the two ranks.
        num_bytes: Bytes of a batch.
        build_s: Seconds that a worker of host "a", and of host "b", takes for a batch.
        step_s: Seconds that the user's code of rank 0, and of rank 1, takes in a step.
        bytes_per_s: What the network of each data host lets through; 0: everything.
    """

    steps: int
    num_bytes: int = 1
    build_s: tuple[float, float] = (0.0, 0.0)
    step_s: tuple[float, float] = (0.02, 0.02)
    bytes_per_s: int = 0


# Figures of rank 1 reach rank 0 by heartbeats: some of the last steps of a situation count in the next one.
SITUATIONS = {
    "slow transforms": Situation(14, build_s=(0.3, 0.3), step_s=(0.1, 0.1)),
    "slow network": Situation(40, num_bytes=2_000_000, bytes_per_s=10_000_000),
    "slow code on rank 1": Situation(20, step_s=(0.02, 0.25)),
    "slow data host": Situation(70, build_s=(0.05, 0.4)),
    "nothing wrong": Situation(20, step_s=(0.05, 0.05)),
}


class Paced(Dataset):
    """Batches that take their time.

    Args:
        length: How many.
        situation: The situation.
    """

    def __init__(self, length, situation):
        self.length, self.situation = length, situation

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.situation.build_s["ab".index(os.environ[HOST_VARIABLE])])
        return torch.zeros(self.situation.num_bytes, dtype=torch.uint8)


def write(folder, situation):
    """Let the data hosts and the network know of a situation."""
    new = folder / "new"
    new.write_text(json.dumps(asdict(situation)))
    new.rename(folder / "situation")


def read(folder):
    """The present situation."""
    return Situation(**json.loads((folder / "situation").read_text()))


def make(folder):
    """The loader of a data host."""
    situation = read(folder)
    return DataLoader(Paced(2 * situation.steps, situation), batch_size=1)


class Model(LightningModule):
    """Takes its time.

    Args:
        step_s: Seconds by rank.
    """

    def __init__(self, step_s):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.step_s = step_s

    def training_step(self, batch, batch_idx):
        time.sleep(self.step_s[self.global_rank])
        return self.layer(batch[:, :1].float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def main():
    folder, addresses = Path(sys.argv[1]), sys.argv[2:]
    show_log_lines()
    module = RemoteDataModule(Data(partial(make, folder)), addresses)
    module._connection.closes_on_teardown = False
    is_main = os.environ.get("LOCAL_RANK", "0") == "0"
    for name, situation in SITUATIONS.items():
        if is_main:
            write(folder, situation)
            print(f"situation: {name}", file=sys.stderr, flush=True)
        trainer = Trainer(
            devices=2,
            strategy="ddp",
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=True,
            enable_progress_bar=False,
        )
        trainer.fit(Model(situation.step_s), datamodule=module)
    module.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
