"""Train in one situation after the other with two ranks on this machine; rank 0 logs its verdict on each.

Arguments: a folder from which data hosts and network read the situation, and the addresses of the data hosts.
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
    """A training with known bottlenecks.

    Attributes:
        steps: Steps of each of the two ranks.
        num_bytes: Bytes per batch.
        build_s: Seconds per batch of a worker on host "a" and on host "b".
        step_s: Seconds per step of the user's code on rank 0 and on rank 1.
        bytes_per_s: Network bandwidth of each data host; 0 for no limit.
    """

    steps: int
    num_bytes: int = 1
    build_s: tuple[float, float] = (0.0, 0.0)
    step_s: tuple[float, float] = (0.02, 0.02)
    bytes_per_s: int = 0


# Rank 1 sends its figures to rank 0 with heartbeats, so the last steps of a situation may count in the next one.
SITUATIONS = {
    "slow transforms": Situation(14, build_s=(0.3, 0.3), step_s=(0.1, 0.1)),
    "slow network": Situation(40, num_bytes=2_000_000, bytes_per_s=10_000_000),
    "slow code on rank 1": Situation(20, step_s=(0.02, 0.25)),
    "slow data host": Situation(70, build_s=(0.05, 0.4)),
    "nothing wrong": Situation(20, step_s=(0.05, 0.05)),
}


class Paced(Dataset):
    """A dataset of batches that take as long to build as the situation says.

    Args:
        length: Number of batches.
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
    """Pass a situation to the data hosts and the network."""
    new = folder / "new"
    new.write_text(json.dumps(asdict(situation)))
    new.rename(folder / "situation")


def read(folder):
    """Read the current situation."""
    return Situation(**json.loads((folder / "situation").read_text()))


def make(folder):
    """Create the loader of a data host."""
    situation = read(folder)
    return DataLoader(Paced(2 * situation.steps, situation), batch_size=1)


class Model(LightningModule):
    """A model with slow steps.

    Args:
        step_s: Seconds per step by rank.
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
    module._service_connection.closes_on_teardown = False
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
