# A script whose runs can be compared number by number: it fits a line through points in double precision. Each rank
# appends its losses to NOTES/<rank>.txt, as "train epoch batch_idx loss" and "val epoch batch_idx loss".
import os
import time
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

from lightning_sm import SageMakerCLI
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.topology import Role, Topology
from tests.integration.told_ranks import wait_until_told

NUM_SAMPLES, BATCH_SIZE = 480, 8


def points(length, seed):
    x = torch.randn(length, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Points(LightningDataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        if os.environ.get("FAILS", "").endswith("@open"):
            fail(place(), "open")
        return DataLoader(points(NUM_SAMPLES, 1), batch_size=BATCH_SIZE, shuffle=True, num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(points(NUM_SAMPLES // 4, 2), batch_size=BATCH_SIZE)


class Line(LightningModule):
    """Args: step_s: minimum seconds per step. told_by: the step that waits until a rank has been told to stop."""

    def __init__(self, step_s: float = 0.0, told_by: int = -1) -> None:
        super().__init__()
        self.step_s, self.told_by = step_s, told_by
        self.line = torch.nn.Linear(2, 1, dtype=torch.float64)

    def note(self, *words):
        folder = Path(os.environ["NOTES"])
        folder.mkdir(exist_ok=True)
        with open(folder / f"{self.global_rank}.txt", "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def training_step(self, batch, batch_idx):
        began = time.monotonic()
        fail(self.global_rank, self.global_step)
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.line(x), y)
        self.note("train", self.current_epoch, batch_idx, repr(loss.item()))
        if self.global_step == self.told_by:
            wait_until_told(self.trainer, Path(os.environ["NOTES"]))
        time.sleep(max(0.0, began + self.step_s - time.monotonic()))
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.line(x), y)
        if not self.trainer.sanity_checking:
            fail(self.global_rank, "val")
            self.note("val", self.current_epoch, batch_idx, repr(loss.item()))
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def fail(rank, moment):
    """Fail as FAILS says, "<kind>@<moment>" (a global step, "val" or "open"), on the rank or place FAILS_ON."""
    kind, _, at = os.environ.get("FAILS", "").partition("@")
    if str(rank) != os.environ.get("FAILS_ON") or str(moment) != at:
        return
    if kind == "exception":
        raise ArithmeticError(f"rank {rank} fails at step {moment}")
    if kind == "exit":
        os._exit(7)
    if kind == "sys.exit":
        raise SystemExit(9)
    if kind == "kill":
        os.kill(os.getpid(), 9)


def place():
    """Return the host's name for FAILS_ON where there are no ranks: its trainer node rank, or "data-0", "data-1"."""
    job = SageMakerJob.from_environment()
    topology = Topology.from_job(job)
    is_trainer = topology.role is Role.TRAINER
    return str(topology.node_rank) if is_trainer else f"data-{topology.data_hosts.index(job.current_host)}"


if __name__ == "__main__":
    if os.environ.get("FAILS") == "import" and os.environ.get("FAILS_ON", "all") in {"all", place()}:
        raise ImportError("the script fails before it has begun")
    SageMakerCLI(
        Line,
        Points,
        seed_everything_default=1,
        trainer_defaults={"enable_model_summary": False, "log_every_n_steps": 1, "logger": False},
    )
